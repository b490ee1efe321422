"""Holding out rows for validation: the same rows on every machine, and the same share of every class."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from platon.lab.errors import UserError
from platon.lab.tasks.dataset import Split, subset


def hold_out(split: Split, share: float, strata: Sequence[Hashable] | None = None) -> dict[str, Split]:
    """Training and validation rows; a share of 1 is all rows for validation."""
    rows = len(split.rows)
    if share == 1:
        return {"validation": split}
    if rows < 2:
        raise UserError(f"{split.where} has one row; none can be held out for validation")
    count = max(1, min(rows - 1, round(share * rows)))
    out = subset(rows, count) if strata is None else stratified(strata, count)
    table = split.rows.data.table
    return {
        "train": Split(Dataset(table.take(np.setdiff1d(np.arange(rows), out))), f"the training part of {split.where}"),
        "validation": Split(Dataset(table.take(out)), f"the held-out part of {split.where}"),
    }


def stratified(strata: Sequence[Hashable], count: int) -> NDArray[np.int64]:
    """So many row numbers, ascending, of each stratum in proportion; one row of each stays, where that is possible.

    Each stratum gives the whole part of its share. The rows that are still missing come from the strata with the
    largest fractions, the larger stratum first.
    """
    order = np.random.RandomState(0).permutation(len(strata))
    members: dict[Hashable, list[int]] = {}
    for row in order.tolist():
        members.setdefault(strata[row], []).append(row)
    sizes = {name: len(rows) for name, rows in members.items()}
    exact = {name: count * size / len(strata) for name, size in sizes.items()}
    taken = {name: int(exact[name]) for name in sizes}
    by_fraction = sorted(sizes, key=lambda name: (taken[name] - exact[name], -sizes[name], str(name)))
    for limit in (1, 0):  # rows of a stratum that stay; none, where otherwise too few could be taken
        for name in by_fraction:
            if sum(taken.values()) < count and taken[name] < sizes[name] - limit and taken[name] < exact[name]:
                taken[name] += 1
    return np.sort([row for name, rows in members.items() for row in rows[: taken[name]]]).astype(np.int64)
