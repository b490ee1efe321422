"""The table and the figure of a speed measurement, from its speed.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from platon.lab.record import RunFolder, read_json
from platon.report.figure import COLOURS, INK, MARKERS, STYLE
from platon.report.metric import Metric

# A model in an engine has one colour and one marker in both panels.


def draw_speed(folder: Path) -> Path:
    """Draw a run's speed.json into its folder of figures; returns the path."""
    run = RunFolder(folder)
    found, target = read_json(run.speed), run.speed_figure
    run.figures.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        _figure(found).savefig(target, bbox_inches="tight")
    return target


def tables(found: dict[str, Any]) -> list[Table]:
    """One table: a row for each model in each engine, with its size, memory, metrics and times."""
    table = Table(title=_machine(found), title_justify="left")
    metrics, shapes = _metrics(found), _shapes(found)
    for name in ("engine", "model"):
        table.add_column(name)
    names = [metric.title(metrics) for metric in metrics]
    for name in ("size on disk", "memory", *names, *(f"ms, {shape}" for shape in shapes)):
        table.add_column(name, justify="right")
    for one in _contenders(found):
        numbers = _line(found["contenders"], one)
        cells = [_megabytes(numbers.get("bytes")), _megabytes(numbers.get("added_bytes"))]
        for metric in metrics:
            measured = numbers.get("metrics") or {}
            cells.append(metric.text(measured[metric.split][metric.name]) if measured else "--")
        times = [_timing(found, one, shape) for shape in shapes]
        table.add_row(*one, *cells, *times)
    errors = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    said = dict.fromkeys((line["engine"], line["error"]) for line in found["timings"] if "error" in line)
    for engine, error in said:
        errors.add_row(engine, escape(error))
    return [table, errors] if said else [table]


def _contenders(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Engine and model of all that could be measured, the reference first."""
    return [(line["engine"], line["model"]) for line in found["contenders"]]


def _line(lines: list[dict[str, Any]], one: tuple[str, str], shape: str | None = None) -> dict[str, Any]:
    for line in lines:
        if (line["engine"], line["model"]) == one and shape in (None, _shape(line)):
            return line
    return {}


def _shapes(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(_shape(line) for line in found["timings"] if "error" not in line))


def _shape(line: dict[str, Any]) -> str:
    """Such as '8 × 128'."""
    if "rows" not in line:
        return ""
    rows, length = line["rows"], line["length"]
    return f"{rows} × {length}" if length is not None else f"{rows} row{'s' if rows > 1 else ''}"


def _metrics(found: dict[str, Any]) -> list[Metric]:
    first: dict[str, Any] = next((line["metrics"] for line in found["contenders"] if line["metrics"]), {})
    return [Metric(split, name) for split, metrics in first.items() for name in metrics]


def _timing(found: dict[str, Any], one: tuple[str, str], shape: str) -> str:
    """The median, and how many times as fast as the reference that is."""
    line = _line(found["timings"], one, shape)
    if "median_ms" not in line:
        return "--"
    return f"{line['median_ms']:.3g} ({_times(found, line, shape):.2f} ×)"


def _times(found: dict[str, Any], line: dict[str, Any], shape: str) -> float:
    reference: float = _line(found["timings"], _contenders(found)[0], shape)["median_ms"]
    return reference / line["median_ms"]


def _megabytes(count: float | None) -> str:
    return "--" if count is None else f"{count / 1e6:.2f} MB"


def _machine(found: dict[str, Any]) -> str:
    threads = found["machine"]["threads"]
    return f"{threads} thread{'s' if threads > 1 else ''} of {found['machine']['processor']}"


def _figure(found: dict[str, Any]) -> Figure:
    """Latency in every setting and, where the task was measured, the metric against it, one point an engine."""
    metrics, shapes, contenders = _metrics(found), _shapes(found), _contenders(found)
    panels = 2 if metrics and shapes else 1
    height = 1.2 + 0.24 * max(3, len(contenders) * max(1, len(shapes)))
    figure = Figure(figsize=(6.4 * panels, max(height, 3.6 if panels > 1 else 0)), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _bars(axes[0], found, shapes)
    if panels > 1:
        _points(axes[1], found, metrics[0], shapes[-1])
    figure.suptitle(_machine(found), fontsize=9)
    return figure


def _look(found: dict[str, Any], one: tuple[str, str]) -> tuple[str, str]:
    place = _contenders(found).index(one)
    return COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]


def _bars(axes: Axes, found: dict[str, Any], shapes: list[str]) -> None:
    """The median with the quartiles as a whisker; beside it how many times as fast as the reference."""
    names: list[str] = []
    for shape in shapes:
        for one in _contenders(found):
            line = _line(found["timings"], one, shape)
            if "median_ms" not in line:
                continue
            y, median = len(names), line["median_ms"]
            names.append(f"{', '.join(one)}, {shape}")
            axes.barh(y, median, 0.8, color=_look(found, one)[0])
            axes.plot([line["low_ms"], line["high_ms"]], [y, y], color=INK, linewidth=1)
            text = f"{median:.3g} ms, {_times(found, line, shape):.2f} ×"
            end = (max(median, line["high_ms"]), y)
            axes.annotate(text, end, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("latency, ms")


def _points(axes: Axes, found: dict[str, Any], metric: Metric, shape: str) -> None:
    """The metric against the latency of the last shape: up and to the left is better."""
    for one in _contenders(found):
        line, measured = _line(found["timings"], one, shape), _line(found["contenders"], one)["metrics"]
        if "median_ms" in line and measured:
            colour, marker = _look(found, one)
            value = metric.scaled(measured[metric.split][metric.name])
            label = f"{', '.join(one)}: {line['median_ms']:.3g} ms, {value:.2f}"
            axes.plot(line["median_ms"], value, marker, color=colour, markersize=7, label=label, linestyle="none")
    axes.set_xlim(left=0)
    axes.margins(y=0.2)
    axes.set_xlabel(f"latency, ms ({shape})")
    axes.set_ylabel(metric.label)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
