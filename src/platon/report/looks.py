"""What the probe saw of the runs: how scores vary, how they are spread, how often masks flip, what each layer keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from platon.report.cells import Span, Table, grouped, percent
from platon.report.layers import layer_table
from platon.report.runs import FAMILY, Run
from platon.report.series import Chart, HeatMap, Line, Point, Violin, Violins, by_row, per_step, task_name
from platon.report.statistics import Variability, density, mean, mean_variability

CDF_STEP = 500  # the paper's
BINS = 40


def flips(run: Run) -> list[tuple[float, float, float]]:
    """(step, removed, returned): units that left the mask and came back, in percent of all, in bins of equal length."""
    lines = [line for line in run.probe() if "since" in line]
    if not lines:
        return []
    width = max(line["step"] for line in lines) / BINS
    width = max(width, *(line["step"] - line["since"] for line in lines))
    bins: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in lines:
        place = int((line["step"] - 1) / width)
        bins[place][0] += 100 * line["removed"]
        bins[place][1] += 100 * line["returned"]
    return [((place + 1) * width, removed, returned) for place, (removed, returned) in sorted(bins.items())]


def churn(runs: Sequence[Run]) -> list[Chart]:
    """How much of the mask comes back over the training: what leaves for good is no churn."""

    def read(run: Run) -> list[tuple[float, float]]:
        return [(round(step, 2), returned) for step, _, returned in flips(run)]

    pruned = [run for run in runs if run.method != "dense"]
    return per_step(pruned, "churn", "how much of the mask comes back", "units that came back, % of all", read)


def distributions(runs: Sequence[Run]) -> list[Chart]:
    """The cumulative distribution of Ī and Ū, of one PLATON run a task, at the step nearest to the paper's."""
    charts = []
    for run in _shown(runs, lambda run: any("quantiles" in line for line in run.probe())):
        found = [line for line in run.probe() if "quantiles" in line]
        line = min(found, key=lambda line: (abs(line["step"] - CDF_STEP), line["step"]))
        lines = []
        for name, sign in (("sensitivity", "Ī"), ("uncertainty", "Ū")):
            values = line["quantiles"].get(name, [])
            points = [Point(x, 100 * i / (len(values) - 1)) for i, x in enumerate(values) if x > 0]
            lines.append(Line(sign, tuple(points)))
        title = f"{task_name(run.task)}: distribution of Ī and Ū at step {line['step']} ({_which(run)})"
        if any(line.points for line in lines):
            charts.append(Chart(f"cdf-{run.task}", title, "value", "units at or below it, %", tuple(lines), log_x=True))
    return charts


def _shown(runs: Sequence[Run], has: Callable[[Run], bool]) -> list[Run]:
    """The run that stands for its task: PLATON before its ablations, the fewest weights, the first seed."""
    found = []
    for task in dict.fromkeys(run.task for run in runs):
        own = [run for run in runs if run.task == task and run.method in FAMILY and has(run)]
        if own:
            own.sort(key=lambda run: (FAMILY.index(run.method), run.ratio, len(run.row), run.seed, run.name))
            found.append(own[0])
    return found


def _which(run: Run) -> str:
    return f"{run.row}, {percent(run.ratio)} kept, seed {run.seed}"


def scores(run: Run) -> dict[str, list[list[float]]]:
    """What the probe saw of each sampled weight over the training: raw sensitivity, and the scores made of it."""
    looks = [line for line in run.probe() if "signal" in line]
    if len(looks) < 3:
        return {}
    found = {"|w g|": [look["signal"] for look in looks]}
    if all("uncertainty" in look for look in looks):
        pairs = [list(zip(look["sensitivity"], look["uncertainty"], strict=True)) for look in looks]
        found["Ī"] = [look["sensitivity"] for look in looks]
        found["S = Ī Ū"] = [[i * u for i, u in pair] for pair in pairs]
        found["√S"] = [[(i * u) ** 0.5 for i, u in pair] for pair in pairs]
    elif run.method == "magnitude":
        found["|w|"] = [look["weight"] for look in looks]
    return {name: [list(weight) for weight in zip(*values, strict=True)] for name, values in found.items()}


def violins(runs: Sequence[Run]) -> list[Violins]:
    """Raw sensitivity beside PLATON's score, for a dozen weights."""
    drawn = []
    for run in _shown(runs, lambda run: "S = Ī Ū" in scores(run)):
        found = scores(run)
        shown = tuple((name, tuple(_violins(found[name]))) for name in ("|w g|", "S = Ī Ū"))
        title = f"{task_name(run.task)}: variability of scores over training ({_which(run)})"
        drawn.append(Violins(f"violins-{run.task}", title, shown))
    return drawn


def _violins(weights: list[list[float]]) -> Iterable[Violin]:
    for number, values in enumerate(weights, 1):
        logs = np.log10([value for value in values if value > 0])
        if len(logs) > 2:
            yield Violin(str(number), tuple(density(logs.tolist())), float(np.median(logs)))


def variability_table(runs: Sequence[Run]) -> Table | None:
    """The claim of the paper's first figure as numbers: means over the sampled weights, then over seeds."""
    body: list[tuple[tuple[Span, ...], ...]] = []
    rules = set()
    for (task, ratio), own in grouped(runs):
        for row, found in by_row(own).items():
            by_score: dict[str, list[Variability]] = defaultdict(list)
            for run in found:
                for name, weights in scores(run).items():
                    if (one := mean_variability(weights)) is not None:
                        by_score[name].append(one)
            if "Ī" not in by_score:
                continue
            rules.add(len(body))
            for name, every in by_score.items():
                figures = [mean([getattr(one, key) for one in every]) for key in ("variation", "span", "jump")]
                texts = [task_name(task), percent(ratio), row, name, *(f"{figure:.2f}" for figure in figures)]
                body.append(tuple((Span(text),) for text in texts))
    if not body:
        return None
    notes = (
        "Means over the sampled weights and over seeds. Variation: standard deviation / mean over the looks. Span: "
        "decades between the 5th and the 95th percentile. Jump: decades from one look to the next.",
        "S is of the second order in |w g|, so its decades count double; √S is in the unit of |w g| and compares.",
    )
    head = ("Task", "Ratio", "Method", "Score", "Variation", "Span", "Jump")
    return Table("variability", "Variability of scores", head, tuple(body), 4, frozenset(rules - {0}), notes)


def churn_table(runs: Sequence[Run]) -> Table | None:
    """How much came back in the whole training, a row a method."""
    body: list[tuple[tuple[Span, ...], ...]] = []
    rules = set()
    for (task, ratio), own in grouped(runs):
        first = len(body)
        for row, found in by_row(own).items():
            sums = [[sum(part) for part in zip(*seen, strict=True)] for run in found if (seen := flips(run))]
            if sums:
                removed, returned = mean([one[1] for one in sums]), mean([one[2] for one in sums])
                texts = [task_name(task), percent(ratio), row, f"{removed:.2f}", f"{returned:.2f}", str(len(sums))]
                body.append(tuple((Span(text),) for text in texts))
        if len(body) > first:
            rules.add(first)
    if not body:
        return None
    head = ("Task", "Ratio", "Method", "Left the mask, %", "Came back, %", "Runs")
    notes = ("Percent of all units, added up over the looks of the training, mean over seeds.",)
    return Table("churn", "How often masks flip", head, tuple(body), 3, frozenset(rules - {0}), notes)


def heat_maps(runs: Sequence[Run]) -> list[HeatMap]:
    """A run for each task and row, the fewest weights, the first seed."""
    maps = []
    for task in dict.fromkeys(run.task for run in runs):
        rows = sorted(
            by_row([run for run in runs if run.task == task]).values(), key=lambda own: own[0].method != "platon"
        )
        for number, own in enumerate(rows):
            run = min(own, key=lambda run: (run.ratio, run.seed, run.name))
            found = {line["step"]: line["layers"] for line in run.probe() if "layers" in line}
            if found:
                maps.append(_heat_map(f"layers-{task}-{number}", run, found))
    return maps


def _heat_map(name: str, run: Run, found: dict[int, dict[str, Any]]) -> HeatMap:
    steps = sorted(found)
    tables = [layer_table(found[step]) for step in steps]
    rows, columns, _ = tables[0]
    panels = []
    for column in columns:
        values = tuple(
            tuple(None if (share := cells.get((row, column))) is None else 100 * share for _, _, cells in tables)
            for row in rows
        )
        panels.append((column, values))
    title = f"{task_name(run.task)}: share kept by layer and matrix ({_which(run)})"
    return HeatMap(name, title, tuple(steps), tuple(rows), tuple(panels))
