"""What `platon inspect` shows of a model: blocks, heads, neurons, the share that can be cut, and what is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from platon.cli.terminal import console
from platon.lab.percent import percent

if TYPE_CHECKING:
    from torch import nn

    from platon.deploy.structure import Row, Structure


def show_structure(model: nn.Module) -> None:
    """Print what of a model can be pruned and cut; its weights are not read."""
    from platon.deploy.structure import structure

    found = structure(model)
    console.print(_summary(found))
    if found.rows:
        console.print(_blocks(found))
    if found.refused:
        console.print(_refused(found))


def _summary(found: Structure) -> str:
    if not found.rows:
        return (
            f"{found.model} has {found.parameters:,} parameters and no transformer blocks; no head or neuron is known"
        )
    share = found.prunable / max(1, found.parameters)
    covered = found.proved / max(1, found.prunable)
    return (
        f"{found.model}: {found.parameters:,} parameters, {found.prunable:,} of them prunable ({percent(share)})\n"
        f"{found.heads:,} heads and {found.neurons:,} neurons are proved; "
        f"they hold {percent(covered)} of the prunable weights"
    )


def _blocks(found: Structure) -> Table:
    table = Table()
    table.add_column("blocks", overflow="fold")
    table.add_column("class")
    for name in ("heads", "neurons", "prunable weights", "in heads and neurons"):
        table.add_column(name, justify="right")
    for row in found.rows:
        share = row.proved / max(1, row.weights)
        counts = (_counts(row.heads), _counts(row.neurons))
        table.add_row(escape(_names(row)), row.kind, *counts, f"{row.weights:,}", percent(share))
    return table


def _counts(units: tuple[int, ...]) -> str:
    """Of each group in a block: 12, or 12 + 12 with cross-attention; experts are counted."""
    if not units:
        return "none"
    if len(set(units)) == 1 and len(units) > 2:
        return f"{len(units)} × {units[0]:,}"
    return " + ".join(f"{count:,}" for count in units)


def _names(row: Row) -> str:
    first, last = row.blocks[0], row.blocks[-1]
    ending = re.search(r"\d+$", last)
    return first if first == last or ending is None else f"{first} to {ending[0]}"


def _refused(found: Structure) -> Table:
    table = Table(title="refused", title_justify="left")
    table.add_column("matrices", overflow="fold")
    table.add_column("why", overflow="fold")
    for why, paths in found.refused.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        table.add_row(escape(paths[0] + more), escape(why))
    return table
