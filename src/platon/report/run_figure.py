"""The figures in a run's own folder, drawn when the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from platon.lab.record import RunFolder, read_record
from platon.report.figure import KEPT, METRIC, STYLE
from platon.report.layer import layer_table
from platon.report.metric import Metric
from platon.report.record import read_lines


def draw_run(folder: Path) -> list[Path]:
    """Draw a finished run's figures into its folder; returns their paths."""
    record, history = read_record(folder), read_lines(folder)
    target = RunFolder(folder).figures
    target.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        drawn = {"training.png": _training(record, history)} if history else {}
        if record["method"] != "dense":
            drawn["layers.png"] = _layers(record)
        for name, figure in drawn.items():
            figure.savefig(target / name, bbox_inches="tight")
    return [target / name for name in drawn]


def _training(record: dict[str, Any], history: list[dict[str, Any]]) -> Figure:
    """The headline metric and the share kept, over the steps."""
    figure = Figure(figsize=(6.4, 3.4))
    axes = figure.subplots()
    metric = Metric(next(iter(record["results"])), record["metrics"][0])
    key = f"eval_{metric.split}_{metric.name}"
    points = sorted({line["step"]: metric.scaled(line[key]) for line in history if key in line}.items())
    axes.plot(*zip(*points, strict=True), color=METRIC, marker="o", markersize=3.5, label=metric.name)
    if record["dense"]:
        dense = metric.scaled(record["dense"]["results"][metric.split][metric.name])
        axes.axhline(dense, color=METRIC, linewidth=1, linestyle=":")
        axes.annotate(f"dense {dense:.1f}", (0, dense), xytext=(3, 3), textcoords="offset points", color=METRIC)
    if record["best"]:
        best = record["best"]
        axes.plot([best["step"]], [metric.scaled(best["value"])], "o", markersize=9, fillstyle="none", color=METRIC)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(metric.label, color=METRIC)
    axes.set_title(f"{record['task']}, {record['method']}")
    shares = [(line["step"], 100 * line["kept"]) for line in history if "kept" in line]
    if shares:
        _share_kept(axes.twinx(), shares)
    return figure


def _share_kept(axes: Axes, shares: list[tuple[int, float]]) -> None:
    axes.plot(*zip(*shares, strict=True), color=KEPT, linewidth=1.5)
    axes.set_ylim(0, 104)
    axes.set_ylabel("weights kept, %", color=KEPT)
    axes.spines["right"].set_visible(True)


def _layers(record: dict[str, Any]) -> Figure:
    """The share kept of each matrix: a row for each layer, a column for each kind of matrix."""
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
