"""Figures of a run, from its record and its history."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from platon.lab.record import read_history, read_record

INK, KEPT, METRIC = "#333333", "#d95f02", "#1b6ca8"
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


def layer_table(layers: dict[str, float]) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Parameter names taken apart into rows (the layer) and columns (what it is within the layer)."""
    cells = _cells(layers, numbers=1)
    if len(cells) < len(layers):
        cells = _cells(layers, numbers=2)  # stages with blocks in them (Swin)
    rows, columns = list(dict.fromkeys(r for r, _ in cells)), list(dict.fromkeys(c for _, c in cells))
    return rows, columns, cells


def _cells(layers: dict[str, float], numbers: int) -> dict[tuple[str, str], float]:
    """The first numbers in a name are the block; one with an encoder and a decoder keeps that word in its row."""
    cells: dict[tuple[str, str], float] = {}
    for name, share in layers.items():
        parts = re.sub(r"[._]weight$", "", name).split(".")
        places = [place for place, part in enumerate(parts) if part.isdecimal()][:numbers]
        before, rest = (parts[: places[0]], parts[places[-1] + 1 :]) if places else ([], parts)
        tower = "decoder " if any("decoder" in part for part in before) else ""
        cells[tower + ".".join(parts[place] for place in places), short_name(".".join(rest))] = share
    return cells


def short_name(rest: str) -> str:
    """The telling end of a matrix's name: two parts at the most."""
    parts = [part for part in rest.split(".") if part not in ("dense", "layer", "self")]
    return ".".join(parts[-2:]) or rest
