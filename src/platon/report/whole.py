"""Everything that can be drawn of a folder, in a fixed order."""

from platon.report.looks import churn, distributions, heat_maps, violins
from platon.report.runs import Runs
from platon.report.series import Series, against_beta, against_ratio, training


def series(runs: Runs) -> Series:
    """All of it, in a fixed order."""
    every = runs.runs
    charts = [*against_ratio(every), *against_beta(every, "beta1"), *against_beta(every, "beta2")]
    charts += [*training(every), *churn(every), *distributions(every)]
    return Series(tuple(charts), tuple(violins(every)), tuple(heat_maps(every)))
