"""The display of a sweep: which trials are done, running and failed, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from platon.lab.duration import in_words
from platon.lab.record import read_record
from platon.lab.sweep.spec import Trial
from platon.lab.sweep.workers import Event


class Display:
    """Follows the events of a sweep, and renders itself for `rich.live.Live`.

    Args:
        trials: all trials of the sweep.
        workers: how many run at the same time.
        seconds: how long each trial is expected to take, where that is known.
    """

    def __init__(self, trials: Sequence[Trial], workers: int, seconds: dict[Trial, float]) -> None:
        self.trials, self.workers, self.expected = trials, workers, seconds
        self.done = {trial for trial in trials if trial.is_finished}
        self.taken: dict[Trial, float] = {}  # seconds of the trials that have finished since
        self.running: dict[Trial, float] = {}
        self.failed: dict[Trial, str] = {}

    def update(self, event: Event) -> None:
        trial = event.trial
        if event.what == "started":
            self.running[trial] = time.monotonic()
            self.failed.pop(trial, None)
            return
        self.running.pop(trial, None)
        if event.what == "finished":
            self.done.add(trial)
            self.taken[trial] = float(read_record(trial.folder)["seconds"])
        else:
            self.failed[trial] = event.why

    @property
    def left(self) -> float | None:
        """Seconds until all trials are done; `None` while no duration is known.

        What was expected leaves out evaluation and other load on the machine. The trials that have finished correct it:
        the others take longer by the same factor. Without an expectation, a trial takes as long as their mean.
        """
        foreseen = [trial for trial in self.taken if trial in self.expected]
        factor = 1.0
        if foreseen:
            factor = sum(self.taken[t] for t in foreseen) / max(sum(self.expected[t] for t in foreseen), 1e-9)
        typical = sum(self.taken.values()) / len(self.taken) if self.taken else None
        total = 0.0
        for trial in self.trials:
            if trial in self.done or trial in self.failed:
                continue
            seconds = factor * self.expected[trial] if trial in self.expected else typical
            if seconds is None:
                return None
            spent = time.monotonic() - self.running[trial] if trial in self.running else 0.0
            total += max(seconds - spent, 0.0)
        return total / self.workers

    @property
    def summary(self) -> str:
        """Such as "3 of 12 done, 2 running, 0 failed, about 1 h 5 min left"."""
        left = self.left
        counts = f"{len(self.done)} of {len(self.trials)} done, {len(self.running)} running, {len(self.failed)} failed"
        return counts + ("" if not left else f", about {in_words(left)} left")

    def __rich__(self) -> Group:
        rows = Table.grid(padding=(0, 2))
        for trial, began in self.running.items():
            rows.add_row(Text("running", style="cyan"), trial.name, in_words(time.monotonic() - began))
        for trial, why in self.failed.items():
            rows.add_row(Text("failed", style="red"), trial.name, why)
        return Group(ProgressBar(total=len(self.trials), completed=len(self.done), width=60), self.summary, rows)
