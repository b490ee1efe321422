"""What the fault campaign does to runs and their files."""

import json
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fault_runs import Before
from platon.lab import checkpoint


def damage(name: str, how: str, dice: random.Random, last: Path) -> None:
    path = last / name
    content = bytearray(path.read_bytes())
    if how == "lost":
        path.unlink()
        return
    if how == "truncated":
        del content[dice.randrange(len(content)) :]
    else:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def set_another_version(last: Path) -> None:
    marker = json.loads((last / checkpoint.MARKER).read_text())
    (last / checkpoint.MARKER).write_text(json.dumps({**marker, "format": checkpoint.FORMAT + 1}))


def add_foreign_files(last: Path) -> None:
    (last.parent / "checkpoint-99").write_text("no folder")
    (last.parent / "checkpoint-new").mkdir()
    (last.parent / "notes.txt").write_text("mine")
    (last / "notes.txt").write_text("mine")


def poison(number: float) -> None:
    from platon.lab.trainer import LabTrainer

    step = LabTrainer.training_step

    def poisoned(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = step(self, *args, **kwargs)
        if self.state.global_step == 6:
            next(p for p in self.model.parameters() if p.grad is not None).grad.view(-1)[0] = number
        return loss

    LabTrainer.training_step = poisoned  # type: ignore[method-assign]


def set_clock_back() -> None:
    real, asked = time.time, iter(range(1 << 60))
    time.time = lambda: real() - 86400 * next(asked)  # type: ignore[assignment]


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[tuple[Path, Before | None, Callable[[], None]]]:
    """A disk of this size, what a run does first, and what makes room: a tmpfs for root, a limit on files elsewhere."""
    place.mkdir(exist_ok=True)
    mounted = os.geteuid() == 0 and (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, check=False
        ).returncode
        == 0
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 4, resource.RLIM_INFINITY))

    def more() -> None:
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=256m", str(place)], check=True)

    try:
        yield place, None if mounted else limit, more
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
