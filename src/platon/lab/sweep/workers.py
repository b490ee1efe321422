"""Who runs the trials of a sweep: processes of this machine, or a Ray cluster. Both yield events."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from platon.lab.errors import UserError
from platon.lab.sweep.spec import Trial


@dataclass(frozen=True)
class Event:
    """A change of a trial's state.

    Args:
        trial: which.
        what: its new state.
        why: if it failed, the last line of its output.
    """

    trial: Trial
    what: Literal["started", "finished", "failed"]
    why: str = ""


Workers = Callable[[Sequence[Trial], Path, int], Generator[Event | None, None, None]]


def run_locally(trials: Sequence[Trial], folder: Path, workers: int) -> Generator[Event | None, None, None]:
    """Run `workers` processes at a time. Yields an event for each change, and `None` while nothing changes."""
    waiting = list(trials)
    running: dict[Trial, subprocess.Popen[bytes]] = {}
    with _stopping(running):
        while waiting or running:
            while waiting and len(running) < workers:
                trial = waiting.pop(0)
                running[trial] = start(trial.command(), trial.log(folder), environment(workers))
                yield Event(trial, "started")
            for trial, process in list(running.items()):
                if process.poll() is not None:
                    del running[trial]
                    yield _ended(trial, process.returncode, folder)
            yield None
            time.sleep(0.1)


def run_on_ray(trials: Sequence[Trial], folder: Path, workers: int) -> Generator[Event | None, None, None]:
    """Run as many at a time as the cluster has room for; all its machines must see `folder`."""
    try:
        import ray
    except ImportError:
        raise UserError("--engine ray needs a package: pip install ray") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    settings: dict[str, Any] = {} if address else {"num_cpus": workers, "include_dashboard": False}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **settings)
    threads = 1 if not address else int(environment(workers)["OMP_NUM_THREADS"])

    # Not retried by Ray: the next `platon sweep` resumes a failed run from its checkpoints.
    @ray.remote(num_cpus=threads, max_retries=0)
    def run(command: list[str], log: str, variables: dict[str, str]) -> int:
        return start(command, Path(log), variables).wait()

    try:
        place = folder.resolve()
        pending = {run.remote(one.command(), str(one.log(place)), environment(workers)): one for one in trials}
        for trial in trials:
            yield Event(trial, "started")
        while pending:
            done, _ = ray.wait(list(pending), timeout=0.2)
            for reference in done:
                trial = pending.pop(reference)
                try:
                    code = ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield Event(trial, "failed", str(error).splitlines()[0])
                    continue
                yield _ended(trial, code, folder)
            yield None
    finally:
        ray.shutdown()


WORKERS: dict[str, Workers] = {"local": run_locally, "ray": run_on_ray}


def environment(workers: int) -> dict[str, str]:
    """The environment of a run: an equal share of the cores, unless the user has set OMP_NUM_THREADS."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def start(command: Sequence[str], log: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that a Ctrl-C in the terminal reaches it only through us."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env=variables,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )


def _die_with_parent() -> None:
    """Have the kernel kill this process when the sweep is killed; otherwise it would go on holding its run folder."""
    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


def _ended(trial: Trial, code: int, folder: Path) -> Event:
    """A trial is finished if it left a record, whatever its exit code."""
    if trial.is_finished:
        return Event(trial, "finished")
    if code < 0:
        return Event(trial, "failed", f"killed by {signal.Signals(-code).name}")
    lines = trial.log(folder).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Event(trial, "failed", lines[-1] if lines else f"exit code {code}")


@contextmanager
def _stopping(running: dict[Trial, subprocess.Popen[bytes]]) -> Iterator[None]:
    """When the block ends, for whatever reason, send SIGTERM to the runs and wait for their checkpoints."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running.values():
            if process.poll() is None:
                process.terminate()
        for process in running.values():
            process.wait()
