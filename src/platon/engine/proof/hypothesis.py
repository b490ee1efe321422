"""Hypotheses about the units of a block, from gradients: which rows of which matrices make which features.

A feed-forward's feature is made by one row of each matrix before it: a neuron. Attention makes the features of one head
from the same rows of queries and keys: they belong together. Names of modules and parameters play no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.proof.call import short
from platon.engine.proof.influence import Probe, Reading, reached
from platon.engine.proof.pattern import Input, Pattern, Side
from platon.engine.proof.replica import UnfitError
from platon.engine.proof.sample import Arguments
from platon.engine.topology import weights_of

_MOST_PARTS = 512  # heads; a reader with more is none of attention


def hypotheses(block: nn.Module, arguments: Arguments) -> Iterator[Pattern | tuple[str, str]]:
    """The groups that a block may have; for a matrix that reads something else, its name and why it reads no units."""
    try:
        probe = Probe(block, arguments)
    except Exception as error:  # whatever a module says to being run by itself
        raise UnfitError(f"its block failed when it was run by itself ({short(error)})") from error
    seen: set[str] = set()
    for use in probe.uses:
        if use.name in seen or not use.x.requires_grad:
            continue
        seen.add(use.name)
        reading = Reading(probe, use, block)
        if reading.writers:
            yield from _from_reading(reading)
    probe.close()
    used = {use.name for use in probe.uses}
    yield from (
        (name, "the forward pass on small random inputs does not use it") for name in probe.matrices if name not in used
    )


def _from_reading(reading: Reading) -> Iterator[Pattern | tuple[str, str]]:
    numbered = reading.probe.gradients((reading.summed * torch.arange(1, reading.width + 1)).sum())
    made = {name: reading.single(name, reading.rows_dim(name), numbered) for name in reading.writers}
    if all(bool((feature != -1).all()) for feature in made.values()):
        sides = {name: _completed(feature, reading.width) for name, feature in made.items()}
        if any(side is None for side in sides.values()):
            yield reading.use.name, "the rows that make its features lie in no regular order"
            return
        units = _Units(reading, reading.width, {n: s for n, s in sides.items() if s is not None})
        units.add_extras(lambda name, dim: reading.single(name, dim, numbered) if name in numbered else None)
        yield units.pattern("neurons")
        return
    size = reading.unit_size({name: feature == -1 for name, feature in made.items()})
    parts = reading.width // size
    if parts < 2 or reading.width % size or parts > _MOST_PARTS:
        yield reading.use.name, "every feature that it reads depends on every other one"
        return
    random = torch.Generator().manual_seed(2)
    weighted = reading.summed * torch.randn(reading.width, generator=random, dtype=torch.float64)
    by_part = [reading.probe.gradients(part.sum()) for part in weighted.view(parts, size)]
    merged = next((m for m in range(1, parts) if parts % m == 0 and _fits(reading, by_part, m)), None)
    if merged is None:
        yield reading.use.name, "no number of heads divides the features that it reads into independent parts"
        return

    def owners(name: str, dim: int) -> Tensor | None:
        return _owners(by_part, name, dim, reading.plain[name], merged) if name in reading.plain else None

    found = {name: owners(name, reading.rows_dim(name)) for name in reading.writers}
    own = {name: unit for name, unit in found.items() if unit is not None and bool((unit >= 0).any())}
    units = _Units(reading, parts // merged, own)
    units.sizes |= {parts}
    units.add_extras(owners)
    units.add_inputs(owners)
    yield units.pattern("heads")


def _completed(feature: Tensor, width: int) -> Tensor | None:
    """The feature of each row by the rule that fits all rows that showed one; a row may be silent, as behind a ReLU."""
    rows = torch.arange(len(feature))
    showed = feature >= 0
    if len(feature) % width == 0:
        for rule in (rows % width, rows // (len(feature) // width)):
            if bool((feature[showed] == rule[showed]).all()):
                return rule
    return None


def _owners(by_part: list[dict[str, Tensor]], name: str, dim: int, whole: Tensor, merged: int) -> Tensor:
    """For each place along a dimension, the unit that alone depends on it; -1: all units or none, -3: some."""
    nothing = torch.zeros(whole.shape[dim], dtype=torch.bool)
    each = torch.stack([reached(part[name], whole, dim) if name in part else nothing for part in by_part])
    units = each.view(len(by_part) // merged, merged, -1).any(1)
    many = units.sum(0)
    others = torch.where((many == 0) | (many == len(units)), -1, -3)
    return torch.where(many == 1, units.int().argmax(0), others)


def _fits(reading: Reading, by_part: list[dict[str, Tensor]], merged: int) -> bool:
    """Whether every row makes features of one unit, or of all, when this many neighbouring parts are one unit."""
    some = False
    for name in reading.writers:
        unit = _owners(by_part, name, reading.rows_dim(name), reading.plain[name], merged)
        if bool((unit == -3).any()):
            return False
        some |= bool((unit >= 0).any())
    return some


class _Units:
    """A pattern in the making."""

    def __init__(self, reading: Reading, count: int, writers: Mapping[str, Tensor]) -> None:
        self.reading, self.count = reading, count
        self.writers = [Side(name, reading.rows_dim(name), unit) for name, unit in writers.items()]
        columns = torch.arange(reading.width) * count // reading.width
        self.reader = Side(reading.use.name, 1 - reading.rows_dim(reading.use.name), columns)
        self.extras: list[Side] = []
        self.inputs: list[Input] = []
        rows = {len(unit) for unit in writers.values()} | {int((unit >= 0).sum()) for unit in writers.values()}
        self.sizes = {count, reading.width} | rows | {r // 2 for r in rows} | {r // 3 for r in rows}

    def add_extras(self, owners: Any) -> None:
        """Biases by their matrix's rows; any other parameter or buffer by the dimension whose places have one unit."""
        block = self.reading.block
        for side in self.writers:
            key = "in_proj_bias" if side.path.endswith("in_proj_weight") else "bias"
            bias = getattr(block.get_submodule(side.module), key, None)
            if isinstance(bias, Tensor) and len(bias) == len(side.unit):
                self.extras.append(Side(f"{side.module}.{key}", 0, side.unit))
        taken = {side.path for side in self.extras}
        for name in self.reading.plain:
            if name in self.reading.probe.matrices or name in taken or name.startswith("<"):
                continue
            side_found = self._side(name, owners, self.reading.probe.leaves[name])
            if side_found is not None:
                self.extras.append(side_found)

    def _side(self, name: str, owners: Any, tensor: Tensor) -> Side | None:
        for dim in range(tensor.ndim):
            unit = owners(name, dim)
            if unit is not None and bool((unit >= 0).all()) and len(unit) % self.count == 0:
                lengths = unit.bincount(minlength=self.count)
                if bool((lengths == lengths[0]).all()):
                    return Side(name, dim, unit)
        return None

    def add_inputs(self, owners: Any) -> None:
        """Arguments of the innermost module with the matrices that hold a part for each unit."""
        core = self.core
        for name in [name for name in self.reading.plain if name.startswith("<")]:
            leaf = self.reading.probe.leaves[name]
            side = self._side(name, owners, leaf)
            key = next((k for (m, k), t in self.reading.probe.given.items() if m == core and t is leaf), None)
            if side is None or key is None:
                continue
            period = next(
                p
                for p in range(self.count, len(side.unit) + 1)
                if len(side.unit) % p == 0 and bool((side.unit.view(-1, p) == side.unit[:p]).all())
            )
            self.inputs.append(Input(core, key, side.dim, side.unit[:period]))

    @property
    def core(self) -> str:
        """The innermost module with all the matrices."""
        owners = [side.module.split(".") for side in (*self.writers, self.reader)]
        shared = []
        for names in zip(*owners, strict=False):
            if len(set(names)) > 1:
                break
            shared.append(names[0])
        return ".".join(shared)

    def pattern(self, kind: str) -> Pattern:
        """The finished one, named after the outermost module that holds no other matrix."""
        mine = {side.path for side in (*self.writers, self.reader)}
        name = self.core
        while name:
            above = name.rpartition(".")[0]
            inside = {n for n in self.reading.probe.matrices if n.startswith(f"{above}." if above else "")}
            if not inside <= mine or not above:
                break
            name = above
        norms = tuple(side.module for side in self.extras if _over_all(self.reading.block, side))
        return Pattern(
            kind,
            name,
            self.core,
            self.count,
            tuple(self.writers),
            self.reader,
            extras=tuple(self.extras),
            norms=norms,
            inputs=tuple(self.inputs),
            sizes=frozenset(self.sizes),
        )


def _over_all(block: nn.Module, side: Side) -> bool:
    """Whether a tensor with a place for each unit is the scale of a norm."""
    module = block.get_submodule(side.module)
    return (
        not weights_of(module)
        and side.path.endswith("weight")
        and any(isinstance(v, float) and 0 < v < 0.01 for v in vars(module).values())
    )
