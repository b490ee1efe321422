"""The passes over memory as plain functions of flat tensors: run as they are, or compiled into one fused loop each.

Every pass starts with the score (and the phase of this step, if it depends on that), which are fixed when it is
compiled, and the state.
"""

import torch
from torch import Tensor

from platon.engine.score import Score, State

BLOCK = 64  # units counted together, so that the few candidates for the cut are found without reading everything again


def signal_of(weight: Tensor, gradient: Tensor) -> Tensor:
    return weight.float() * gradient.float()


def take_signal(score: Score, phase: int, state: State, signal: Tensor | None) -> State:
    """Take the signal of this step into the state, in place; the new state."""
    new = score.update(state, signal, phase)
    for name, tensor in state.items():
        tensor.copy_(new[name])
    return new


def factors(score: Score, state: State) -> State:
    return score.factors(state)


def update(score: Score, phase: int, state: State, weight: Tensor, gradient: Tensor) -> None:
    """Take the gradient into the state; where gates were in the forward pass, multiply the gradient by them."""
    gate = score.gate(state, settled=False)  # before the update: the gate that the gradient came through
    take_signal(score, phase, state, signal_of(weight, gradient))
    if gate is not None:
        gradient.copy_(gradient.float() * gate)  # now it is that of the weights kept aside


def update_and_count(
    score: Score, phase: int, state: State, weight: Tensor, gradient: Tensor, pivots: Tensor
) -> Tensor:
    """`update`, and how many of the new scores are at or above each pivot."""
    new = take_signal(score, phase, state, signal_of(weight, gradient))
    return _counts(score.value(new, weight), pivots)


def count(score: Score, state: State, weight: Tensor, pivots: Tensor) -> Tensor:
    """How many scores are at or above each pivot; the last number is not zero if a score is NaN."""
    value = score.value(state, weight)
    is_nan = value.ne(value)  # vectorised by inductor, which `isnan` is not
    return torch.cat([_counts(value, pivots), is_nan.sum(dtype=torch.int32).view(1)])


def values(score: Score, state: State, weight: Tensor) -> Tensor:
    return score.value(state, weight)


def bracket(score: Score, state: State, weight: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """How many scores are above [low, high] and within, blocks with such, the sum of all; and those within by block."""
    value = score.value(state, weight).view(-1, BLOCK)
    # Sums of 64 ones are exact in float32, and compilers vectorise them best.
    above = (value > high).float().sum(-1)
    within = ((value >= low) & (value <= high)).float().sum(-1)
    total = value.sum(-1)  # NaN if a score is
    sums = [above.sum(dtype=torch.float64), within.sum(dtype=torch.float64), (within > 0).double().sum()]
    return torch.stack([*sums, total.sum(dtype=torch.float64)]), within


def mask(
    score: Score, state: State, weight: Tensor, cut: Tensor, next_cut: Tensor, last: Tensor, offset: int, out: Tensor
) -> None:
    """Zero the weights below the cut; `out` gets a byte a weight, 1 = kept. See `ScoredWeights.mask`."""
    value = score.value(state, weight)
    position = torch.arange(offset, offset + weight.shape[0], dtype=torch.int32, device=weight.device)
    kept = value >= torch.where(position < last, cut, next_cut)
    weight.copy_(torch.where(kept, weight, 0))
    # Through float32, because inductor vectorises this store and not one of bools.
    out.copy_(torch.where(kept, 1.0, 0.0).to(torch.uint8))


def write_gated(score: Score, settled: bool, state: State, weight: Tensor, full: Tensor) -> None:
    """The weights as the forward pass sees them: `full`, the ones that are kept aside, times their gates."""
    gate = score.gate(state, settled)
    assert gate is not None
    weight.copy_(full.float() * gate)


def _counts(value: Tensor, pivots: Tensor) -> Tensor:
    # int32 sums vectorise, int64 ones do not; a matrix stays far below 2³¹ elements.
    return torch.stack([(value >= pivot).sum(dtype=torch.int32) for pivot in pivots.unbind()])
