"""The passes over memory: each written once, run fused by `torch.compile` or, as its eager twin, in cache-sized pieces.

A matrix is seen flat. Nothing here allocates more than a piece of it: the fused passes write in place, the eager ones
work through `PIECE` elements at a time, which also keeps their temporaries in the cache.
"""

import functools
import hashlib
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from platon.engine.learned import Gated
from platon.engine.score import Score, State

BLOCK = 64  # units counted together, so that few candidates are found without reading everything again
PIECE = 1 << 17  # elements an eager pass works on at a time: half a megabyte of float32
COMPILE_FROM = 1 << 22  # prunable weights that repay compiling
_PACK = 0x0102040810204080  # gathers the low bits of eight bytes in the top byte of their product

Pass = Callable[..., Any]


# --- the passes, in terms of flat tensors -----------------------------------------------------------------------------


def _signal(weight: Tensor, gradient: Tensor) -> Tensor:
    return weight.float() * gradient.float()


def _counts(value: Tensor, pivots: Tensor) -> Tensor:
    # int32 sums vectorise, int64 ones do not; a piece or a matrix stays far below 2³¹ elements.
    return torch.stack([(value >= pivot).sum(dtype=torch.int32) for pivot in pivots.unbind()])


def _advance(
    score: Score, phase: int, names: tuple[str, ...], weight: Tensor, gradient: Tensor, *state: Tensor
) -> State:
    new = score.update(dict(zip(names, state, strict=True)), _signal(weight, gradient), phase)
    for name, tensor in zip(names, state, strict=True):
        tensor.copy_(new[name])
    return new


def _update(score: Score, phase: int, names: tuple[str, ...], weight: Tensor, gradient: Tensor, *state: Tensor) -> None:
    _advance(
        score, phase, names, weight, gradient, *state
    )  # not returned: an output of its own would be a full-size copy


def _update_gated(
    score: Gated, phase: int, names: tuple[str, ...], weight: Tensor, gradient: Tensor, *state: Tensor
) -> None:
    gate = score.gate(dict(zip(names, state, strict=True)), settled=False)  # the one that the gradient came through
    _advance(score, phase, names, weight, gradient, *state)
    gradient.copy_(gradient.float() * gate)


def _pass_gate(score: Gated, phase: int, names: tuple[str, ...], weight: Tensor, full: Tensor, *state: Tensor) -> None:
    weight.copy_(full.float() * score.gate(dict(zip(names, state, strict=True)), settled=bool(phase)))


def _update_and_count(
    score: Score, phase: int, names: tuple[str, ...], weight: Tensor, gradient: Tensor, pivots: Tensor, *state: Tensor
) -> Tensor:
    new = _advance(score, phase, names, weight, gradient, *state)
    return _counts(score.value(new, weight), pivots)


def _count(score: Score, phase: int, names: tuple[str, ...], weight: Tensor, pivots: Tensor, *state: Tensor) -> Tensor:
    return _counts(score.value(dict(zip(names, state, strict=True)), weight), pivots)


def _value(score: Score, phase: int, names: tuple[str, ...], weight: Tensor, *state: Tensor) -> Tensor:
    return score.value(dict(zip(names, state, strict=True)), weight)


def _bracket(
    score: Score, phase: int, names: tuple[str, ...], weight: Tensor, low: Tensor, high: Tensor, *state: Tensor
) -> tuple[Tensor, Tensor]:
    value = score.value(dict(zip(names, state, strict=True)), weight).view(-1, BLOCK)
    # Sums of 64 ones are exact in float32, and the fastest that compilers make of a short row.
    above = (value > high).float().sum(-1)
    within = ((value >= low) & (value <= high)).float().sum(-1)
    numbers = torch.stack(
        [above.sum(dtype=torch.float64), within.sum(dtype=torch.float64), (within > 0).double().sum()]
    )
    return numbers, within


def _mask(
    score: Score,
    phase: int,
    names: tuple[str, ...],
    weight: Tensor,
    cut: Tensor,
    next_cut: Tensor,
    last: Tensor,
    offset: int,
    out: Tensor,
    *state: Tensor,
) -> None:
    value = score.value(dict(zip(names, state, strict=True)), weight)
    position = torch.arange(offset, offset + weight.shape[0], dtype=torch.int32, device=weight.device)
    kept = value >= torch.where(position < last, cut, next_cut)
    weight.copy_(torch.where(kept, weight, 0))
    # Through float32, because a bool store is not vectorised and this one is.
    out.copy_(torch.where(kept, 1.0, 0.0).to(torch.uint8))


# --- bits -------------------------------------------------------------------------------------------------------------


def pack(kept: Tensor, out: Tensor | None = None) -> Tensor:
    """One bit a unit: bit j of byte i is unit 8 i + j. `kept` is flat, of bool or of bytes 0 and 1."""
    size = kept.numel()
    if not size:  # a rank's empty shard
        return kept.new_empty(0, dtype=torch.uint8)
    kept = kept.view(torch.uint8)
    if size % 8:
        kept = torch.nn.functional.pad(kept, (0, 8 - size % 8))
    bits = (kept.view(torch.int64) * _PACK).view(torch.uint8).view(-1, 8)[:, 7]
    return bits.contiguous() if out is None else out.copy_(bits)


def unpack(bits: Tensor, size: int) -> Tensor:
    """The first `size` bits as a bool tensor."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).bool().view(-1)[:size]


# --- fused or eager ---------------------------------------------------------------------------------------------------


@functools.cache
def can_compile(device: str) -> bool:
    """Whether `torch.compile` works for this kind of device here: tried once, on a tiny function."""
    if sys.platform == "win32" or (device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++")))):
        return False
    try:
        probe = torch.zeros(256, device=device)
        with warnings.catch_warnings():  # where warnings are errors, torch's own about itself would decide the path
            warnings.simplefilter("ignore")
            _compiled(torch.Tensor.add_)(probe, 1)
    except Exception:  # a broken tool chain fails in many ways, and each means the same
        return False
    return bool(probe.sum().item() == probe.numel())


def worth_compiling(count: int, device: torch.device) -> bool:
    """Depends on sizes and platform alone, so that a resumed run takes the same path."""
    return count >= COMPILE_FROM and can_compile(device.type)


def _compiled(function: Callable[..., Any], *settings: object) -> Pass:
    def run(*arguments: Any) -> Any:
        return function(*settings, *arguments)

    # Dynamo allows each code object a few compilations; a copy gives every pass of every score its own.
    own = types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True)


@functools.cache
def _fused(function: Callable[..., Any], score: Score, phase: int, names: tuple[str, ...]) -> Pass:
    return _compiled(function, score, phase, names)


@dataclass(frozen=True)
class Scored:
    """One matrix (or a rank's shard of it) with its state: what selection counts and the pruner masks.

    Args:
        score: the method.
        weight: the weights, flat; a view of the parameter.
        state: the score's state; full-length tensors, or single numbers.
        start: the global position of the first weight, which decides ties.
        fused: compiled passes, or their eager twins.
    """

    score: Score
    weight: Tensor
    state: State
    start: int = 0
    fused: bool = False

    @property
    def size(self) -> int:
        """Weights in this matrix."""
        return self.weight.numel()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weight.device

    def _pass(self, function: Callable[..., Any], phase: int = 0) -> Pass:
        names = tuple(self.state)
        if self.fused and self.size:  # a rank's empty shard is not worth a compilation
            return _fused(function, self.score, phase, names)
        return functools.partial(function, self.score, phase, names)

    def _part(self, start: int, stop: int) -> "Scored":
        # A single number is read by every part, and written by the last one alone.
        state = {
            name: tensor[start:stop] if tensor.dim() else tensor if stop == self.size else tensor.clone()
            for name, tensor in self.state.items()
        }
        return Scored(self.score, self.weight[start:stop], state, self.start + start, self.fused)

    def _parts(self) -> Iterator[tuple[int, "Scored"]]:
        if self.fused or self.size <= PIECE:
            yield 0, self
            return
        for start in range(0, self.size, PIECE):
            yield start, self._part(start, min(start + PIECE, self.size))

    def update(self, gradient: Tensor | None, phase: int, pivots: Tensor | None = None) -> Tensor | None:
        """Take this step's gradient into the state; with `pivots`, also count the new scores at or above each.

        Where gates were in the forward pass, the gradient is then that of the weights behind them.
        """
        if gradient is None:
            for name, tensor in self.score.update(self.state, None, phase).items():
                self.state[name].copy_(tensor)
            return None if pivots is None else self.count(pivots)
        if pivots is None:
            advance = _update_gated if isinstance(self.score, Gated) else _update
            for start, part in self._parts():
                part._pass(advance, phase)(part.weight, gradient[start : start + part.size], *part.state.values())
            return None
        found = [
            part._pass(_update_and_count, phase)(
                part.weight, gradient[start : start + part.size], pivots, *part.state.values()
            )
            for start, part in self._parts()
        ]
        return _total(found)

    def gate(self, full: Tensor, settled: bool) -> None:
        """Write the weights as the forward pass sees them: `full`, the ones behind the gates, times the gates."""
        for start, part in self._parts():
            part._pass(_pass_gate, int(settled))(part.weight, full[start : start + part.size], *part.state.values())

    def look(self, index: Tensor) -> tuple[Tensor, State]:
        """Weights and state at `index`."""
        state = {
            name: tensor.index_select(0, index) if tensor.dim() else tensor.expand(index.shape[0])
            for name, tensor in self.state.items()
        }
        return self.weight.index_select(0, index), state

    def peek(self, index: Tensor) -> Tensor:
        """The scores at `index`, bit for bit as the other passes see them."""
        # Compiled where they are: eager square roots on a CPU come from a library that rounds one in six the other way,
        # and a cut taken from such a score would not be met by the unit that it was taken from.
        state = [tensor.index_select(0, index) if tensor.dim() else tensor for tensor in self.state.values()]
        value: Tensor = self._pass(_value)(self.weight.index_select(0, index), *state)
        return value

    def peek_blocks(self, index: Tensor) -> Tensor:
        """The scores of whole blocks, a row each; NaN behind the end."""
        if self.size % BLOCK == 0:
            weight, *state = (
                tensor.view(-1, BLOCK).index_select(0, index).view(-1) if tensor.dim() else tensor
                for tensor in (self.weight, *self.state.values())
            )
            rows: Tensor = self._pass(_value)(weight, *state).view(-1, BLOCK)
            return rows
        inside = index[:, None] * BLOCK + torch.arange(BLOCK, device=index.device)
        value = self.peek(inside.clamp(max=self.size - 1).view(-1)).view(-1, BLOCK)
        return value.masked_fill(inside >= self.size, torch.nan)

    def count(self, pivots: Tensor) -> Tensor:
        """How many scores are at or above each pivot."""
        return _total([p._pass(_count)(p.weight, pivots, *p.state.values()) for _, p in self._parts()])

    def bracket(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """How many scores are above `high`, within [low, high], and blocks with such; and how many within, a block."""
        whole = self.size - self.size % BLOCK
        numbers, within = [], []
        even = self if whole == self.size else self._part(0, whole)
        for _, part in even._parts() if whole else ():
            found = part._pass(_bracket)(part.weight, low, high, *part.state.values())
            numbers.append(found[0])
            within.append(found[1])
        if whole < self.size or not self.size:  # what is behind the last whole block, or nothing: a rank's empty shard
            value = self.peek(torch.arange(whole, self.size, device=self.device))
            inside = ((value >= low) & (value <= high)).sum(dtype=torch.float32)
            numbers.append(torch.stack([(value > high).sum(), inside, inside > 0]).double())
            within.append(inside.view(1))
        if len(within) == 1:
            return numbers[0], within[0]
        return torch.stack(numbers).sum(0), torch.cat(within)

    def mask(self, cut: Tensor, next_cut: Tensor, last: Tensor, bits: Tensor, scratch: Tensor) -> None:
        """Zero the weights that go, and write to `bits` which stay.

        Those that stay score at least `cut` before local position `last`, and at least `next_cut` from there on.
        `scratch` holds a byte a weight.
        """
        for start, part in self._parts():
            kept = scratch[: part.size]
            part._pass(_mask)(part.weight, cut, next_cut, last, start, kept, *part.state.values())
            pack(kept, bits[start // 8 : start // 8 + -(-part.size // 8)])


def preview(matrices: list[Scored], index: list[Tensor], gradients: list[Tensor | None], phase: int) -> Tensor:
    """The scores at each matrix's `index` as they will be once `update` has taken the gradients; nothing is changed."""
    score, device = matrices[0].score, matrices[0].device
    found: list[Tensor] = []
    # Gathered first and scored together: the sample is small, and a call costs more than its arithmetic.
    for has_gradient in (True, False):
        seen = [
            (*matrix.look(place), None if gradient is None else gradient.index_select(0, place))
            for matrix, place, gradient in zip(matrices, index, gradients, strict=True)
            if (gradient is not None) == has_gradient
        ]
        if seen:
            weight = torch.cat([weight.to(device) for weight, _, _ in seen])
            state = {name: torch.cat([state[name].to(device) for _, state, _ in seen]) for name in matrices[0].state}
            signal = (
                _signal(weight, torch.cat([g.to(device) for _, _, g in seen if g is not None]))
                if has_gradient
                else None
            )
            found.append(score.value(score.update(state, signal, phase), weight))
    return torch.cat(found)


def _total(found: list[Tensor]) -> Tensor:
    return found[0] if len(found) == 1 else torch.stack(found).sum(0, dtype=torch.int32)


def draw(out: Tensor, seed: int, step: int, start: int = 0) -> None:
    """Fill `out` with logistic noise, ln u - ln(1-u): a function of seed, step and position, wherever that lies.

    The generators of torch know no positions, so ranks and shards could not agree on what each weight drew.
    """
    begin = 0
    while begin < out.numel():
        place = (start + begin) & 0xFFFFFFFF
        first, second = (_hashed_number(seed, step, salt, (start + begin) >> 32) for salt in (1, 2))
        part = out[begin : begin + min(PIECE, (1 << 32) - place)]
        begin += part.numel()
        position = torch.arange(place, place + part.numel(), dtype=torch.int64, device=out.device).to(torch.int32)
        bits = _hashed(_hashed(position ^ first) ^ second)
        uniform = ((bits >> 8) & 0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
        torch.logit(uniform, out=part)


def digest(bits: Tensor, size: int, start: int) -> Tensor:
    """A hash of which positions stay: a sum over them, so that shards add up to it; products and sums wrap."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, size, PIECE):
        kept = unpack(bits[begin // 8 : (begin + PIECE) // 8], min(PIECE, size - begin))
        place = kept.nonzero().view(-1) + (start + begin + 1)
        for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
            place = (place ^ ((place >> shift) & ((1 << (64 - shift)) - 1))) * factor
        total += (place ^ ((place >> 31) & ((1 << 33) - 1))).sum()
    return total


def _hashed(bits: Tensor) -> Tensor:
    """Each bit of the result depends on every bit of the 32-bit numbers; products wrap."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        bits = (bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return bits ^ ((bits >> 16) & 0xFFFF)


def _hashed_number(*numbers: int) -> int:
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little", signed=True)


def hold_zero(weight: Tensor, bits: Tensor) -> None:
    """Zero again what `bits` says is pruned, piece by piece."""
    for start in range(0, weight.numel(), PIECE):
        part = weight[start : start + PIECE]
        part.masked_fill_(~unpack(bits[start // 8 : (start + PIECE) // 8], part.numel()), 0)
