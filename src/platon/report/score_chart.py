"""How scores vary over a training and are distributed over the units, from the probe files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from platon.lab.percent import percent
from platon.report.cell import by_row, by_task_and_ratio
from platon.report.chart import Chart, Line, Point, Violin, Violins
from platon.report.paper import method_order
from platon.report.run import Run
from platon.report.statistics import Variability, density, mean, mean_variability
from platon.report.table import Spans, Table, plain_row
from platon.report.task import task_title

CDF_STEP = 500  # the step at which the paper shows the distribution


def distributions(runs: Sequence[Run]) -> list[Chart]:
    """The cumulative distributions of Ī and Ū in one run of each task, at the step nearest to the paper's."""
    charts = []
    for run in _examples(runs, lambda run: bool(run.probe.quantiles)):
        step = min(run.probe.quantiles, key=lambda step: (abs(step - CDF_STEP), step))
        lines = []
        for name, symbol in (("sensitivity", "Ī"), ("uncertainty", "Ū")):
            values = run.probe.quantiles[step].get(name, [])
            points = [Point(x, 100 * i / (len(values) - 1)) for i, x in enumerate(values) if x > 0]
            lines.append(Line(symbol, tuple(points)))
        title = f"{task_title(run.task)}: distribution of Ī and Ū at step {step} ({described(run)})"
        if any(line.points for line in lines):
            x, y = "value", "units at or below it, %"
            charts.append(Chart(f"cdf-{run.task}", title, x, y, tuple(lines), log_x=True, lines_are_rows=False))
    return charts


def _examples(runs: Sequence[Run], has_data: Callable[[Run], bool]) -> list[Run]:
    """One run for each task: PLATON before its variants and other methods, then the fewest weights, the first seed."""

    def order(run: Run) -> tuple[object, ...]:
        group, place = method_order(run.method)
        return -group, place, run.ratio, len(run.row), run.seed, run.name

    found = []
    for task in dict.fromkeys(run.task for run in runs):
        candidates = sorted((run for run in runs if run.task == task and has_data(run)), key=order)
        found += candidates[:1]
    return found


def described(run: Run) -> str:
    """Which run a figure shows."""
    return f"{run.row}, {percent(run.ratio, None)} kept, seed {run.seed}"


def violins(runs: Sequence[Run]) -> list[Violins]:
    """|w g| beside PLATON's score S, for the sampled weights of one run of each task."""
    drawn = []
    for run in _examples(runs, lambda run: "S = Ī Ū" in run.probe.scores()):
        scores = run.probe.scores()
        shown = tuple((name, tuple(_violins(scores[name].T))) for name in ("|w g|", "S = Ī Ū"))
        title = f"{task_title(run.task)}: variability of scores over training ({described(run)})"
        drawn.append(Violins(f"violins-{run.task}", title, shown))
    return drawn


def _violins(weights: NDArray[np.float64]) -> Iterable[Violin]:
    for number, values in enumerate(weights, 1):
        logs = np.log10(values[values > 0])
        if len(logs) > 2:
            yield Violin(str(number), tuple(density(logs)), float(np.median(logs)))


def variability_table(runs: Sequence[Run]) -> Table | None:
    """How much each score varies over the training; `None` if no run has averages in its probe file."""
    body: list[tuple[Spans, ...]] = []
    rules = set()
    for (task, ratio), found in by_task_and_ratio(runs):
        for row, seeds in by_row(found).items():
            by_score: dict[str, list[Variability]] = defaultdict(list)
            for run in (run for run in seeds if "Ī" in run.probe.scores()):
                for name, values in run.probe.scores().items():
                    if (one := mean_variability(values.T)) is not None:
                        by_score[name].append(one)
            if not by_score:
                continue
            rules.add(len(body))
            for name, every in by_score.items():
                figures = [mean([getattr(one, key) for one in every]) for key in ("variation", "span", "jump")]
                texts = [task_title(task), percent(ratio, None), row, name, *(f"{figure:.2f}" for figure in figures)]
                body.append(plain_row(texts))
    if not body:
        return None
    notes = (
        "Means over the sampled weights and over seeds. Variation: standard deviation / mean over the measurements. "
        "Span: decades between the 5th and the 95th percentile. Jump: decades from one measurement to the next.",
        "S is of the second order in |w g|, so its decades count double; √S is in the unit of |w g| and can be "
        "compared with it.",
    )
    head = ("Task", "Ratio", "Method", "Score", "Variation", "Span", "Jump")
    return Table("variability", "Variability of scores", head, tuple(body), 4, frozenset(rules - {0}), notes)
