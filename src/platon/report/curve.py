"""Line charts of results: against the share kept, against β1 and β2, and over the training."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from platon.lab.percent import percent
from platon.report.cell import by_row, by_task_and_ratio
from platon.report.chart import Chart, Line, Point
from platon.report.run import Run
from platon.report.statistics import deviation, mean
from platon.report.task import task_title

XY = Iterable[tuple[float, float]]


def _mean_point(x: float, values: Sequence[float]) -> Point:
    middle, spread = mean(values), deviation(values)
    return Point(x, middle) if spread is None else Point(x, middle, middle - spread, middle + spread)


def _averaged(found: XY) -> tuple[Point, ...]:
    """One point for each x: the mean of its values, with their standard deviation."""
    places: dict[float, list[float]] = defaultdict(list)
    for x, y in found:
        places[x].append(y)
    return tuple(_mean_point(x, values) for x, values in sorted(places.items()))


def against_ratio(runs: Sequence[Run]) -> list[Chart]:
    """The headline metric against the share kept, a chart for each task. Runs that did not converge are left out."""
    charts = []
    for task in dict.fromkeys(run.task for run in runs):
        converged = [run for run in runs if run.task == task and run.converged]
        ratios = sorted({run.ratio for run in converged if not run.is_dense})
        if len(ratios) < 2:
            continue
        lines = []
        for row, found in by_row(converged).items():
            values = [(100 * run.ratio, run.results[run.headline]) for run in found]
            if found[0].is_dense:  # a horizontal line
                level = _mean_point(0, [y for _, y in values])
                ends = [Point(100 * x, level.y, level.low, level.high) for x in (ratios[0], ratios[-1])]
                lines.append(Line(row, tuple(ends), dashed=True))
            elif len({x for x, _ in values}) > 1:
                lines.append(Line(row, _averaged(values)))
        if all(line.dashed for line in lines):
            continue
        metric = converged[0].headline
        title = f"{task_title(task)}: {metric.name} against the share kept"
        charts.append(Chart(f"ratio-{task}", title, "weights kept, %", metric.label, tuple(lines)))
    return charts


def against_beta(runs: Sequence[Run], beta: str) -> list[Chart]:
    """PLATON's headline metric against the setting `beta`, all other settings equal; a line for each ratio."""
    charts = []
    symbol = {"beta1": "β1", "beta2": "β2"}[beta]
    for task in dict.fromkeys(run.task for run in runs):
        converged = [run for run in runs if run.task == task and run.converged and run.method == "platon"]
        equal: dict[tuple[float, str, str], list[Run]] = defaultdict(list)
        for run in converged:
            others = {name: value for name, value in run.relevant().items() if name not in (beta, "model", "teacher")}
            equal[run.ratio, run.title, json.dumps(others, sort_keys=True)].append(run)
        lines = [
            Line(f"{title}, {percent(ratio, None)} kept", points)
            for (ratio, title, _), found in sorted(equal.items(), reverse=True)
            if len(points := _averaged((run.setting(beta), run.results[run.headline]) for run in found)) > 1
        ]
        if lines:
            metric = converged[0].headline
            title = f"{task_title(task)}: {metric.name} against {symbol}"
            charts.append(Chart(f"{beta}-{task}", title, symbol, metric.label, tuple(lines)))
    return charts


def per_step(runs: Sequence[Run], name: str, title: str, y: str, read: Callable[[Run], XY]) -> list[Chart]:
    """A value over the steps: a chart for each task and ratio, a line for each row, averaged over seeds.

    Args:
        runs: the dense runs of a task are in each of its charts.
        name: the first part of the charts' names.
        title: the end of the charts' titles.
        y: the label of the axis.
        read: (step, value) of a run.
    """
    charts = []
    groups = by_task_and_ratio(runs)
    pruned_tasks = {task for (task, ratio), _ in groups if ratio < 1}
    for (task, ratio), found in groups:
        if ratio == 1 and task in pruned_tasks:
            continue
        dense = [run for run in runs if run.task == task and run.is_dense and run not in found]
        lines = []
        for row, seeds in by_row([*dense, *found]).items():
            points = _averaged(pair for run in seeds for pair in read(run))
            if points:
                lines.append(Line(row, points, dashed=seeds[0].is_dense))
        if any(len(line.points) > 1 for line in lines):
            words = f"{task_title(task)}, {percent(ratio, None)} kept: {title}"
            charts.append(Chart(f"{name}-{task}-{100 * ratio:g}", words, "optimizer step", y, tuple(lines)))
    return charts


def _evaluations(run: Run) -> XY:
    metric = run.headline
    key = f"eval_{metric.split}_{metric.name}"
    return sorted({line["step"]: metric.scaled(line[key]) for line in run.history if key in line}.items())


def _losses(run: Run) -> XY:
    return sorted({line["step"]: line["loss"] for line in run.history if "loss" in line}.items())


def training(runs: Sequence[Run]) -> list[Chart]:
    """The headline metric over the training, or the loss in tasks whose runs were evaluated only at the end.

    Runs that did not converge are included.
    """
    charts: list[Chart] = []
    for task in dict.fromkeys(run.task for run in runs):
        here = [run for run in runs if run.task == task]
        metric = here[0].headline
        evaluated = per_step(here, "training", f"{metric.name} while training", metric.label, _evaluations)
        charts += evaluated or _loss_charts(here)
    return charts


def _loss_charts(runs: Sequence[Run]) -> list[Chart]:
    """Rows with a teacher have a chart of their own: the distance to the teacher is part of their loss."""
    alone, taught = ([run for run in runs if run.has_teacher is one] for one in (False, True))
    return [
        *per_step(alone, "training", "loss while training", "loss", _losses),
        *per_step(taught, "training-taught", "loss with a teacher while training", "loss", _losses),
    ]
