"""The tables and the figure of a speed measurement, from its speed.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from platon.lab.record import read_json
from platon.report.figure import INK, KEPT, METRIC, STYLE
from platon.report.metric import Metric

SPEED = "speed.json"
COLORS = (METRIC, KEPT, "#1b9e77", "#7570b3")


def draw_speed(folder: Path) -> Path:
    """Draw a run's speed.json into its folder of figures; returns the path."""
    found = read_json(folder / SPEED)
    target = folder / "figures" / "speed.png"
    target.parent.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        _bars(found).savefig(target, bbox_inches="tight")
    return target


def setting_name(line: dict[str, Any]) -> str:
    """Such as 'eager, 8 × 128'."""
    length = "" if line["length"] is None else f" × {line['length']}"
    return f"{line['engine']}, {line['rows']}{length}"


def tables(found: dict[str, Any]) -> list[Table]:
    """Two tables: size, memory and metrics of each model; and the latency of each model in every setting."""
    names = list(found["models"])
    sizes = Table(title=_machine(found), title_justify="left")
    for name in ("", *names):
        sizes.add_column(name, justify="right" if name else "left")
    models = found["models"].values()
    sizes.add_row("parameters", *(f"{model['parameters']:,}" for model in models))
    sizes.add_row("size on disk", *(f"{model['bytes'] / 1e6:.2f} MB" for model in models))
    first = next(iter(models))["metrics"] or {}
    for split, metrics in first.items():
        for metric in metrics:
            values = (m["metrics"][split][metric] for m in models)
            sizes.add_row(f"{split} {metric}", *(Metric(split, metric).text(value) for value in values))
    peaks = {(line["engine"], line["model"]): line.get("peak_bytes") for line in found["memory"]}
    for engine in dict.fromkeys(engine for engine, _ in peaks):
        shown = (f"{peaks[engine, n] / 1e6:.0f} MB" if peaks[engine, n] else "--" for n in names)
        sizes.add_row(f"peak memory, {engine}", *shown)
    times = Table()
    for name in ("", *names, "ratio"):
        times.add_column(name, justify="right" if name else "left")
    for setting in dict.fromkeys(setting_name(line) for line in found["timings"]):
        lines = [line for line in found["timings"] if setting_name(line) == setting]
        if "error" in lines[0]:
            times.add_row(setting, escape(lines[0]["error"]))
            continue
        times.add_row(setting, *map(_timing, lines), f"{lines[0]['median_ms'] / lines[-1]['median_ms']:.2f} ×")
    return [sizes, times]


def _timing(line: dict[str, Any]) -> str:
    """The median, the quartiles, and the rows a second."""
    return f"{line['median_ms']:.1f} ms ({line['low_ms']:.1f}–{line['high_ms']:.1f}), {line['per_second']:.1f}/s"


def _machine(found: dict[str, Any]) -> str:
    threads = found["machine"]["threads"]
    return f"{threads} thread{'s' if threads > 1 else ''} of {found['machine']['processor']}"


def _bars(found: dict[str, Any]) -> Figure:
    """The latency of each model in every setting, with the quartiles as a whisker."""
    lines = [line for line in found["timings"] if "error" not in line]
    settings = list(dict.fromkeys(setting_name(line) for line in lines))
    models = list(found["models"])
    figure = Figure(figsize=(6.4, 1.1 + 0.32 * len(models) * max(len(settings), 1)))
    axes = figure.subplots()
    height = 0.8 / len(models)
    for number, model in enumerate(models):
        mine = {setting_name(line): line for line in lines if line["model"] == model}
        for place, setting in enumerate(settings):
            line = mine[setting]
            y = place + (number - (len(models) - 1) / 2) * height
            median = line["median_ms"]
            axes.barh(y, median, height * 0.9, color=COLORS[number % len(COLORS)], label=model if not place else None)
            axes.plot([line["low_ms"], line["high_ms"]], [y, y], color=INK, linewidth=1)
            first = next(one for one in lines if setting_name(one) == setting)["median_ms"]
            times = "" if number == 0 else f", {first / median:.2f} ×"
            end = (max(median, line["high_ms"]), y)
            axes.annotate(f"{median:.3g} ms{times}", end, xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(settings)), settings)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("latency, ms")
    axes.set_title(_machine(found), fontsize=9)
    if settings:
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(models))
    return figure
