"""A short training of every task on real data: does each run end to end?

    python benchmarks/tasks.py --data DIR --model FOLDER

DIR holds the data in the hub's layout; FOLDER is a pre-trained text encoder. CIFAR-100 gets a small ViT built from
config. Each task trains a few steps, is pruned to 10 %, saved, loaded again and measured: one JSON line each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TASKS = ("mnli", "rte", "qnli", "mrpc", "qqp", "sst2", "cola", "stsb", "squad", "cifar100")


def measure(task: str, arguments: argparse.Namespace, place: Path) -> dict[str, object]:
    run = place / task
    command = [sys.executable, "-m", "platon"]
    model = [] if task == "cifar100" else ["--model", str(arguments.model)]
    sizes = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("train-rows", "eval-rows", "steps")]
    began = time.monotonic()
    subprocess.run(
        [
            *command,
            "prune",
            f"--task={task}",
            f"--data={arguments.data}",
            *model,
            *sizes,
            "--batch=16",
            f"--output={run}",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.monotonic() - began
    subprocess.run([*command, "eval", str(run)], check=True, stdout=subprocess.DEVNULL)
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    return {"task": task, "results": record["results"], "kept": record["kept"], "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train-rows", type=int, default=256)
    parser.add_argument("--eval-rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for task in TASKS:
            print(json.dumps(measure(task, arguments, Path(place))), flush=True)


if __name__ == "__main__":
    main()
