"""Units whose features are the same whatever the input, because the rows that make them are zero."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from platon.engine.proof.attention import become_fewer
from platon.engine.proof.call import cloned, mapped, tensors_in
from platon.engine.proof.discovery import Finding
from platon.engine.proof.influence import matrices_of
from platon.engine.proof.linear import by_feature
from platon.engine.proof.pattern import Pattern
from platon.engine.proof.replica import replicate
from platon.engine.proof.trace import Watch, steady

_NOTHING = 1e-12  # of the largest feature: rounding


def constants(block: nn.Module, pattern: Pattern, finding: Finding, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the asked units are constant, and the value of every feature that the reader is given; 0 elsewhere.

    Tried on a copy of the block. Zero rows stay zero and keep their biases; other rows are random, once as drawn and
    once negated, so that no activation is silent by chance. What is the same at every position then is constant.

    Attention weights sum to one, so a head whose value rows are zero gives its value bias. Not so where a position may
    attend to nothing, which happens under a causal mask with padding on the left: there, only a head that gives zero
    counts as constant. Elsewhere it takes a row that is nothing but padding, whose outputs mean nothing.
    """
    width = len(pattern.reader.unit)
    nothing = torch.zeros(pattern.count, dtype=torch.bool), torch.zeros(width, dtype=torch.float64)
    empty = {side.path: _empty_rows(block, side.path, side.dim) for side in pattern.writers}
    touched = torch.zeros(pattern.count, dtype=torch.bool)
    for side in pattern.writers:
        touched[side.unit[empty[side.path] & (side.unit >= 0)]] = True
    if not bool((touched & asked).any()) or not finding.calls:
        return nothing
    with steady(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        seen = torch.cat([_features(block, pattern, finding, empty, sign) for sign in (1.0, -1.0)])
        low, high = seen.amin(0), seen.amax(0)
        same = high - low <= _NOTHING * seen.abs().max().clamp(min=1.0)
        value = (high + low) / 2
        value[value.abs() <= _NOTHING] = 0.0
        unit, inside = pattern.reader.unit.clamp(min=0), pattern.reader.unit >= 0
        other = torch.zeros(pattern.count, dtype=torch.int64)
        other.index_add_(0, unit, (~same & inside).long())
        constant = (other == 0) & touched & asked
        if (
            pattern.kind == "heads"
            and bool(value[constant[unit] & inside].any())
            and _is_causal(block, pattern, finding)
        ):
            given = torch.zeros(pattern.count, dtype=torch.float64).index_add_(0, unit, value.abs() * inside)
            constant &= given == 0
    return constant, torch.where(constant[unit] & inside, value, 0.0)


def _empty_rows(block: nn.Module, path: str, dim: int) -> Tensor:
    matrix = block.get_parameter(path).detach()
    return (matrix == 0).all(1 - dim).cpu()


def _copy(block: nn.Module, pattern: Pattern, empty: dict[str, Tensor], sign: float) -> nn.Module:
    """With the block's own numbers wherever they decide about constants."""
    random = torch.Generator().manual_seed(3)
    matrices = matrices_of(block)
    dims = {side.path: side.dim for side in pattern.writers}
    biases = {
        _bias(path): by_feature(block.get_submodule(path.rpartition(".")[0]), rows, True)
        for path, rows in empty.items()
    }

    def fill(name: str, shape: torch.Size) -> Tensor:
        drawn = torch.randn(shape, generator=random, dtype=torch.float64).mul_(sign)
        if name in empty:
            return drawn.mul_(shape[1 - dims[name]] ** -0.5).index_fill_(
                dims[name], empty[name].nonzero().view(-1), 0.0
            )
        if name in matrices:
            return drawn.mul_(shape[-1] ** -0.5)
        own = block.get_parameter(name).detach().cpu().double()
        return torch.where(biases[name], own, drawn) if name in biases else own

    copied, _ = replicate(block, fill)
    for module in copied.modules():
        become_fewer(module)
    return copied


def _bias(path: str) -> str:
    return path.removesuffix("weight") + "bias"


def _features(block: nn.Module, pattern: Pattern, finding: Finding, empty: dict[str, Tensor], sign: float) -> Tensor:
    """What the reader reads, at all positions of all calls."""
    copied = _copy(block, pattern, empty, sign)
    found = []
    for call in finding.calls:
        args, kwargs = mapped(cloned(call.arguments), lambda t: t.double() if t.is_floating_point() else t)
        with Watch(matrices_of(copied)) as watch:
            copied(*args, **kwargs)
        found += [use.x.reshape(-1, use.x.shape[-1]) for use in watch.uses if use.name == pattern.reader.path]
    return torch.cat(found)


def _is_causal(block: nn.Module, pattern: Pattern, finding: Finding) -> bool:
    """Whether the first position does not see the last one, or a module says that it is causal."""
    if any(getattr(module, "is_causal", False) for module in block.get_submodule(pattern.core).modules()):
        return True
    copied = _copy(block, pattern, {}, 1.0)
    args, kwargs = mapped(cloned(finding.calls[0].arguments), lambda t: t.double() if t.is_floating_point() else t)
    first = next((t for t in tensors_in((args, kwargs)) if t.is_floating_point() and t.ndim == 3), None)
    if first is None:
        return True
    seen = []
    for _ in range(2):
        with Watch(matrices_of(copied)) as watch:
            copied(*cloned(args), **cloned(kwargs))
        seen += [use.x for use in watch.uses if use.name == pattern.reader.path]
        first[:, -1] += 1.0
        first[:, -1, 0] -= 3.0
    if len(seen) != 2 or seen[0].ndim != 3 or seen[0].shape[1] != first.shape[1]:
        return True
    return bool((seen[0][:, 0] - seen[1][:, 0]).abs().max() <= 1e-10)
