"""The results printed in the paper (Zhang et al., 2022): every cell of its tables, as data in `paper.csv`.

The paper's table of score variants does not say which share of the weights is kept. PLATON's row in it is its row
of the main table at 10 %, so that share is taken.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Place:
    """Where a cell stands in the paper: table, task, share kept, method, and the units that are pruned."""

    table: str
    task: str
    ratio: float
    method: str
    units: str = "weights"


@cache
def _lines() -> list[dict[str, str]]:
    text = (files("platon.report") / "paper.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def cells() -> dict[Place, dict[str, float | None]]:
    """Place -> metric -> percent; `None` is the paper's "N.A.". Cells that the paper prints as "--" are left out."""
    found: dict[Place, dict[str, float | None]] = {}
    for line in _lines():
        if line["value"] == "--":
            continue
        place = Place(line["table"], line["task"], int(line["ratio"]) / 100, line["method"], line["units"])
        value = None if line["value"] == "N.A." else float(line["value"])
        found.setdefault(place, {})[line["metric"]] = value
    return found


@cache
def titles() -> dict[str, str]:
    """Method -> its name in the paper's tables, in the order of first appearance."""
    return {line["method"]: line["title"] for line in _lines()}


@cache
def variants() -> tuple[str, ...]:
    """The methods in the paper's table of score variants: PLATON, then the scores that it is compared with."""
    return tuple(dict.fromkeys(line["method"] for line in _lines() if line["table"] == "variants"))


def method_order(method: str) -> tuple[int, int]:
    """Sort key: the paper's baselines, methods that the paper does not have, variants of the score, PLATON."""
    names = list(titles())
    if method == "platon":
        return 3, 0
    if method in variants():
        return 2, names.index(method)
    return (0, names.index(method)) if method in names else (1, 0)
