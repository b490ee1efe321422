"""Differences between rows, task by task and on average: PLATON against each other row, and what a teacher adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from platon.lab.percent import percent
from platon.report.cell import Cells, gather
from platon.report.comparison import p_value
from platon.report.paper import method_order
from platon.report.run import Run
from platon.report.statistics import mean, paired
from platon.report.table import NOT_RUN, Span, Spans, Table
from platon.report.task import task_order, task_title

Values = Mapping[int, float]  # seed -> headline metric
Compared = tuple[Values, ...]  # of one task and share: the values of the rows that are compared


def difference_tables(runs: Sequence[Run]) -> list[Table]:
    """The tables that these runs fill. Tasks whose headline metric is not in percent are left out."""
    chosen = [run for run in runs if run.headline.is_percent]
    tables = (_differences(chosen), _teachers(chosen))
    return [table for table in tables if table is not None]


def _differences(runs: Sequence[Run]) -> Table | None:
    """PLATON's rows against all others; `None` if there is only one pair of rows."""
    columns = _Columns(runs)
    labels, body = [], []
    for ratio in columns.ratios:
        for ours, theirs, share in _pairs([run for run in runs if run.ratio == ratio or run.is_dense]):
            cells = columns.cells((ours, ratio), (theirs, share))
            if any(cells):
                labels.append((percent(ratio, None), ours, theirs))
                body.append([_difference(cell) for cell in cells])
    if len(body) < 2:
        return None
    notes = (
        "Difference in points of the headline metric, positive where PLATON is better, and p of the paired t-test over "
        "the seeds that both rows have; bold: p < 0.05, not corrected for the number of tests.",
        *columns.notes,
        "--: not run, or a seed did not converge.",
    )
    return columns.table(
        "differences", "PLATON against each other row", ("Ratio", "Row", "Against"), labels, body, notes
    )


def _teachers(runs: Sequence[Run]) -> Table | None:
    """Each method that was run with and without a teacher; `None` if there is none."""
    columns = _Columns(runs)
    dense = next((run.row for run in runs if run.is_dense and not run.has_teacher), "")
    labels, body = [], []
    for ratio in columns.ratios:
        for taught, alone in _taught([run for run in runs if run.ratio == ratio]):
            cells = columns.cells((alone, ratio), (taught, ratio), (dense, 1.0))
            if any(cells):
                labels.append((percent(ratio, None), alone))
                body.append([_gain(cell) for cell in cells])
    if not body:
        return None
    notes = (
        "Headline metric without a teacher → with one, over the seeds that both and dense have; in brackets: how much "
        "of the distance to the dense model the teacher closes.",
        *columns.notes,
    )
    return columns.table("teacher", "What a teacher adds", ("Ratio", "Method"), labels, body, notes)


class _Columns:
    """One column for each task and, for several tasks, one for their mean."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._cells: Cells = gather(runs)
        self._metrics = {run.task: run.headline for run in runs}
        self._tasks = sorted({run.task for run in runs if run.ratio < 1}, key=task_order)
        self.ratios = sorted({run.ratio for run in runs if run.ratio < 1}, reverse=True)
        several = len(self._tasks) > 1
        self._heads = [*map(task_title, self._tasks), *(["Mean"] if several else [])]
        self.notes = ("Mean: over the tasks, seed by seed, then as for a task.",) if several else ()

    def cells(self, *places: tuple[str, float]) -> list[Compared | None]:
        """For each column, the values of the rows at these shares; `None` where one of them is missing."""
        found = [self._compared(task, places) for task in self._tasks]
        return [*found, _averaged(found)] if len(found) > 1 else found

    def _compared(self, task: str, places: Iterable[tuple[str, float]]) -> Compared | None:
        cells = [self._cells.get((task, ratio, row)) for row, ratio in places]
        if not all(cell is not None and cell.all_converged for cell in cells):
            return None
        return tuple(cell.values(self._metrics[task]) for cell in cells if cell is not None)

    def table(
        self,
        name: str,
        title: str,
        head: tuple[str, ...],
        labels: Sequence[tuple[str, ...]],
        body: Sequence[Sequence[Spans]],
        notes: tuple[str, ...],
    ) -> Table:
        """A table with a line above each row whose labels differ in more than the last one."""
        rows = tuple((*((Span(text),) for text in label), *cells) for label, cells in zip(labels, body, strict=True))
        rules = frozenset(i for i in range(1, len(labels)) if labels[i][:-1] != labels[i - 1][:-1])
        return Table(name, title, (*head, *self._heads), rows, len(head), rules, notes)


def _averaged(found: Sequence[Compared | None]) -> Compared | None:
    """Each row's mean over the tasks, for the seeds that all its tasks have; `None` where a task is missing."""
    complete = [one for one in found if one is not None]
    if len(complete) < len(found):
        return None
    rows = zip(*complete, strict=True)
    return tuple(
        {seed: mean([values[seed] for values in row]) for seed in sorted(set.intersection(*map(set, row)))}
        for row in rows
    )


def _pairs(runs: Sequence[Run]) -> list[tuple[str, str, float]]:
    """(row of PLATON, another row, the other's share)."""
    rows = _ordered(runs)
    ours = [row for row, run in rows.items() if run.method == "platon"]
    return [
        (row, other, run.ratio)
        for row in sorted(ours, key=lambda row: rows[row].has_teacher)
        for other, run in rows.items()
        if other != row and _comparable(rows[row], run)
    ]


def _comparable(ours: Run, theirs: Run) -> bool:
    """A row with a teacher is not held against one without, except a taught PLATON against PLATON and dense."""
    return theirs.is_dense or ours.has_teacher == theirs.has_teacher or (ours.has_teacher and theirs.method == "platon")


def _taught(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(row with a teacher, the same row without)."""
    rows = _ordered(runs)
    pairs = [(row, str(run.record["title"]) + row.removeprefix(run.title)) for row, run in rows.items()]
    return [(row, alone) for row, alone in pairs if rows[row].has_teacher and alone in rows]


def _ordered(runs: Sequence[Run]) -> dict[str, Run]:
    """Row -> one of its runs, in the order of the tables."""
    return {run.row: run for run in sorted(runs, key=lambda run: (method_order(run.method), run.row))}


def _difference(cell: Compared | None) -> Spans:
    test = None if cell is None else paired(*cell)
    if test is None:
        return (Span(NOT_RUN),)
    text = f"{round(test.difference, 1) + 0.0:+.1f}"
    if test.p is None:
        return (Span(text),)
    return Span(text, test.p < 0.05), Span(f" ({p_value(test.p)})")


def _gain(cell: Compared | None) -> Spans:
    seeds = set.intersection(*map(set, cell or ({},)))
    if cell is None or not seeds:
        return (Span(NOT_RUN),)
    alone, taught, dense = (mean([row[seed] for seed in sorted(seeds)]) for row in cell)
    closed = f" ({percent((taught - alone) / (dense - alone), 0)})" if dense > alone else ""
    return (Span(f"{alone:.1f} → {taught:.1f}{closed}"),)
