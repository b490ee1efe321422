"""A report: every table and chart of a folder of runs, computed once, before anything is printed or written."""

from __future__ import annotations

from dataclasses import dataclass

from platon.report.chart import Charts
from platon.report.comparison import Comparison, compare, comparison_table
from platon.report.curve import against_beta, against_ratio, training
from platon.report.difference import difference_tables
from platon.report.mask_chart import churn, churn_table, heat_maps
from platon.report.reader import Runs
from platon.report.result_table import Options, result_tables
from platon.report.score_chart import distributions, variability_table, violins
from platon.report.table import Table


@dataclass(frozen=True)
class Report:
    """A report.

    Args:
        runs: what it is about.
        results: tables of results, and of the tests.
        comparisons: the tests.
        variability: how much scores vary; `None` without probe files.
        churn: how often masks change; `None` without probe files.
        charts: the numbers of all figures.
    """

    runs: Runs
    results: tuple[Table, ...]
    comparisons: tuple[Comparison, ...]
    variability: Table | None
    churn: Table | None
    charts: Charts

    @property
    def tables(self) -> list[Table]:
        """All tables, in the order in which they are printed."""
        return [*self.results, *(table for table in (self.variability, self.churn) if table is not None)]


def make_report(runs: Runs, options: Options | None = None) -> Report:
    """The report of these runs."""
    every = runs.runs
    comparisons = compare(every)
    tests = comparison_table(comparisons)
    results = [
        *result_tables(every, options or Options()),
        *([] if tests is None else [tests]),
        *difference_tables(every),
    ]
    lines = [*against_ratio(every), *against_beta(every, "beta1"), *against_beta(every, "beta2")]
    lines += [*training(every), *churn(every), *distributions(every)]
    charts = Charts(tuple(lines), tuple(violins(every)), tuple(heat_maps(every)))
    return Report(runs, tuple(results), tuple(comparisons), variability_table(every), churn_table(every), charts)
