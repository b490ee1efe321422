"""Cells: the runs of one task, share and row; and what a table of them is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from platon.report.runs import Number, Run, row_order, task_order
from platon.report.statistics import mean

TASKS = {"mnli": "MNLI", "rte": "RTE", "qnli": "QNLI", "mrpc": "MRPC", "qqp": "QQP", "sst2": "SST-2", "cola": "CoLA"}
TASKS |= {"stsb": "STS-B", "squad": "SQuAD", "cifar100": "CIFAR-100", "imagenet": "ImageNet"}
METRICS = {"accuracy": "Acc", "f1": "F1", "matthews": "Mcc", "pearson": "P", "spearman": "S", "exact_match": "EM"}
METRICS |= {"matched accuracy": "m", "mismatched accuracy": "mm"}
NOT_RUN, FAILED = "--", "N.A."


@dataclass(frozen=True)
class Span:
    """A piece of a cell."""

    text: str
    bold: bool = False


Spans = tuple[Span, ...]


@dataclass(frozen=True)
class Table:
    """Ready to be written in any format.

    Args:
        name: a word for file names.
        title: stands above it.
        head: one text a column.
        body: rows of cells.
        marks: how many of the columns name the row.
        rules: rows before which a line is drawn.
        notes: stand below it.
    """

    name: str
    title: str
    head: tuple[str, ...]
    body: tuple[tuple[Spans, ...], ...]
    marks: int
    rules: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """The runs of one task, share and row: one a seed."""

    runs: tuple[Run, ...]

    @property
    def converged(self) -> list[Run]:
        """Those with a result."""
        return [run for run in self.runs if run.converged]

    @property
    def whole(self) -> bool:
        """All seeds converged: the cell may be the best, and be tested."""
        return all(run.converged for run in self.runs)

    def values(self, number: Number) -> dict[int, float]:
        """Seed -> percent, of the runs that converged."""
        return {run.seed: run.numbers[number] for run in self.converged if number in run.numbers}

    def mean(self, number: Number) -> float:
        """Over the seeds that converged."""
        return mean(list(self.values(number).values()))


Cells = dict[tuple[str, float, str], Cell]


def gather(runs: Iterable[Run]) -> Cells:
    """Task, ratio and row -> cell."""
    found: dict[tuple[str, float, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.task, run.ratio, run.row), []).append(run)
    return {key: Cell(tuple(sorted(own, key=lambda run: run.seed))) for key, own in found.items()}


def numbers_of(run: Run) -> list[Number]:
    """What a run's cell prints, in the paper's order: of SQuAD the exact match first."""
    return sorted(run.numbers, key=lambda number: number[1] != "exact_match")


def number_name(number: Number, among: Iterable[Number]) -> str:
    """The metric, and its split where there are several."""
    return number[1] if len({split for split, _ in among}) == 1 else f"{number[0]} {number[1]}"


def percent(ratio: float) -> str:
    """A share as tables print it."""
    return f"{100 * ratio:g} %"


def grouped(runs: Iterable[Run]) -> list[tuple[tuple[str, float], list[Run]]]:
    """Runs by task and ratio, in order."""
    ordered = sorted(runs, key=lambda run: (task_order(run.task), -run.ratio, row_order(run.method, run.row), run.seed))
    return [(key, list(own)) for key, own in groupby(ordered, key=lambda run: (run.task, run.ratio))]


def model_name(run: Run) -> str:
    """What was pruned: the hub's name, or the last part of a folder's."""
    return str(run.setting("model") or "the task's own").rstrip("/").rpartition("/")[2]
