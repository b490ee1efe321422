"""The passes over memory as plain functions of flat tensors: run as they are, or compiled into one fused loop each.

Every pass starts with the same three arguments, which are fixed when it is compiled: the score, the phase of this step,
and the names of the state's tensors, which come last.
"""

import torch
from torch import Tensor

from platon.engine.score import Score, State

BLOCK = 64  # units counted together, so that the few candidates for the cut are found without reading everything again

Names = tuple[str, ...]


def signal_of(weight: Tensor, gradient: Tensor) -> Tensor:
    return weight.float() * gradient.float()


def factors(score: Score, phase: int, names: Names, *state: Tensor) -> State:
    return score.factors(_named(names, state))


def update(score: Score, phase: int, names: Names, weight: Tensor, gradient: Tensor, *state: Tensor) -> None:
    """Take the gradient into the state; where gates were in the forward pass, multiply the gradient by them."""
    gate = score.gate(_named(names, state), settled=False)  # before the update: the gate that the gradient came through
    _advance(score, phase, names, weight, gradient, *state)
    if gate is not None:
        gradient.copy_(gradient.float() * gate)


def update_and_count(
    score: Score, phase: int, names: Names, weight: Tensor, gradient: Tensor, pivots: Tensor, *state: Tensor
) -> Tensor:
    """`update`, and how many of the new scores are at or above each pivot."""
    new = _advance(score, phase, names, weight, gradient, *state)
    return _counts(score.value(new, weight), pivots)


def count(score: Score, phase: int, names: Names, weight: Tensor, pivots: Tensor, *state: Tensor) -> Tensor:
    """How many scores are at or above each pivot; the last number is not zero if a score is NaN."""
    value = score.value(_named(names, state), weight)
    is_nan = value.ne(value)  # vectorised by inductor, which `isnan` is not
    return torch.cat([_counts(value, pivots), is_nan.sum(dtype=torch.int32).view(1)])


def values(score: Score, phase: int, names: Names, weight: Tensor, *state: Tensor) -> Tensor:
    return score.value(_named(names, state), weight)


def bracket(
    score: Score, phase: int, names: Names, weight: Tensor, low: Tensor, high: Tensor, *state: Tensor
) -> tuple[Tensor, Tensor]:
    """Counts around [low, high]: above it, within it, and blocks with scores within; and those within by block.

    The fourth number is the sum of all scores, which is NaN if one of them is.
    """
    value = score.value(_named(names, state), weight).view(-1, BLOCK)
    # Sums of 64 ones are exact in float32, and compilers vectorise them best.
    above = (value > high).float().sum(-1)
    within = ((value >= low) & (value <= high)).float().sum(-1)
    total = value.sum(-1)
    sums = [above.sum(dtype=torch.float64), within.sum(dtype=torch.float64), (within > 0).double().sum()]
    return torch.stack([*sums, total.sum(dtype=torch.float64)]), within


def mask(
    score: Score,
    phase: int,
    names: Names,
    weight: Tensor,
    cut: Tensor,
    next_cut: Tensor,
    last: Tensor,
    offset: int,
    out: Tensor,
    *state: Tensor,
) -> None:
    """Zero the weights below the cut; `out` gets a byte a weight, 1 = kept. See `ScoredWeights.mask`."""
    value = score.value(_named(names, state), weight)
    position = torch.arange(offset, offset + weight.shape[0], dtype=torch.int32, device=weight.device)
    kept = value >= torch.where(position < last, cut, next_cut)
    weight.copy_(torch.where(kept, weight, 0))
    # Through float32, because inductor vectorises this store and not one of bools.
    out.copy_(torch.where(kept, 1.0, 0.0).to(torch.uint8))


def write_gated(score: Score, settled: int, names: Names, weight: Tensor, full: Tensor, *state: Tensor) -> None:
    """The weights as the forward pass sees them: `full`, the ones that are kept aside, times their gates."""
    gate = score.gate(_named(names, state), settled=bool(settled))
    assert gate is not None
    weight.copy_(full.float() * gate)


def _advance(score: Score, phase: int, names: Names, weight: Tensor, gradient: Tensor, *state: Tensor) -> State:
    new = score.update(_named(names, state), signal_of(weight, gradient), phase)
    for name, tensor in zip(names, state, strict=True):
        tensor.copy_(new[name])
    return new


def _named(names: Names, state: tuple[Tensor, ...]) -> State:
    return dict(zip(names, state, strict=True))


def _counts(value: Tensor, pivots: Tensor) -> Tensor:
    # int32 sums vectorise, int64 ones do not; a matrix stays far below 2³¹ elements.
    return torch.stack([(value >= pivot).sum(dtype=torch.int32) for pivot in pivots.unbind()])
