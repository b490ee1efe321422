"""Cells of the tables: the runs of one task, share and row, one for each seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from platon.report.metric import Metric
from platon.report.paper import method_order
from platon.report.run import Run
from platon.report.statistics import mean
from platon.report.task import task_order


@dataclass(frozen=True)
class Cell:
    """The runs of one task, share and row, one for each seed."""

    runs: tuple[Run, ...]

    @property
    def converged(self) -> list[Run]:
        return [run for run in self.runs if run.converged]

    @property
    def all_converged(self) -> bool:
        """Only such a cell can be the best, and is tested."""
        return all(run.converged for run in self.runs)

    def values(self, metric: Metric) -> dict[int, float]:
        """Seed -> value, of the runs that converged."""
        return {run.seed: run.results[metric] for run in self.converged if metric in run.results}

    def mean(self, metric: Metric) -> float:
        """The mean over the seeds that converged."""
        return mean(list(self.values(metric).values()))


Cells = dict[tuple[str, float, str], Cell]


def gather(runs: Iterable[Run]) -> Cells:
    """(task, ratio, row) -> cell."""
    found: dict[tuple[str, float, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.task, run.ratio, run.row), []).append(run)
    return {key: Cell(tuple(sorted(seeds, key=lambda run: run.seed))) for key, seeds in found.items()}


def by_task_and_ratio(runs: Iterable[Run]) -> list[tuple[tuple[str, float], list[Run]]]:
    """((task, ratio), its runs), in the order of the tables."""

    def order(run: Run) -> tuple[object, ...]:
        return task_order(run.task), -run.ratio, method_order(run.method), run.row, run.seed

    return [
        (key, list(found)) for key, found in groupby(sorted(runs, key=order), key=lambda run: (run.task, run.ratio))
    ]


def by_row(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Row -> its runs."""
    rows: dict[str, list[Run]] = {}
    for run in runs:
        rows.setdefault(run.row, []).append(run)
    return rows
