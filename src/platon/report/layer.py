"""Splits parameter names into the layer that a matrix is in and its name within the layer."""

from __future__ import annotations

import re


def layer_table(layers: dict[str, float]) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Rows (layers), columns (kinds of matrix), and the share kept of each (row, column)."""
    cells = _cells(layers, numbers=1)
    if len(cells) < len(layers):
        cells = _cells(layers, numbers=2)  # stages with blocks in them (Swin)
    rows, columns = list(dict.fromkeys(r for r, _ in cells)), list(dict.fromkeys(c for _, c in cells))
    return rows, columns, cells


def _cells(layers: dict[str, float], numbers: int) -> dict[tuple[str, str], float]:
    """(layer, kind of matrix) -> share. The first `numbers` numbers in a name are the layer; decoder layers say so."""
    cells: dict[tuple[str, str], float] = {}
    for name, share in layers.items():
        parts = re.sub(r"[._]weight$", "", name).split(".")
        places = [place for place, part in enumerate(parts) if part.isdecimal()][:numbers]
        before, rest = (parts[: places[0]], parts[places[-1] + 1 :]) if places else ([], parts)
        tower = "decoder " if any("decoder" in part for part in before) else ""
        cells[tower + ".".join(parts[place] for place in places), short_name(".".join(rest))] = share
    return cells


def short_name(rest: str) -> str:
    """The last two parts of a matrix's name at most, without those that every name has."""
    parts = [part for part in rest.split(".") if part not in ("dense", "layer", "self")]
    return ".".join(parts[-2:]) or rest
