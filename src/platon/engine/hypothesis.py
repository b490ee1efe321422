"""Hypotheses about the units of a block, from gradients: which rows of which matrices make which features.

One pass in which every matrix reads a constant. The gradient of a feature that a matrix reads then reaches exactly those
rows of other matrices that make it without a matrix in between. A feed-forward's feature is made by one row of each
matrix before it: a neuron. Attention makes the features of one head from the same rows of queries and keys: they belong
together. No name is asked for anything here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.pattern import Input, Pattern, Side
from platon.engine.sample import Arguments, mapped
from platon.engine.topology import is_conv1d, weights_of
from platon.engine.trace import Use, Watch, frozen_norms

_MOST_PARTS = 512  # heads; a reader with more is none of attention


def matrices_of(block: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of the linears in a block, by name from the block; shared ones once."""
    wanted = {id(weight) for module in block.modules() for weight in weights_of(module)}
    return {name: parameter for name, parameter in block.named_parameters() if id(parameter) in wanted}


class Probe:
    """One pass through a block whose matrices read constants, and the gradients of what they read.

    Args:
        block: a copy; its parameters are random.
        arguments: what it is called with.
    """

    def __init__(self, block: nn.Module, arguments: Arguments) -> None:
        self.matrices = matrices_of(block)
        self.leaves: dict[str, Tensor] = {**dict(block.named_parameters()), **_float_buffers(block)}
        self.given: dict[tuple[str, int | str], Tensor] = {}
        args, kwargs = arguments
        inputs: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            inputs.append(tensor.detach().double().clone().requires_grad_())
            return inputs[-1]

        args, kwargs = mapped(args, leaf), mapped(kwargs, leaf)
        self.paths = {name: module for name, module in block.named_modules()}
        handles = [m.register_forward_pre_hook(self._note(n), with_kwargs=True) for n, m in self.paths.items()]
        watch = Watch(self.matrices, lambda name, x: x.detach())
        try:
            with torch.enable_grad(), frozen_norms(block), watch:
                block(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        self.uses = watch.uses
        self.inputs = inputs
        self.seen = {id(tensor) for tensor in inputs}
        for number, tensor in enumerate(inputs):
            self.leaves[f"<{number}>"] = tensor

    def close(self) -> None:
        """Leave the block's buffers as they were."""
        for name, leaf in self.leaves.items():
            if not name.startswith("<") and not isinstance(leaf, nn.Parameter):
                leaf.requires_grad_(False)

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for key, value in [*enumerate(args), *kwargs.items()]:
                if isinstance(value, Tensor):
                    self.given.setdefault((name, key), value)

        return hook

    def gradients(self, number: Tensor) -> dict[str, Tensor]:
        """Of a number that came out of the pass, for every parameter, buffer and input that it depends on."""
        names = list(self.leaves)
        found = torch.autograd.grad(number, [self.leaves[n] for n in names], retain_graph=True, allow_unused=True)
        return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def _float_buffers(block: nn.Module) -> dict[str, Tensor]:
    found = {name: buffer for name, buffer in block.named_buffers() if buffer.is_floating_point()}
    for buffer in found.values():
        buffer.requires_grad_(True)
    return found


def along(gradient: Tensor, dim: int) -> Tensor:
    """A row of numbers for each place along a dimension."""
    return gradient.movedim(dim, 0).reshape(gradient.shape[dim], -1)


def alive(rows: Tensor) -> Tensor:
    """Which rows are not zero but for rounding."""
    largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    return largest > 1e-9 * largest.max().clamp(min=1e-280)


class Reading:
    """What one matrix reads: how its features depend on the rows of the others."""

    def __init__(self, probe: Probe, use: Use, block: nn.Module) -> None:
        self.probe, self.use, self.block = probe, use, block
        self.width = use.x.shape[-1]
        random = torch.Generator().manual_seed(1)
        flat = use.x.reshape(-1, self.width)
        self.summed = (flat * torch.randn(len(flat), 1, generator=random, dtype=torch.float64)).sum(0)
        self.plain = probe.gradients(self.summed.sum())
        size = max((g.abs().max().item() for n, g in self.plain.items() if n in probe.matrices), default=0.0)
        self.writers = [
            name
            for name, gradient in self.plain.items()
            if name in probe.matrices and name != use.name and gradient.abs().max() > 1e-11 * size > 0
        ]

    def rows_dim(self, name: str) -> int:
        """The dimension of a stored matrix along which its outputs lie."""
        return int(is_conv1d(self.block.get_submodule(name.rpartition(".")[0])))

    def single(self, name: str, dim: int, numbered: Mapping[str, Tensor]) -> Tensor:
        """For each place along a dimension: the only feature that depends on it; -1: several, -2: none.

        With the features weighted by 1, 2, 3, …, the gradient of a place that makes feature f is f times as large.
        """
        plain, weighted = along(self.plain[name], dim), along(numbered[name], dim)
        ratio = (plain * weighted).sum(1) / (plain * plain).sum(1).clamp(min=1e-300)
        left_over = (weighted - ratio[:, None] * plain).abs().amax(1) / weighted.abs().amax(1).clamp(min=1e-300)
        feature = ratio.round().long() - 1
        fits = (left_over < 1e-7) & ((ratio - ratio.round()).abs() < 1e-4) & (feature >= 0) & (feature < self.width)
        return torch.where(alive(plain), torch.where(fits, feature, -1), -2)

    def unit_size(self, several: dict[str, Tensor]) -> int:
        """How many features, from the first on, depend on the same rows: the smallest such stretch, by bisection.

        Args:
            several: for each matrix, which rows make more than one feature.
        """
        first = self.probe.gradients(self.summed[0])
        mine = {n: rows & alive(along(first[n], self.rows_dim(n))) for n, rows in several.items() if n in first}
        mine = {name: rows for name, rows in mine.items() if bool(rows.any())}
        if not mine:
            return self.width
        low, high = 1, self.width
        while low < high:
            middle = (low + high) // 2
            after = self.probe.gradients(self.summed[middle:].sum())
            confined = any(
                name not in after or bool((rows & ~_reached(after[name], self.plain[name], self.rows_dim(name))).any())
                for name, rows in mine.items()
            )
            low, high = (low, middle) if confined else (middle + 1, high)
        return low


def _reached(gradient: Tensor, whole: Tensor, dim: int) -> Tensor:
    """Which places along a dimension a gradient reaches, measured against the gradient of everything."""
    largest = along(gradient, dim).abs().amax(1)
    return largest > 1e-9 * along(whole, dim).abs().amax().clamp(min=1e-280)


def hypotheses(block: nn.Module, arguments: Arguments) -> Iterator[Pattern | tuple[str, str]]:
    """The groups that a block may have; for a matrix that reads something else, its name and why it reads no units."""
    probe = Probe(block, arguments)
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
    yield from ((name, "the forward pass on small random inputs does not use it") for name in probe.matrices if name not in used)


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
    by_part = [reading.probe.gradients(part.sum()) for part in weighted.split(size)]
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
    reached = torch.stack(
        [_reached(g[name], whole, dim) if name in g else torch.zeros(whole.shape[dim], dtype=torch.bool) for g in by_part]
    )
    reached = reached.view(len(by_part) // merged, merged, -1).any(1)
    many = reached.sum(0)
    unit = reached.int().argmax(0)
    return torch.where(many == 1, unit, torch.where((many == 0) | (many == len(reached)), -1, -3))


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
            module: Any = block.get_submodule(side.path.rpartition(".")[0])
            prefix = side.path.rpartition(".")[0]
            name = f"{prefix}.in_proj_bias" if side.path.endswith("in_proj_weight") else f"{prefix}.bias"
            bias = getattr(module, name.rpartition(".")[2], None)
            if isinstance(bias, Tensor) and len(bias) == len(side.unit):
                self.extras.append(Side(name, 0, side.unit))
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
                p for p in range(self.count, len(side.unit) + 1)
                if len(side.unit) % p == 0 and bool((side.unit.view(-1, p) == side.unit[:p]).all())
            )
            self.inputs.append(Input(core, key, side.dim, side.unit[:period]))

    @property
    def core(self) -> str:
        """The innermost module with all the matrices."""
        owners = [side.path.rpartition(".")[0].split(".") for side in (*self.writers, self.reader)]
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
        norms = tuple(
            side.path.rpartition(".")[0] for side in self.extras if _over_all(self.reading.block, side)
        )
        return Pattern(
            kind, name, self.core, self.count, tuple(self.writers), self.reader, tuple(self.extras), norms,
            tuple(self.inputs), (), frozenset(self.sizes),
        )


def _over_all(block: nn.Module, side: Side) -> bool:
    """Whether a tensor with a place for each unit is the scale of a norm."""
    module = block.get_submodule(side.path.rpartition(".")[0])
    return not weights_of(module) and side.path.endswith("weight") and any(
        isinstance(v, float) and 0 < v < 0.01 for v in vars(module).values()
    )
