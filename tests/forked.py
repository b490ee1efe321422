"""Processes that are forked from one that has imported everything, because imports take longer than a small run."""

import gc
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platon.lab.sweep.workers import _die_with_parent

FORK = multiprocessing.get_context("fork")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["platon.cli", "platon.lab.run", "platon.report.run_figure", "platon.lab.tasks.glue"])
PATIENCE = 900  # seconds; a process that takes so long on a busy machine hangs


@dataclass
class Command:
    """A process that runs `platon`, and the files with what it says."""

    process: Any
    out_file: Path
    err_file: Path

    def wait(self) -> int:
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, "it hangs"
        return int(self.process.exitcode)

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text()

    def kill_when(self, seen: Callable[[], bool], number: int = signal.SIGKILL) -> None:
        """Send the signal as soon as `seen` is true."""
        end = time.monotonic() + PATIENCE
        while not seen() and self.process.is_alive():
            assert time.monotonic() < end, "it hangs"
            time.sleep(0.0005)
        if self.process.is_alive():
            os.kill(self.process.pid, number)


class Forked:
    """What `subprocess.Popen` gives for `python ...`, of a process that is forked from this one and dies with it.

    Args:
        words: `python` and what follows it: a script, or `-m` and a module, and their arguments.
        log: the file to which it writes what it says; otherwise it shares ours.
        environment: variables to set.
        ranks: so many processes run it, started and watched as torchrun does.
    """

    def __init__(
        self, words: Sequence[str], log: Path | None = None, environment: Mapping[str, str] = {}, ranks: int = 0
    ) -> None:
        def run() -> None:
            _die_with_parent()
            gc.freeze()  # what was imported
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                for number in (1, 2):
                    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
                # pytest's own do not write to these numbers
                sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
            os.environ.update(environment)
            _forget_trainings()
            if ranks:
                _watch(words, ranks)
            else:
                _interpret(words)

        self.process = FORK.Process(target=run)
        self.process.start()
        self.pid, self.kill, self.terminate = self.process.pid, self.process.kill, self.process.terminate

    def poll(self) -> int | None:
        return self.process.exitcode

    returncode = property(poll)

    def wait(self) -> int | None:
        self.process.join(PATIENCE)
        assert self.returncode is not None, "it hangs"
        return self.returncode


def _forget_trainings() -> None:
    """Undo what a Trainer of an earlier test has noted for this process: that it is one alone, and no rank."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def _interpret(words: Sequence[str]) -> None:
    """What `python` does with these words."""
    is_module = words[1] == "-m"
    sys.argv = list(words[1 + is_module :])
    sys.path.insert(0, str(Path.cwd() if is_module else Path(sys.argv[0]).parent))
    (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")


def _watch(words: Sequence[str], ranks: int) -> None:
    """What torchrun does, but for new interpreters: it starts the ranks, and ends all of them when one fails."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def interpret() -> None:
        try:
            _interpret(words)
        except SystemExit as ended:  # the agent expects a function that returns
            if ended.code:
                raise

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(config, interpret)()


def rank_variables(count: int) -> list[dict[str, str]]:
    """What torchrun tells each of so many ranks in its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def run_ranks(work: Callable[[int], None], count: int) -> None:
    """Call `work` with each rank, in processes forked from this one; it has to come to its end in all of them."""

    def run(rank: int) -> None:
        work(rank)
        os._exit(0)  # gloo's threads may abort an interpreter that ends in the usual way

    ranks = [FORK.Process(target=run, args=(rank,)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * count


def start(
    place: Path, words: Sequence[Any], limit: int | None = None, environment: Mapping[str, str] | None = None
) -> Command:
    """Start `platon` with these words in a folder.

    Args:
        place: where it runs; what it says is left there in files whose names are numbers.
        words: after `platon`.
        limit: the size of the largest file that it may write.
        environment: variables to set.
    """
    number = len(list(place.glob("*.out")))
    out, err = place / f"{number}.out", place / f"{number}.err"
    out.touch()
    given = ([str(word) for word in words], place, out, err, limit, dict(environment or {}))
    process = SERVER.Process(target=_run, args=given)
    process.start()
    return Command(process, out, err)


def _run(
    words: list[str], place: Path, out: Path, err: Path, limit: int | None, environment: Mapping[str, str]
) -> None:
    """What the new process does."""
    gc.freeze()  # what the server imported
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os.chdir(place)
    os.environ.update(environment)
    sys.argv = ["platon", *words]
    from platon.cli import main

    main()
