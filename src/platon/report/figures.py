"""Figures as files, with matplotlib: of a run when it ends, and of a folder of runs for its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from platon.lab.record import read_history, read_record
from platon.report.layers import layer_table
from platon.report.series import Chart, HeatMap, Line, Series, Violins, line_number, row_names

INK, KEPT, METRIC = "#333333", "#d95f02", "#1b6ca8"
# Told apart in any kind of colour vision, and on white as on black.
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


def draw_run(folder: Path) -> list[Path]:
    """Draw a finished run's figures into its folder; returns their paths."""
    record, history = read_record(folder), read_history(folder)
    target = folder / "figures"
    target.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        drawn = {"training.png": _training(record, history)}
        if record["method"] != "dense":
            drawn["layers.png"] = _layers(record)
        for name, figure in drawn.items():
            figure.savefig(target / name, bbox_inches="tight")
    return [target / name for name in drawn]


def _training(record: dict[str, Any], history: list[dict[str, Any]]) -> Figure:
    """The headline metric and the share kept, over the steps."""
    figure = Figure(figsize=(6.4, 3.4))
    axes = figure.subplots()
    split, metric = next(iter(record["results"])), record["metrics"][0]
    key = f"eval_{split}_{metric}"
    points = sorted({line["step"]: 100 * line[key] for line in history if key in line}.items())
    axes.plot(*zip(*points, strict=True), color=METRIC, marker="o", markersize=3.5, label=metric)
    if record["dense"]:
        dense = 100 * record["dense"]["results"][split][metric]
        axes.axhline(dense, color=METRIC, linewidth=1, linestyle=":")
        axes.annotate(f"dense {dense:.1f}", (0, dense), xytext=(3, 3), textcoords="offset points", color=METRIC)
    if record["best"]:
        best = record["best"]
        axes.plot([best["step"]], [100 * best["value"]], "o", markersize=9, fillstyle="none", color=METRIC)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"{metric}, %", color=METRIC)
    axes.set_title(f"{record['task']}, {record['method']}")
    shares = [(line["step"], 100 * line["kept"]) for line in history if "kept" in line]
    if shares:
        _kept(axes.twinx(), shares)
    return figure


def _kept(axes: Axes, shares: list[tuple[int, float]]) -> None:
    axes.plot(*zip(*shares, strict=True), color=KEPT, linewidth=1.5)
    axes.set_ylim(0, 104)
    axes.set_ylabel("weights kept, %", color=KEPT)
    axes.spines["right"].set_visible(True)


def _layers(record: dict[str, Any]) -> Figure:
    """The share kept of each matrix: a row a layer, a column a kind of matrix."""
    rows, columns, cells = layer_table(record["layers"])
    figure = Figure(figsize=(1.6 + 0.95 * len(columns), 1.4 + 0.34 * len(rows)))
    axes = figure.subplots()
    values = [[100 * cells.get((row, column), float("nan")) for column in columns] for row in rows]
    axes.imshow(values, cmap="viridis", vmin=0, aspect="auto")
    middle = max(value for line in values for value in line if value == value) / 2
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value == value:
                axes.text(x, y, f"{value:.1f}", ha="center", va="center", color="white" if value < middle else "black")
    axes.set_xticks(range(len(columns)), columns, rotation=20, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylabel("layer")
    axes.set_title("weights kept, %, by layer and matrix")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


# --- of a folder ------------------------------------------------------------------------------------------------------


def draw_all(found: Series, target: Path) -> list[Path]:
    """Draw everything as SVG and PNG; returns the paths."""
    target.mkdir(parents=True, exist_ok=True)
    names = row_names(found)
    drawn = []
    with mpl.rc_context(STYLE):
        every: list[Chart | Violins | HeatMap] = [*found.charts, *found.violins, *found.maps]
        for one in every:
            figure = _drawing(one, names)
            for kind in ("svg", "png"):
                path, temporary = target / f"{one.name}.{kind}", target / f".{one.name}.{kind}"
                dated = {"Date": None} if kind == "svg" else None
                figure.savefig(temporary, format=kind, bbox_inches="tight", metadata=dated)
                drawn.append(temporary.replace(path))
    return drawn


def _drawing(one: Chart | Violins | HeatMap, names: list[str]) -> Figure:
    if isinstance(one, Chart):
        return _chart(one, names)
    return _violins(one) if isinstance(one, Violins) else _heat_map(one)


def _chart(chart: Chart, names: list[str]) -> Figure:
    figure = Figure(figsize=(5.6, 3.5))
    axes = figure.subplots()
    for line in chart.lines:
        _line(axes, line, line_number(chart, line, names), markers=len(line.points) < 50)
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
    """Decades up, a weight beside the other; each row of violins over the same number of decades."""
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


def _heat_map(one: HeatMap) -> Figure:
    """A panel a kind of matrix, side by side."""
    across = len(one.panels)
    figure = Figure(figsize=(1.4 + 1.35 * across, 1.5 + 0.2 * len(one.rows)))
    panels = figure.subplots(1, across, squeeze=False)[0]
    for place, (axes, (name, values)) in enumerate(zip(panels, one.panels, strict=True)):
        shares = [[float("nan") if value is None else value for value in row] for row in values]
        image = axes.imshow(shares, cmap="viridis", norm=PowerNorm(0.5, 0, 100), aspect="auto", origin="lower")
        axes.set_title(name, fontsize=8, fontweight="normal")
        last = len(one.steps) - 1
        axes.set_xticks([0, last] if last else [0], [f"{one.steps[0]}", f"{one.steps[-1]}"][: 2 if last else 1])
        axes.set_yticks(range(len(one.rows)), one.rows if place == 0 else [""] * len(one.rows))
    panels[0].set_ylabel("layer")
    figure.supxlabel("optimizer step", fontsize=9)
    figure.suptitle(one.title, x=0.02, ha="left", fontsize=10, fontweight="bold")
    figure.tight_layout()
    figure.colorbar(image, ax=list(panels), label="weights kept, %", fraction=0.03, pad=0.02)
    return figure
