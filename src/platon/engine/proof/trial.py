"""Proves or refuses a hypothesis about units: on a copy with random weights, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.proof.bias import makes_bias
from platon.engine.proof.call import Call, cloned, mapped, short, tensors_in
from platon.engine.proof.cut import cut, set_number
from platon.engine.proof.influence import matrices_of
from platon.engine.proof.linear import may_pad
from platon.engine.proof.numbers import sets_of_numbers
from platon.engine.proof.pattern import Input, Number, Pattern
from platon.engine.proof.replica import UnfitError, duplicate
from platon.engine.proof.sample import Arguments
from platon.engine.proof.trace import Watch

LIMIT = 1e-8  # of the largest output


class Trial:
    """A copy of a block, what it is called with, and what it gives.

    Args:
        block: with random parameters in float64.
        calls: one or several; a proof has to hold for all of them.
    """

    def __init__(self, block: nn.Module, calls: Sequence[Call]) -> None:
        self.block = block
        self.arguments = [
            mapped(call.arguments, lambda t: t.double() if t.is_floating_point() else t) for call in calls
        ]
        self.passed = set[int]().union(*(call.passed for call in calls))

    def check_repeatable(self) -> None:
        """Refuse a block that draws random numbers, or that remembers an earlier pass."""
        again = shared_copy(self.block)
        for arguments in self.arguments[:2]:
            one, other = self._run(again, arguments), self._run(again, arguments)
            if any(_apart(a, b) > LIMIT for a, b in zip(one, other, strict=True)):
                raise UnfitError("its block gives something else when it is run again on the same inputs")

    def prove(self, pattern: Pattern) -> Pattern:
        """The pattern with the numbers that have to change; raises `UnfitError` with what failed.

        For several choices of units: masking their features in what the reader reads gives the same as zeroing their
        slices, so nothing else depends on them; and cutting gives the same as zeroing. The first choice is tried on all
        inputs, the others on two.
        """
        self._check_uses(pattern)
        first, *others = _choices(pattern.count)
        tries = [(first, self.arguments), *((gone, self.arguments[:2]) for gone in others)]
        spared = self._before_norms(pattern)
        for gone, inputs in tries:
            self._check_contribution(self.block, pattern, gone, inputs, spared)
        self._check_contribution(self._mirrored(), pattern, first, self.arguments[:1], spared)
        zeroed = [self._zeroed(pattern, gone, inputs) for gone, inputs in tries]
        said = ""
        for candidate in self._candidates(pattern):
            try:
                for (gone, inputs), expected in zip(tries, zeroed, strict=True):
                    self._check_cut(candidate, gone, inputs, expected)
            except UnfitError as error:
                said = said or str(error)
                continue
            return candidate
        raise UnfitError(
            f"cut out, the {pattern.kind} that {pattern.reader.path!r} reads leave another result ({said})"
        )

    def _mirrored(self) -> nn.Module:
        """A copy whose biases have the other sign: a branch on a mean may follow from them alone."""
        copied = shared_copy(self.block)
        for path, parameter in self.block.named_parameters():
            if parameter.ndim == 1 and path.endswith("bias"):
                _replace(copied, path, -parameter)
        return copied

    def _check_uses(self, pattern: Pattern) -> None:
        """Refuse a matrix that reads two different activations."""

        def leaf(tensor: Tensor) -> Tensor:
            return (
                tensor.detach().double().requires_grad_() if tensor.is_floating_point() and tensor.ndim > 1 else tensor
            )

        fixed = [p for p in self.block.parameters() if p.requires_grad]
        args, kwargs = mapped(self.arguments[0][0], leaf), mapped(self.arguments[0][1], leaf)
        first = next((t for t in tensors_in((args, kwargs)) if t.requires_grad), None)
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and first is not None and tensor.shape[0] != first.shape[0]:
                tensor.requires_grad_(False)  # a table: relative positions, rotary angles
        for parameter in fixed:
            parameter.requires_grad_(False)
        try:
            with torch.enable_grad(), Watch(matrices_of(self.block)) as watch:
                self.block(*args, **kwargs)
        finally:
            for parameter in fixed:
                parameter.requires_grad_(True)
        for side in pattern.matrices:
            count = sum(1 for use in watch.uses if use.name == side.path and use.x.requires_grad)
            if count > 1:
                raise UnfitError(f"{side.path!r} is used {count} times in one pass")

    def _check_contribution(
        self, block: nn.Module, pattern: Pattern, gone: Tensor, inputs: Sequence[Arguments], spared: set[str]
    ) -> None:
        """Masking the units' features in what the reader reads has to give the same as zeroing their slices."""
        hidden = pattern.reader.unit

        def mask(name: str, x: Tensor) -> Tensor:
            return x * ~gone[hidden] if name == pattern.reader.path else x

        zeroed = shared_copy(block)
        zero(zeroed, pattern, gone, spared)
        for arguments in inputs:
            masked, found = self._run(block, arguments, mask), self._run(zeroed, arguments)
            difference = self._difference(masked, found, pattern, ~gone)
            if not difference <= LIMIT:
                raise UnfitError(
                    f"something else depends on the {pattern.kind} that {pattern.reader.path!r} reads "
                    f"(outputs change by {difference:.1g})"
                )

    def _before_norms(self, pattern: Pattern) -> set[str]:
        """Matrices before a norm over all units: zeroing a unit changes what the norm divides the others by.

        Queries and keys may have such a norm. What reaches the reader linearly may not.
        """
        if not pattern.norms or pattern.kind != "heads":
            return set()
        widths = {len(side.unit) for side in pattern.extras if side.module in pattern.norms}
        values = self._values(pattern)
        return {side.path for side in pattern.writers if len(side.unit) in widths} - values if values else set()

    def _values(self, pattern: Pattern) -> set[str]:
        """Matrices without which the reader reads the same at every position: when they are zero, biases are left."""
        found = set()
        args, kwargs = self.arguments[0]
        for side in pattern.writers:
            silent = shared_copy(self.block)
            _replace(silent, side.path, torch.zeros_like(silent.get_parameter(side.path)))
            with torch.no_grad(), Watch(matrices_of(silent)) as watch:
                silent(*cloned(args), **cloned(kwargs))
            read = next(use.x for use in watch.uses if use.name == pattern.reader.path)
            x = read.reshape(-1, read.shape[-1])
            if bool((x - x[:1]).abs().amax() <= 1e-9 * x.abs().amax().clamp(min=1e-9)):
                found.add(side.path)
        return found

    def _zeroed(self, pattern: Pattern, gone: Tensor, inputs: Sequence[Arguments]) -> list[list[Tensor]]:
        """What the block gives when the slices of some units are zero."""
        zeroed = shared_copy(self.block)
        zero(zeroed, pattern, gone, set())
        return [self._run(zeroed, arguments) for arguments in inputs]

    def _check_cut(
        self, pattern: Pattern, gone: Tensor, inputs: Sequence[Arguments], expected: list[list[Tensor]]
    ) -> None:
        small = shared_copy(self.block)
        try:
            cut(small, pattern, ~gone)
            found = [self._run(small, arguments) for arguments in inputs]
        except Exception as error:  # whatever a module says to numbers that do not fit
            raise UnfitError(short(error)) from error
        difference = max(self._difference(a, b, pattern, ~gone) for a, b in zip(expected, found, strict=True))
        if not difference <= LIMIT:
            raise UnfitError(f"outputs differ by {difference:.1g}")

    def _candidates(self, pattern: Pattern) -> Iterator[Pattern]:
        """The pattern with one set of numbers to change after another, most of them first; then padded."""
        torch_attention = [
            name
            for name, m in self.block.named_modules()
            if isinstance(m, nn.MultiheadAttention) and name == pattern.core
        ]
        if torch_attention:
            yield replace(pattern, swaps=tuple(torch_attention))
            return
        core = self.block.get_submodule(pattern.core)
        if pattern.kind == "heads" and makes_bias(core):
            given = Input(pattern.core, "position_bias", 1, torch.arange(pattern.count), made=True)
            tables = {f"{pattern.core}.{name}" for name, _ in core.named_parameters()}
            kept = tuple(s for s in pattern.extras if s.path not in tables or len(s.unit) != pattern.count)
            pattern = replace(pattern, inputs=(given,), extras=kept)
        for numbers in sets_of_numbers(self.block, pattern, lambda number: self._matters(number, pattern)):
            yield replace(pattern, numbers=numbers)
        if self._may_pad(pattern):
            yield replace(pattern, extras=(), norms=(), inputs=(), padded=True)

    def _may_pad(self, pattern: Pattern) -> bool:
        """Whether all matrices are of plain linears, and each writer has as many rows for every unit."""
        linears = (self.block.get_submodule(side.module) for side in pattern.matrices)
        lengths = [side.unit[side.unit >= 0].bincount(minlength=pattern.count) for side in pattern.writers]
        even = all(bool((rows == rows[0]).all() and rows[0]) for rows in lengths)
        return even and all(may_pad(linear) for linear in linears)

    def _matters(self, number: Number, pattern: Pattern) -> bool:
        """Whether the block computes something else with one unit less in this number, or nothing at all."""
        changed = shared_copy(self.block)
        set_number(changed, number, number.value // pattern.count * (pattern.count - 1))
        try:
            found = self._run(changed, self.arguments[0])
        except Exception:  # whatever a module says to a number that does not fit
            return True
        expected = self._run(self.block, self.arguments[0])
        return len(found) != len(expected) or any(_apart(a, b) > LIMIT for a, b in zip(expected, found, strict=True))

    def _run(self, block: nn.Module, arguments: Arguments, change: Any = None) -> list[Tensor]:
        args, kwargs = cloned(arguments)
        with torch.no_grad(), Watch(matrices_of(block), change):
            return list(tensors_in(block(*args, **kwargs)))

    def _difference(self, one: list[Tensor], other: list[Tensor], pattern: Pattern, kept: Tensor) -> float:
        """The largest, as a share of the largest output; infinite where shapes differ.

        Of what has a part for each unit and goes to no other block (attention maps), only the kept units count.
        """
        if len(one) != len(other):
            return float("inf")
        largest = 0.0
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            apart = _apart(a, b)
            if apart > LIMIT and place and place not in self.passed:
                apart = min([apart, *(_apart(*both) for both in _of_kept(a, b, pattern, kept))])
            largest = max(largest, apart)
        return largest


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.numel() or (a is b):
        return 0.0
    a, b = a.double(), b.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    size = a.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-30)
    return float((a - b).nan_to_num(0, 0, 0).abs().max() / size)


def _of_kept(a: Tensor, b: Tensor, pattern: Pattern, kept: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both without the units that went, along every dimension of the first that may be one of units."""
    for dim in range(a.ndim):
        if a.shape[dim] % pattern.count == 0 and a.shape[dim] in pattern.sizes:
            places = kept.repeat_interleave(a.shape[dim] // pattern.count).nonzero().view(-1)
            yield (
                a.index_select(dim, places),
                b.index_select(dim, places) if b.shape == a.shape else b,
            )


def zero(block: nn.Module, pattern: Pattern, gone: Tensor, spared: set[str]) -> None:
    """Zero the slices of some units in all matrices but the spared ones."""
    with torch.no_grad():
        for side in pattern.matrices:
            if side.path not in spared:
                places = (gone[side.unit.clamp(min=0)] & (side.unit >= 0)).nonzero().view(-1)
                _replace(block, side.path, block.get_parameter(side.path).index_fill(side.dim, places, 0.0))


def shared_copy(block: nn.Module) -> nn.Module:
    """A copy with the same parameters; they are replaced, never changed in place."""
    return duplicate(block, {id(parameter): parameter for parameter in block.parameters()})


def _replace(block: nn.Module, path: str, value: Tensor) -> None:
    owner, _, key = path.rpartition(".")
    setattr(block.get_submodule(owner), key, nn.Parameter(value.detach()))


def _choices(count: int) -> Iterator[Tensor]:
    """Masks of units to take away: one, about half of them at random, all but one."""
    random = torch.Generator().manual_seed(count)
    half = torch.randperm(count, generator=random)[: count // 2]
    for units in dict.fromkeys(
        (tuple(half.sort().values.tolist()), (0,), tuple(u for u in range(count) if u != count - 1))
    ):
        gone = torch.zeros(count, dtype=torch.bool)
        gone[list(units)] = True
        yield gone
