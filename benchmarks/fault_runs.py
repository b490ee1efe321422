"""The runs of the fault campaign: started in processes of their own, waited for, and compared."""

import gc
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file

import platon.deploy.ship
import platon.lab.run
import platon.lab.tasks.digits  # noqa: F401  # before the fork, so that no run imports them again
from platon import cli
from platon.lab import checkpoint
from platon.lab.record import read_history, read_record
from platon.report import run_figure  # noqa: F401

TINY = shlex.split(
    "--train-rows 128 --eval-rows 40 --batch 16 --steps 12 --eval-every 3 --log-every 2 --checkpoint-every 2 "
    "--every 2 --warmup 1 --cooldown 5 --checkpoints 2 --no-fast"
)
SETTINGS: dict[str, list[str]] = {
    "platon": ["--dense", "none"],
    "l0": ["--dense", "none", "--method", "l0"],
    "movement, heads": ["--dense", "none", "--method", "movement", "--units", "heads+neurons"],
    "dense first": ["--dense", "first", "--steps", "6", "--cooldown", "2"],
}
LOGS = Path(tempfile.mkdtemp())  # what the runs say; not where they write, for that may be a full disk
Before = Callable[[], None]


def log_of(folder: Path) -> Path:
    return LOGS / f"{folder.name}.log"


def start(folder: Path, *flags: str, resume: bool = False, before: Before | None = None) -> int:
    """A run in a process of its own; `before` is called in it first."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        log = os.open(log_of(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        gc.freeze()  # what was imported before the fork: there is no garbage in it
        if before is not None:
            before()
        sys.argv = ["platon", "prune", *TINY, *flags, "--output", str(folder), *(["--resume"] if resume else [])]
        cli.main()
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    except BaseException:
        os._exit(99)
    os._exit(0)


def finish(child: int) -> int:
    """The exit code; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, *flags: str, resume: bool = False, before: Before | None = None) -> tuple[int, str]:
    """To its end: the exit code, and what it said."""
    code = finish(start(folder, *flags, resume=resume, before=before))
    return code, log_of(folder).read_text(errors="replace")


def is_same(folder: Path, other: Path) -> bool:
    """The same model, bit for bit, and the same record but for times."""
    mine, theirs = (load_file(place / "model" / "model.safetensors") for place in (folder, other))
    keys = ("results", "best", "kept", "layers", "parameters", "settings", "plan", "data", "not_converged")
    records = [read_record(place) for place in (folder, other)]
    lines = [[{**line, "loss": 0} for line in read_history(place)] for place in (folder, other)]
    return (
        mine.keys() == theirs.keys()
        and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
        and all(records[0][key] == records[1][key] for key in keys)
        and lines[0] == lines[1]
    )


def unreadable(folder: Path) -> int:
    """Checkpoints with the marker that cannot be read, of the run and of its twin."""
    bad = 0
    for place in (folder / "checkpoints", folder / "dense" / "checkpoints"):
        for path in checkpoint.steps(place).values():
            if (path / checkpoint.MARKER).exists():
                bad += checkpoint.problem(path) is not None
                for name in ("optimizer.pt", "scheduler.pt"):
                    torch.load(path / name, weights_only=True)
    return bad


def torchrun(folder: Path, *flags: str) -> "subprocess.Popen[bytes]":
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "platon", "prune"]
    return subprocess.Popen(
        [*launch, *TINY, *SETTINGS["platon"], "--output", str(folder), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
