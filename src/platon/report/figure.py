"""The figures of a report as SVG and PNG files, drawn with matplotlib."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from platon.report.chart import Chart, Charts, HeatMap, Line, Violins, colour_number

INK, KEPT, METRIC = "#333333", "#d95f02", "#1b6ca8"
# Distinct with every kind of colour blindness, on white and on black.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f", "#6a51a3", "#a1d76a")
MARKERS = "osD^vP*Xd<"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "savefig.dpi": 150,
    "svg.hashsalt": "platon",  # the same figure is the same file
}


def draw_charts(charts: Charts, target: Path) -> list[Path]:
    """Draw every chart as SVG and PNG; returns the paths."""
    target.mkdir(parents=True, exist_ok=True)
    rows = charts.row_names()
    figures = {chart.name: partial(_lines, chart, rows) for chart in charts.lines}
    figures |= {violins.name: partial(_violins, violins) for violins in charts.violins}
    figures |= {heat_map.name: partial(_heat_map, heat_map) for heat_map in charts.maps}
    drawn = []
    with mpl.rc_context(STYLE):
        for name, draw in figures.items():
            figure = draw()
            figure.draw_without_rendering()
            box = figure.get_tightbbox().padded(0.1)  # measured once: bbox_inches="tight" measures for each file
            for kind in ("svg", "png"):
                path, temporary = target / f"{name}.{kind}", target / f".{name}.{kind}"
                dated = {"Date": None} if kind == "svg" else None
                figure.savefig(temporary, format=kind, bbox_inches=box, metadata=dated)
                drawn.append(temporary.replace(path))
    return drawn


def _lines(chart: Chart, rows: list[str]) -> Figure:
    figure = Figure(figsize=(5.6, 3.5))
    axes = figure.subplots()
    for line in chart.lines:
        _line(axes, line, colour_number(chart, line, rows), markers=len(line.points) < 50)
    if chart.log_x:
        axes.set_xscale("log")
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.set_title(chart.title)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _line(axes: Axes, line: Line, number: int, markers: bool) -> None:
    colour = INK if line.dashed else COLOURS[number % len(COLOURS)]
    xs, ys = [point.x for point in line.points], [point.y for point in line.points]
    marker = "" if line.dashed or not markers else MARKERS[number % len(MARKERS)]
    axes.plot(
        xs,
        ys,
        color=colour,
        marker=marker,
        markersize=4,
        linewidth=1.4,
        linestyle="--" if line.dashed else "-",
        label=line.name,
    )
    banded = [point for point in line.points if point.low is not None]
    if len(banded) > 1:
        low, high = [point.low or 0.0 for point in banded], [point.high or 0.0 for point in banded]
        axes.fill_between([point.x for point in banded], low, high, color=colour, alpha=0.15, linewidth=0)


def _violins(violins: Violins) -> Figure:
    """A panel for each score, a violin for each weight; all panels span the same number of decades."""
    figure = Figure(figsize=(6.4, 2.4 * len(violins.scores)))
    panels = figure.subplots(len(violins.scores), 1, squeeze=False)[:, 0]
    spans = [[place for one in found for place, _ in one.outline] for _, found in violins.scores]
    tall = max((max(span) - min(span) for span in spans if span), default=1.0)
    for axes, (name, found), span, colour in zip(panels, violins.scores, spans, (METRIC, KEPT), strict=False):
        for number, one in enumerate(found, 1):
            places, widths = [place for place, _ in one.outline], [0.42 * width for _, width in one.outline]
            axes.fill_betweenx(
                places,
                [number - w for w in widths],
                [number + w for w in widths],
                color=colour,
                alpha=0.75,
                linewidth=0,
            )
            axes.plot([number - 0.2, number + 0.2], [one.median] * 2, color="white", linewidth=1.2)
        if span:
            middle = (max(span) + min(span)) / 2
            axes.set_ylim(middle - 0.53 * tall, middle + 0.53 * tall)
        axes.set_xticks(range(1, len(found) + 1), [one.label for one in found])
        axes.set_ylabel(f"log10 {name}")
    panels[0].set_title(violins.title)
    panels[-1].set_xlabel("sampled weight, from the first layer to the last")
    figure.tight_layout()
    return figure


def _heat_map(heat_map: HeatMap) -> Figure:
    """The panels side by side in one image with empty columns between them, which is faster than an axes for each."""
    steps, gap = len(heat_map.steps), math.ceil(len(heat_map.steps) / 10)
    starts = [number * (steps + gap) for number in range(len(heat_map.panels))]
    shares = np.full((len(heat_map.rows), starts[-1] + steps), np.nan)
    for start, (_, values) in zip(starts, heat_map.panels, strict=True):
        shares[:, start : start + steps] = [[np.nan if value is None else value for value in row] for row in values]
    figure = Figure(figsize=(1.4 + 1.35 * len(starts), 1.5 + 0.2 * len(heat_map.rows)))
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="viridis", norm=PowerNorm(0.5, 0, 100), aspect="auto", origin="lower")
    for start, (name, _) in zip(starts, heat_map.panels, strict=True):
        middle = start + (steps - 1) / 2
        axes.annotate(name, (middle, len(shares) - 0.5), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    ends = [(start + last, heat_map.steps[last]) for start in starts for last in sorted({0, steps - 1})]
    axes.set_xticks([place for place, _ in ends], [str(step) for _, step in ends])
    axes.set_yticks(range(len(heat_map.rows)), heat_map.rows)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("layer")
    axes.set_title(heat_map.title, pad=18)
    figure.colorbar(image, ax=axes, label="weights kept, %", fraction=0.03, pad=0.02)
    return figure
