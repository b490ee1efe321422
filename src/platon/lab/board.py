"""The board of a sweep: what is done, running and failed, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from platon.lab.crew import Event
from platon.lab.record import read_record
from platon.lab.sweep import Job


class Board:
    """Counts events, and draws itself for `rich.live.Live`.

    Args:
        jobs: all runs of the sweep.
        workers: how many run at once.
        seconds: what a run is expected to take.
    """

    def __init__(self, jobs: Sequence[Job], workers: int, seconds: dict[Job, float]) -> None:
        """Runs that are finished already count as done."""
        self.jobs, self.workers, self.expected = jobs, workers, seconds
        self.done = {job for job in jobs if job.finished}
        self.before = len(self.done)
        self.running: dict[Job, float] = {}
        self.failed: dict[Job, str] = {}

    def take(self, event: Event) -> None:
        """One thing happened."""
        if event.what == "started":
            self.running[event.job] = time.monotonic()
            self.failed.pop(event.job, None)
            return
        self.running.pop(event.job, None)
        if event.what == "finished":
            self.done.add(event.job)
            self.expected[event.job] = float(read_record(event.job.folder)["seconds"])
        else:
            self.failed[event.job] = event.why

    @property
    def left(self) -> float | None:
        """Seconds until all runs are through; `None` while nothing is known."""
        measured = [self.expected[job] for job in self.done if job in self.expected]
        typical = sum(measured) / len(measured) if measured else None
        total = 0.0
        for job in self.jobs:
            if job in self.done or job in self.failed:
                continue
            seconds = self.expected.get(job, typical)
            if seconds is None:
                return None
            spent = time.monotonic() - self.running[job] if job in self.running else 0.0
            total += max(seconds - spent, 0.0)
        return total / self.workers

    def __rich__(self) -> Group:
        """A bar, a line of counts, the runs under way, and what failed."""
        left = self.left
        counts = (
            f"{len(self.done)} of {len(self.jobs)} done, {len(self.running)} running, {len(self.failed)} failed"
            f"{'' if left is None else f', about {in_words(left)} left'}"
        )
        rows = Table.grid(padding=(0, 2))
        for job, began in self.running.items():
            rows.add_row(Text("running", style="cyan"), job.name, in_words(time.monotonic() - began))
        for job, why in self.failed.items():
            rows.add_row(Text("failed", style="red"), job.name, why)
        return Group(ProgressBar(total=len(self.jobs), completed=len(self.done), width=60), counts, rows)


def in_words(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
