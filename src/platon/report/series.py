"""What the figures show, as numbers: computed once, drawn by `figures` into files and by `page` in a browser."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from platon.report.cells import TASKS, grouped, percent
from platon.report.runs import Run
from platon.report.statistics import deviation, mean


@dataclass(frozen=True)
class Point:
    """A point of a line; `low` and `high` are the band over seeds, where there are several."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A method's line; `dashed` for what it is compared with."""

    name: str
    points: tuple[Point, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over an axis."""

    name: str
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log_x: bool = False


@dataclass(frozen=True)
class Violin:
    """How one weight's score is spread over a training: decades and densities, and the median's decade."""

    label: str
    outline: tuple[tuple[float, float], ...]
    median: float


@dataclass(frozen=True)
class Violins:
    """The sampled weights of a run: a violin each, for each of two scores."""

    name: str
    title: str
    scores: tuple[tuple[str, tuple[Violin, ...]], ...]


@dataclass(frozen=True)
class HeatMap:
    """Share kept over a training: a panel a kind of matrix, a row a layer, a column an evaluation."""

    name: str
    title: str
    steps: tuple[int, ...]
    rows: tuple[str, ...]
    panels: tuple[tuple[str, tuple[tuple[float | None, ...], ...]], ...]


@dataclass(frozen=True)
class Series:
    """Everything that can be drawn of a folder."""

    charts: tuple[Chart, ...]
    violins: tuple[Violins, ...]
    maps: tuple[HeatMap, ...]


def row_names(found: Series) -> list[str]:
    """Every method's name once, so that it has one colour in all figures."""
    lines = [line for chart in found.charts if not chart.log_x for line in chart.lines]
    return list(dict.fromkeys(line.name for line in lines if not line.dashed))


def line_number(chart: Chart, line: Line, names: list[str]) -> int:
    """Which colour a line has; what is no method counts within its chart."""
    return names.index(line.name) if line.name in names else chart.lines.index(line)


# --- lines ------------------------------------------------------------------------------------------------------------


def _band(x: float, values: Sequence[float]) -> Point:
    """Mean ± standard deviation over seeds."""
    middle, spread = mean(values), deviation(values)
    return Point(x, middle) if spread is None else Point(x, middle, middle - spread, middle + spread)


def _averaged(found: Iterable[tuple[float, float]]) -> tuple[Point, ...]:
    """Values at the same place become one point."""
    places: dict[float, list[float]] = defaultdict(list)
    for x, y in found:
        places[x].append(y)
    return tuple(_band(x, values) for x, values in sorted(places.items()))


def by_row(runs: Iterable[Run]) -> dict[str, list[Run]]:
    rows: dict[str, list[Run]] = {}
    for run in runs:
        rows.setdefault(run.row, []).append(run)
    return rows


def task_name(name: str) -> str:
    return TASKS.get(name, name)


def against_ratio(runs: Sequence[Run]) -> list[Chart]:
    """The headline metric against the share kept; seeds that did not converge are not in it."""
    charts = []
    for task in dict.fromkeys(run.task for run in runs):
        own = [run for run in runs if run.task == task and run.converged]
        ratios = sorted({run.ratio for run in own if run.method != "dense"})
        if len(ratios) < 2:
            continue
        lines = []
        for row, found in by_row(own).items():
            values = [(100 * run.ratio, run.numbers[run.headline]) for run in found]
            if found[0].method == "dense":  # a level to compare with
                level = _band(0, [y for _, y in values])
                ends = [Point(100 * x, level.y, level.low, level.high) for x in (ratios[0], ratios[-1])]
                lines.append(Line(row, tuple(ends), dashed=True))
            elif len({x for x, _ in values}) > 1:
                lines.append(Line(row, _averaged(values)))
        if all(line.dashed for line in lines):
            continue
        title = f"{task_name(task)}: {own[0].headline[1]} against the share kept"
        charts.append(Chart(f"ratio-{task}", title, "weights kept, %", f"{own[0].headline[1]}, %", tuple(lines)))
    return charts


def against_beta(runs: Sequence[Run], beta: str) -> list[Chart]:
    """The headline metric of PLATON against β1 or β2, all else equal; a line a ratio."""
    charts = []
    sign = {"beta1": "β1", "beta2": "β2"}[beta]
    for task in dict.fromkeys(run.task for run in runs):
        own = [run for run in runs if run.task == task and run.converged and run.method == "platon"]
        alike: dict[tuple[float, str], list[Run]] = defaultdict(list)
        for run in own:
            rest = {name: value for name, value in run.relevant().items() if name not in (beta, "model")}
            alike[run.ratio, json.dumps(rest, sort_keys=True)].append(run)
        lines = [
            Line(f"PLATON, {percent(ratio)} kept", points)
            for (ratio, _), found in sorted(alike.items(), reverse=True)
            if len(points := _averaged((run.setting(beta), run.numbers[run.headline]) for run in found)) > 1
        ]
        if lines:
            title = f"{task_name(task)}: {own[0].headline[1]} against {sign}"
            charts.append(Chart(f"{beta}-{task}", title, sign, f"{own[0].headline[1]}, %", tuple(lines)))
    return charts


def per_step(
    runs: Sequence[Run], name: str, title: str, y: str, read: Callable[[Run], Iterable[tuple[float, float]]]
) -> list[Chart]:
    """A chart for each task and ratio, a line a row, averaged over seeds; the task's dense runs are in each."""
    charts = []
    places = grouped(runs)
    for (task, ratio), own in places:
        rivals = [run for (other, _), found in places if other == task for run in found if run.method == "dense"]
        if ratio == 1 and any(other == task and share < 1 for (other, share), _ in places):
            continue
        rows = by_row([*(run for run in rivals if run not in own), *own])
        lines = []
        for row, found in rows.items():
            points = _averaged(pair for run in found for pair in read(run))
            if points:
                lines.append(Line(row, points, dashed=found[0].method == "dense"))
        if any(len(line.points) > 1 for line in lines):  # one point is no curve
            words = f"{task_name(task)}, {percent(ratio)} kept: {title.format(metric=own[0].headline[1])}"
            label = y.format(metric=own[0].headline[1])
            charts.append(Chart(f"{name}-{task}-{100 * ratio:g}", words, "optimizer step", label, tuple(lines)))
    return charts


def _evaluations(run: Run) -> Iterable[tuple[float, float]]:
    split, metric = run.headline
    key = f"eval_{split}_{metric}"
    return sorted({line["step"]: 100 * line[key] for line in run.history() if key in line}.items())


def _losses(run: Run) -> Iterable[tuple[float, float]]:
    return sorted({line["step"]: line["loss"] for line in run.history() if "loss" in line}.items())


def training(runs: Sequence[Run]) -> list[Chart]:
    """The headline metric over the steps, or the loss where there was one evaluation, at the end.

    A run that did not converge is shown too, since this is how it went.
    """
    measured = per_step(runs, "training", "{metric} while training", "{metric}, %", _evaluations)
    return measured or per_step(runs, "training", "loss while training", "loss", _losses)
