"""What of a model can be pruned and cut: its blocks, heads and neurons, and what is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from platon.engine import topology
from platon.engine.proof.discovery import ProvedGroup, group_of, proved_groups, refusals


@dataclass(frozen=True)
class Row:
    """Blocks in a row that have the same class, units and refusals.

    Args:
        blocks: dotted names.
        kind: the class of the blocks.
        heads: units of each attention of one block; several query heads that share a key are one unit.
        neurons: units of each feed-forward of one block.
        weights: prunable ones of all these blocks.
        proved: of them, those in heads or neurons.
    """

    blocks: tuple[str, ...]
    kind: str
    heads: tuple[int, ...]
    neurons: tuple[int, ...]
    weights: int
    proved: int


@dataclass(frozen=True)
class Structure:
    """What is known about a model.

    Args:
        model: the name of its class.
        parameters: all of them.
        rows: its blocks, alike ones together.
        refused: why -> the matrices in no proved group.
    """

    model: str
    parameters: int
    rows: tuple[Row, ...]
    refused: dict[str, tuple[str, ...]]

    @property
    def prunable(self) -> int:
        """The weights of the matrices inside the blocks."""
        return sum(row.weights for row in self.rows)

    @property
    def proved(self) -> int:
        """The weights in heads and neurons."""
        return sum(row.proved for row in self.rows)

    @property
    def heads(self) -> int:
        """Units of all attentions."""
        return sum(sum(row.heads) * len(row.blocks) for row in self.rows)

    @property
    def neurons(self) -> int:
        """Units of all feed-forwards."""
        return sum(sum(row.neurons) * len(row.blocks) for row in self.rows)


def structure(model: nn.Module) -> Structure:
    """The blocks, heads and neurons of a model; its weights are not read and may be on the meta device."""
    blocks = topology.blocks(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, why = proved_groups(model), refusals(model)
    except ValueError as error:  # blocks share matrices
        found, why = [], dict.fromkeys((name for name in blocks), str(error))
    by_block = {name: [group for group in found if group.block == name] for name in blocks}
    texts: dict[str, list[str]] = {}
    for path, text in why.items():
        texts.setdefault(text, []).append(path)
    return Structure(
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        tuple(_rows(model, blocks, by_block)),
        {text: tuple(paths) for text, paths in texts.items()},
    )


def _rows(model: nn.Module, blocks: dict[str, nn.Module], by_block: dict[str, list[ProvedGroup]]) -> Iterator[Row]:
    """The blocks in model order, neighbours that are alike as one row."""
    last: Row | None = None
    for name, block in blocks.items():
        row = _row(model, name, block, by_block[name])
        if last is not None and _alike(last, row):
            count = len(last.blocks) + 1
            last = replace(last, blocks=(*last.blocks, name), weights=count * row.weights, proved=count * row.proved)
            continue
        if last is not None:
            yield last
        last = row
    if last is not None:
        yield last


def _row(model: nn.Module, name: str, block: nn.Module, inside: list[ProvedGroup]) -> Row:
    weights = {id(weight): weight.numel() for module in block.modules() for weight in topology.weights_of(module)}
    return Row(
        (name,),
        type(block).__name__,
        tuple(group.pattern.count for group in inside if group.pattern.kind == "heads"),
        tuple(group.pattern.count for group in inside if group.pattern.kind == "neurons"),
        sum(weights.values()),
        sum(int(group_of(model, group).sizes.sum()) for group in inside),
    )


def _alike(one: Row, other: Row) -> bool:
    """Whether two rows differ in the last number of their names alone."""
    count = len(one.blocks)
    same = replace(other, blocks=one.blocks, weights=count * other.weights, proved=count * other.proved)
    return same == one and _without_number(one.blocks[0]) == _without_number(other.blocks[0])


def _without_number(name: str) -> str:
    return re.sub(r"\d+$", "", name)
