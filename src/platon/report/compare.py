"""PLATON against the best baseline: the paired test of every task and ratio."""

from __future__ import annotations

from collections.abc import Sequence

from platon.report.cells import NOT_RUN, TASKS, Cell, Span, Spans, Table, gather, percent
from platon.report.runs import FAMILY, Number, Run, task_order
from platon.report.statistics import Paired, paired


def comparison(runs: Sequence[Run]) -> Table | None:
    """One line a task, ratio and variant of PLATON, by the headline metric; `None` where nothing compares."""
    cells = gather(runs)
    methods = {run.row: run.method for run in runs}
    body: list[tuple[Spans, ...]] = []
    places = sorted({(task, -ratio) for task, ratio, _ in cells if ratio < 1}, key=lambda p: (task_order(p[0]), p[1]))
    for task, ratio in ((task, -minus) for task, minus in places):
        here = {row: cell for (t, r, row), cell in cells.items() if (t, r) == (task, ratio)}
        number = next(iter(here.values())).runs[0].headline
        rivals = {row: cell for row, cell in here.items() if cell.whole and methods[row] not in FAMILY}
        if not rivals:
            continue
        best = max(sorted(rivals), key=lambda row: rivals[row].mean(number))
        for row in sorted(row for row in here if methods[row] == "platon" and here[row].whole):
            test = paired(here[row].values(number), rivals[best].values(number))
            body.append(_compared(task, ratio, row, best, here[row], rivals[best], number, test))
    if not body:
        return None
    notes = (
        "Paired t-test, two-sided, on the differences of runs with the same seed; headline metric, in points; the "
        "difference is over the seeds that both have.",
        "The best baseline is the one with the best mean among those whose seeds all converged; p is not corrected for "
        "the number of tests.",
        "p is -- where fewer than two seeds are shared, or all differences are equal.",
    )
    head = ("Task", "Ratio", "PLATON", "Best baseline", "Metric", "PLATON", "Baseline", "Difference", "Seeds", "p")
    rules = frozenset(i for i in range(1, len(body)) if body[i][0] != body[i - 1][0])
    return Table("tests", "PLATON against the best baseline", head, tuple(body), 4, rules, notes)


def _compared(
    task: str, ratio: float, row: str, best: str, ours: Cell, theirs: Cell, number: Number, test: Paired | None
) -> tuple[Spans, ...]:
    p = None if test is None else test.p
    texts = [TASKS.get(task, task), percent(ratio), row, best, number[1]]
    texts += [f"{ours.mean(number):.1f}", f"{theirs.mean(number):.1f}"]
    texts += [
        NOT_RUN if test is None else f"{round(test.difference, 1) + 0.0:+.1f}",
        "0" if test is None else str(test.seeds),
    ]
    return (
        *((Span(text),) for text in texts),
        (Span(NOT_RUN if p is None else _p(p), p is not None and p < 0.05),),
    )


def _p(value: float) -> str:
    """Three decimals, and never a zero that it is not."""
    return f"{value:.3f}" if value >= 0.0005 else f"{value:.0e}"
