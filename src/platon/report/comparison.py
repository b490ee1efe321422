"""PLATON against the best baseline: a paired test for every task and ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from platon.lab.percent import percent
from platon.report import paper
from platon.report.cell import Cell, Cells, by_row, by_task_and_ratio, gather
from platon.report.metric import Metric
from platon.report.run import Run
from platon.report.statistics import Paired, paired
from platon.report.table import NOT_RUN, Span, Spans, Table
from platon.report.task import task_title


@dataclass(frozen=True)
class Comparison:
    """One row of PLATON and the best baseline of its task and ratio, by the headline metric."""

    task: str
    ratio: float
    row: str
    baseline: str
    ours: Cell
    theirs: Cell
    metric: Metric

    @property
    def test(self) -> Paired | None:
        """The paired test; `None` if no seed is in both."""
        return paired(self.ours.values(self.metric), self.theirs.values(self.metric))

    @property
    def is_ahead(self) -> bool:
        """Whether PLATON is better by as much as a table prints."""
        return self.test is not None and round(self.metric.gain(self.test.difference), 1) > 0

    @property
    def is_significant(self) -> bool:
        return self.test is not None and self.test.p is not None and self.test.p < 0.05


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Every row of PLATON with the best baseline of its task and ratio.

    Baselines are all methods but PLATON and its score variants. Rows with a teacher are compared with each other.
    """
    cells = gather(runs)
    found: list[Comparison] = []
    for (task, ratio), here in by_task_and_ratio(run for run in runs if run.ratio < 1):
        for with_teacher in (False, True):
            rows = by_row(run for run in here if run.has_teacher is with_teacher)
            found += _compare_rows(task, ratio, rows, cells)
    return found


def _compare_rows(task: str, ratio: float, rows: dict[str, list[Run]], cells: Cells) -> list[Comparison]:
    here = {row: cells[task, ratio, row] for row in rows if cells[task, ratio, row].all_converged}
    baselines = {row: cell for row, cell in here.items() if rows[row][0].method not in paper.variants()}
    if not baselines:
        return []
    metric = next(iter(rows.values()))[0].headline
    means = {row: cell.mean(metric) for row, cell in sorted(baselines.items())}
    best = next(row for row, value in means.items() if value == metric.best(means.values()))
    ours = sorted(row for row in here if rows[row][0].method == "platon")
    return [Comparison(task, ratio, row, best, here[row], here[best], metric) for row in ours]


def comparison_table(found: Sequence[Comparison]) -> Table | None:
    """One row for each comparison; `None` if there is none."""
    if not found:
        return None
    body = [_table_row(one) for one in found]
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


def _table_row(one: Comparison) -> tuple[Spans, ...]:
    test = one.test
    p = None if test is None else test.p
    texts = [task_title(one.task), percent(one.ratio, None), one.row, one.baseline, one.metric.name]
    texts += [f"{one.ours.mean(one.metric):.1f}", f"{one.theirs.mean(one.metric):.1f}"]
    texts += [
        NOT_RUN if test is None else f"{round(test.difference, 1) + 0.0:+.1f}",
        "0" if test is None else str(test.seeds),
    ]
    return (*((Span(text),) for text in texts), (Span(NOT_RUN if p is None else p_value(p), one.is_significant),))


def p_value(value: float) -> str:
    """Three decimals, or one digit and a power of ten for a p that would be printed as zero."""
    return f"{value:.3f}" if value >= 0.0005 else f"{value:.0e}"
