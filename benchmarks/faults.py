"""The fault campaign: a real `platon prune` is disturbed in many ways, and must end as if it had not been.

    python benchmarks/faults.py                     the long form: 100 kills; minutes
    python benchmarks/faults.py --short             the short one, which CI runs
    python benchmarks/faults.py --output FILE       go on with what FILE counted already, and leave the counts there

Each run is a process of its own, forked from this one so that nothing is imported twice, and killed with SIGKILL. The
undisturbed run is trained once for each setting; a disturbed one has to match it bit for bit. Prints JSON; the exit
code is 1 if anything was not as promised.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

from disturbances import add_foreign_files, damage, poison, set_another_version, set_clock_back, small_disk
from fault_runs import LOGS, SETTINGS, finish, is_same, log_of, run, start, torchrun, unreadable
from platon.lab import checkpoint
from platon.lab.record import read_record


class Campaign:
    """The counts, and the places where the runs are."""

    def __init__(self, place: Path, output: Path | None, seed: int) -> None:
        self.place, self.output, self.random = place, output, random.Random(seed)
        said = json.loads(output.read_text()) if output is not None and output.exists() else {}
        self.counts = Counter(said.get("counts", {}))
        self.failures: list[str] = said.get("failures", [])
        self._reference: dict[str, tuple[Path, float]] = {}
        self._number = 0

    def leave(self) -> None:
        """Write the counts down."""
        if self.output is not None:
            temporary = self.output.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.result(), indent=1) + "\n")
            temporary.replace(self.output)

    def result(self) -> dict[str, Any]:
        return {"counts": dict(sorted(self.counts.items())), "failures": self.failures}

    def reference(self, setting: str) -> tuple[Path, float]:
        """The undisturbed run, and the seconds that it took."""
        if setting not in self._reference:
            began = time.monotonic()
            folder = self.fresh(f"reference-{len(self._reference)}")
            code, said = run(folder, *SETTINGS[setting])
            assert code == 0, said
            self._reference[setting] = (folder, time.monotonic() - began)
        return self._reference[setting]

    def fresh(self, name: str) -> Path:
        """A folder that is not there yet."""
        self._number += 1
        return self.place / f"{name}-{self._number}"

    def expect(self, what: str, holds: bool, said: str = "") -> None:
        """Count it, as promised or not."""
        self.counts[what] += 1
        if not holds:
            self.failures.append(f"{what}: {' '.join(said.split())[-400:]}")
        self.leave()

    def ends_as(self, setting: str, what: str, folder: Path, code: int, said: str) -> None:
        """The run is finished, and is the undisturbed one."""
        same = code == 0 and is_same(folder, self.reference(setting)[0])
        self.expect(what, same, said)
        if same:
            shutil.rmtree(folder)

    # --- the faults ---------------------------------------------------------------------------------------------------

    def kill(self, setting: str) -> None:
        """One run, killed at random moments until it is through."""
        _, seconds = self.reference(setting)
        folder = self.fresh("killed")
        while True:
            child = start(folder, *SETTINGS[setting], resume=folder.exists() and (folder / "run.json").exists())
            time.sleep(self.random.uniform(0.0, 1.0) * seconds)
            os.kill(child, signal.SIGKILL)
            code = finish(child)
            if code == -signal.SIGKILL:
                self.counts["SIGKILLs"] += 1
                self.expect("kills after which every marked checkpoint can be read", unreadable(folder) == 0)
                continue
            self.ends_as(setting, "killed runs that ended as the undisturbed", folder, code, str(code))
            return

    @contextmanager
    def halfway(self) -> Iterator[Path]:
        """A run that was killed with two complete checkpoints, the second of them after step 8."""
        folder = self.fresh("halfway")
        child = start(folder, *SETTINGS["platon"])
        while not (folder / "checkpoints" / "checkpoint-8" / checkpoint.MARKER).exists():
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        finish(child)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    def damage(self, short: bool) -> None:
        """Checkpoints that are not what was written: the last good one is used."""
        with self.halfway() as halfway:
            last, _ = checkpoint.last_complete(halfway / "checkpoints")
            assert last is not None
            names = sorted(path.name for path in last.iterdir())
            ways = ("truncated", "bit-flipped", "lost")
            for name, how in zip(names[::4], cycle(ways)) if short else product(names, ways):
                self.resume_after(halfway, partial(damage, name, how, self.random), how)
            self.resume_after(halfway, set_another_version, "from another version")
            self.resume_after(halfway, self.from_another_model, "from another model")
            self.resume_after(halfway, add_foreign_files, "foreign files", is_refused=False)

    def resume_after(self, halfway: Path, change: Callable[[Path], None], how: str, is_refused: bool = True) -> None:
        """A copy of the run with its last checkpoint changed goes on, and passes over it in a sentence."""
        folder = self.fresh("damaged")
        shutil.copytree(halfway, folder)
        last, _ = checkpoint.last_complete(folder / "checkpoints")
        assert last is not None
        change(last)
        code, said = run(folder, *SETTINGS["platon"], resume=True)
        refused = sum(line.startswith("passing over a checkpoint: ") for line in said.splitlines())
        self.expect(f"checkpoints {how}: said so in one sentence", refused == int(is_refused), said)
        self.ends_as("platon", f"checkpoints {how}: went on from the last good one", folder, code, said)

    def from_another_model(self, last: Path) -> None:
        """What is under its name is a whole checkpoint, of other settings."""
        folder = self.fresh("other")
        settings = ("--dense", "none", "--steps", "8", "--cooldown", "2", "--keep", "0.3", "--seed", "5")
        code, said = run(folder, *settings, "--keep-checkpoints")
        assert code == 0, said
        shutil.rmtree(last)
        shutil.copytree(folder / "checkpoints" / "checkpoint-8", last)
        shutil.rmtree(folder)

    def full_disk(self, sizes: list[int]) -> None:
        """A disk that is full after so many bytes; then there is room again."""
        for size in sizes:
            with small_disk(self.place / "disk", size) as (place, before, more):
                folder = place / f"run-{size}"
                code, said = run(folder, *SETTINGS["platon"], before=before)
                sentence = [line for line in said.splitlines() if line.startswith("error: ")]
                self.expect("full disks: one sentence, or done", (code == 2 and len(sentence) == 1) or code == 0, said)
                self.expect("full disks: every marked checkpoint can be read", unreadable(folder) == 0)
                more()
                code, said = run(folder, *SETTINGS["platon"], resume=(folder / "run.json").exists())
                self.ends_as("platon", "full disks: went on when there was room", folder, code, said)

    def diverge(self) -> None:
        """Numbers that are not finite end a run with a record that says so."""
        for what, before, flags in (
            ("NaN gradients", lambda: poison(float("nan")), []),
            ("Inf gradients", lambda: poison(float("inf")), []),
            ("exploding loss", None, ["--learning-rate", "1e30", "--clip", "0"]),
        ):
            folder = self.fresh("diverged")
            code, said = run(folder, *SETTINGS["platon"], *flags, before=before)
            self.expect(f"{what}: the record says why", code == 0 and bool(read_record(folder)["not_converged"]), said)

    def clock(self) -> None:
        """The clock of the process is set back by a day, again and again."""
        folder = self.fresh("clock")
        code, said = run(folder, *SETTINGS["platon"], before=set_clock_back)
        self.ends_as("platon", "the clock set back", folder, code, said)

    def two_in_one_folder(self) -> None:
        """The second is refused, and the first is not disturbed."""
        folder = self.fresh("shared")
        child = start(folder, *SETTINGS["platon"])
        while not (folder / "run.json").exists():
            time.sleep(0.002)
        for resume in (True, False):
            log_of(folder).unlink(missing_ok=True)  # the first goes on writing to it, and the second has its own
            code, said = run(folder, *SETTINGS["platon"], resume=resume)
            self.expect("second processes refused", code == 2 and said.count("error: ") == 1, said)
        self.ends_as("platon", "first processes undisturbed by a second", folder, finish(child), "")

    def rank_killed(self) -> None:
        """One of two ranks is killed; the job ends, and goes on to what the undisturbed job ends with."""
        whole, folder = self.fresh("two-ranks"), self.fresh("rank-killed")
        torchrun(whole).wait()
        job = torchrun(folder)
        while not (folder / "checkpoints" / "checkpoint-6" / checkpoint.MARKER).exists() and job.poll() is None:
            time.sleep(0.005)
        ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        code = job.wait()
        self.expect("ranks killed: the job ends", code != 0 and not (folder / "record.json").exists(), str(code))
        code = torchrun(folder, "--resume").wait()
        self.expect("ranks killed: resumed to the undisturbed job's bits", code == 0 and is_same(folder, whole))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="a few of each")
    parser.add_argument("--kills", type=int, default=None, help="SIGKILLs to reach; 100, or 4 for --short")
    parser.add_argument("--only", nargs="*", default=None, help="kill damage disk diverge clock two rank")
    parser.add_argument("--output", type=Path, default=None, help="JSON with the counts")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; another each time by default")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no disk stays mounted
    kills = options.kills or (4 if options.short else 100)
    with tempfile.TemporaryDirectory() as place:
        campaign = Campaign(Path(place), options.output, options.seed or random.SystemRandom().randrange(1 << 30))
        sizes = [1_000_000, 4_000_000] if options.short else [1 << 12, *range(250_000, 14_000_000, 500_000)]
        faults: dict[str, Callable[[], None]] = {
            "damage": lambda: campaign.damage(options.short),
            "disk": lambda: campaign.full_disk(sizes),
            "diverge": campaign.diverge,
            "clock": campaign.clock,
            "two": campaign.two_in_one_folder,
        }
        if not options.short:
            faults["rank"] = campaign.rank_killed
        for name, fault in faults.items():
            if options.only is None or name in options.only:
                fault()
        settings = list(SETTINGS)[: 2 if options.short else None]
        number = 0
        while (options.only is None or "kill" in options.only) and campaign.counts["SIGKILLs"] < kills:
            campaign.kill(settings[number % len(settings)])
            number += 1
        campaign.leave()
        shutil.rmtree(LOGS)
        print(json.dumps(campaign.result(), indent=1))
        sys.exit(1 if campaign.failures else 0)


if __name__ == "__main__":
    main()
