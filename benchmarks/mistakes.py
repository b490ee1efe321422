"""How long ten typical mistakes on the command line wait for their answer. The bar is 2 seconds for each.

    python benchmarks/mistakes.py

Each one is a process of its own, as a user starts it; the median of three.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAR = 2.0

#: what is wrong -> the words after `platon`
MISTAKES: dict[str, str] = {
    "wrong task": "prune --task sst3",
    "wrong file": "prune --task text --data revews.csv",
    "missing column": "prune --task text --data reviews.csv --label-column stars",
    "bad share": "prune --keep 80",
    "unknown method": "prune --method plato",
    "run folder exists": "prune --output begun",
    "run folder missing": "eval runs/nothing",
    "wrong recipe": "prune --recipe bert-sst",
    "not a model folder": "speed empty",
    "misspelt flag": "prune --kep 0.1",
}


def make_files(folder: Path) -> None:
    """What the mistakes are made with."""
    (folder / "reviews.csv").write_text("review,sentiment\ngood,positive\nbad,negative\n")
    for name in ("begun", "empty", "runs"):
        (folder / name).mkdir()
    (folder / "begun" / "run.json").write_text("{}")


def main() -> int:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    slow = 0
    with tempfile.TemporaryDirectory() as place:
        make_files(Path(place))
        for what, words in MISTAKES.items():
            times = []
            for _ in range(3):
                start = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-m", "platon", *words.split()],
                    cwd=place,
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                times.append(time.perf_counter() - start)
                assert done.returncode == 2, (words, done.returncode, done.stderr)
            middle = statistics.median(times)
            slow += middle >= BAR
            print(f"{what:20} {middle:5.2f} s   platon {words}")
    print(f"{len(MISTAKES) - slow} of {len(MISTAKES)} are answered in less than {BAR:g} s")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
