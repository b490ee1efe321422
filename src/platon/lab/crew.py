"""Crews: who runs the jobs of a sweep, processes of this machine or a Ray cluster; they tell what happens."""

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
from platon.lab.sweep import Job, environment


@dataclass(frozen=True)
class Event:
    """What happened to a job; `why` is the last line of one that failed."""

    job: Job
    what: Literal["started", "finished", "failed"]
    why: str = ""


Crew = Callable[[Sequence[Job], Path, int], Generator[Event | None, None, None]]


def run_here(jobs: Sequence[Job], folder: Path, workers: int) -> Generator[Event | None, None, None]:
    """`workers` processes of this machine at a time. Gives an event for each change, and `None` now and then."""
    waiting = list(jobs)
    running: dict[Job, subprocess.Popen[bytes]] = {}
    with _stopping(running):
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                running[job] = start(job.words(), job.log(folder), environment(workers))
                yield Event(job, "started")
            for job, process in list(running.items()):
                if process.poll() is not None:
                    del running[job]
                    yield ended(job, process.returncode, folder)
            yield None
            time.sleep(0.1)


def run_on_ray(jobs: Sequence[Job], folder: Path, workers: int) -> Generator[Event | None, None, None]:
    """As many at a time as the cluster has room for; `folder` must be one that all its machines share."""
    try:
        import ray
    except ImportError:
        raise UserError("--engine ray needs a package: pip install ray") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    settings: dict[str, Any] = {} if address else {"num_cpus": workers, "include_dashboard": False}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **settings)
    threads = 1 if not address else int(environment(workers)["OMP_NUM_THREADS"])

    # Not retried: a run that is started again goes on from its checkpoints, and that is for the next sweep to do.
    @ray.remote(num_cpus=threads, max_retries=0)
    def run(words: list[str], log: str, variables: dict[str, str]) -> int:
        return start(words, Path(log), variables).wait()

    try:
        place = folder.resolve()
        pending = {run.remote(job.words(), str(job.log(place)), environment(workers)): job for job in jobs}
        for job in jobs:
            yield Event(job, "started")
        while pending:
            done, _ = ray.wait(list(pending), timeout=0.2)
            for reference in done:
                job = pending.pop(reference)
                try:
                    code = ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield Event(job, "failed", str(error).splitlines()[0])
                    continue
                yield ended(job, code, folder)
            yield None
    finally:
        ray.shutdown()


CREWS: dict[str, Crew] = {"local": run_here, "ray": run_on_ray}


def start(words: Sequence[str], log: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process of its own session, so that only we pass signals on to it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            words,
            stdout=file,
            stderr=file,
            env=variables,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )


def _die_with_parent() -> None:
    """A killed sweep leaves no runs behind that hold their folders; they lose what came after their last checkpoint."""
    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


def ended(job: Job, code: int, folder: Path) -> Event:
    """A run has finished if it left a record, whatever else it did."""
    if job.finished:
        return Event(job, "finished")
    if code < 0:
        return Event(job, "failed", f"killed by {signal.Signals(-code).name}")
    lines = job.log(folder).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Event(job, "failed", lines[-1] if lines else f"exit code {code}")


@contextmanager
def _stopping(running: dict[Job, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whatever ends the sweep ends its runs, at a checkpoint: they are told once, and waited for."""

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
