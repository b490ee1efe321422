"""The paper's own numbers (Zhang et al., 2022), cell by cell: every result table, as data in `paper.csv`.

Of its score variants the paper does not print the ratio; the row of PLATON is the one that it prints at 10 %.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Place:
    """Where a cell stands: table, task, share kept, method, and what is pruned."""

    table: str
    task: str
    ratio: float
    method: str
    units: str = "weights"


@cache
def cells() -> dict[Place, dict[str, float | None]]:
    """Metric -> percent for every cell; `None` is the paper's N.A. A cell that it prints as "--" is not here."""
    found: dict[Place, dict[str, float | None]] = {}
    text = (files("platon.report") / "paper.csv").read_text(encoding="utf-8")
    for line in csv.DictReader(text.splitlines()):
        if line["value"] == "--":
            continue
        place = Place(line["table"], line["task"], int(line["ratio"]) / 100, line["method"], line["units"])
        value = None if line["value"] == "N.A." else float(line["value"])
        found.setdefault(place, {})[line["metric"]] = value
    return found
