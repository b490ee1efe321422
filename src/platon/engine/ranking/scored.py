"""The weights of one matrix with their scores: what the ranking updates, selection counts, and a cut masks.

A matrix is seen flat. No pass allocates more than a piece of it: compiled passes write in place, the eager ones work
through `PIECE` elements at a time, which also keeps their temporaries in the cache.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from platon.engine.ranking import passes
from platon.engine.ranking.bits import PIECE, pack
from platon.engine.ranking.compiling import Pass, compiled
from platon.engine.ranking.passes import BLOCK
from platon.engine.score import Score, State


@dataclass(frozen=True)
class ScoredWeights:
    """One matrix (or a rank's shard of it) with its state."""

    score: Score
    weight: Tensor  # flat; a view of the parameter
    state: State  # full-length tensors, or single numbers
    start: int = 0  # the global position of the first weight, which decides between equal scores
    fused: bool = False  # compiled passes, or the same functions eagerly
    name: str = ""  # the parameter's, for error messages
    read: tuple[str, ...] | None = None  # what `names_read` found: passes that only look at scores touch nothing else

    @property
    def size(self) -> int:
        return self.weight.numel()

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def update(self, gradient: Tensor | None, phase: int, pivots: Tensor | None = None) -> Tensor | None:
        """Take this step's gradient into the state; with `pivots`, also count the new scores at or above each."""
        whole = self
        if self.score.has_factors:
            single = {name: tensor for name, tensor in self.state.items() if not tensor.dim()}
            whole = replace(self, state=self.state | self._pass(passes.factors)(single))
        if gradient is None:
            passes.take_signal(self.score, phase, whole.state, None)
            return None if pivots is None else self.count(pivots)[:-1]
        if pivots is None:
            whole._run(passes.update, phase, along=gradient)
            return None
        return _total(whole._run(passes.update_and_count, phase, along=gradient, numbers=(pivots,)))

    def write_gated(self, full: Tensor | None, settled: bool) -> None:
        """Write `full`, the weights kept aside, times their gates; `None`: the weights that are here."""
        self._run(passes.write_gated, settled, along=self.weight if full is None else full)

    def values(self) -> Tensor:
        """The scores of all weights."""
        return torch.cat(self._to_read()._run(passes.values))

    def count(self, pivots: Tensor) -> Tensor:
        """How many scores are at or above each pivot, and last how many are NaN."""
        return _total(self._to_read()._run(passes.count, numbers=(pivots,)))

    def bracket(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """`passes.bracket` of all weights, those behind the last whole block included."""
        even = self.size - self.size % BLOCK
        found: list[tuple[Tensor, Tensor]] = []
        if even:
            looked = self._to_read()
            run = looked._pass(passes.bracket)
            found += [run(state, weight, low, high) for _, weight, state in looked._pieces(even)]
        if even < self.size or not self.size:  # behind the last whole block, or an empty shard
            value = values_at([self], [torch.arange(even, self.size, device=self.device)])
            inside = ((value >= low) & (value <= high)).sum(dtype=torch.float32)
            numbers = torch.stack([(value > high).sum(), inside, inside > 0, value.sum()]).double()
            found.append((numbers, inside.view(1)))
        if len(found) == 1:
            return found[0]
        every, within = zip(*found, strict=True)
        return torch.stack(every).sum(0), torch.cat(within)

    def mask(self, cut: Tensor, next_cut: Tensor, last: Tensor, bits: Tensor, scratch: Tensor) -> None:
        """Zero the weights that go, and write to `bits` which stay.

        Those that stay score at least `cut` before local position `last`, and at least `next_cut` from there on.
        `scratch` holds a byte a weight.
        """
        looked = self._to_read()
        run = looked._pass(passes.mask)
        for start, weight, state in looked._pieces(self.size):
            kept = scratch[: weight.numel()]
            run(state, weight, cut, next_cut, last, start, kept)
            pack(kept, bits[start // 8 : start // 8 + -(-weight.numel() // 8)])

    def _to_read(self) -> "ScoredWeights":
        if self.read is None:
            return self
        return replace(self, state={name: self.state[name] for name in self.read if name})

    def _run(self, function: Pass, *fixed: int, along: Tensor | None = None, numbers: Sequence[Tensor] = ()) -> Any:
        """What a pass gives for each piece; `along` is as long as the weights, and cut as they are."""
        run, found = self._pass(function, *fixed), []
        for start, weight, state in self._pieces(self.size):
            own = () if along is None else (along[start : start + weight.numel()],)
            found.append(run(state, weight, *own, *numbers))
        return found

    def _pass(self, function: Pass, *fixed: int) -> Pass:
        # An empty shard is not worth a compilation.
        return (compiled if self.fused and self.size else functools.partial)(function, self.score, *fixed)

    def _pieces(self, size: int) -> Iterator[tuple[int, Tensor, State]]:
        """The first `size` weights with their state, and where each piece starts; one piece for compiled passes."""
        if size == self.size and (self.fused or size <= PIECE):
            yield 0, self.weight, self.state
            return
        step = size if self.fused else PIECE
        for start in range(0, size, step):
            stop = min(start + step, size)
            # Every piece reads the single numbers of the state; only the last one may write them.
            state = {
                name: tensor[start:stop] if tensor.dim() else tensor if stop == self.size else tensor.clone()
                for name, tensor in self.state.items()
            }
            yield start, self.weight[start:stop], state


Shards = Sequence[ScoredWeights]


class _Recorder(Tensor):
    """A tensor that remembers whether anything was computed from it."""

    is_read = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, _Recorder):
                tensor.is_read = True
        return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]


def names_read(score: Score) -> tuple[str, ...]:
    """The names of the state that `score.value` reads, and "" if it reads the weights; a learned score does not."""
    weight = torch.zeros(1).as_subclass(_Recorder)
    state = {name: own.as_subclass(_Recorder) for name, own in score.init(1, torch.device("cpu")).items()}
    value = score.value(dict(state), weight)
    return tuple(name for name, own in {**state, "": weight}.items() if own.is_read or own is value)


def _gathered(tensors: Sequence[Tensor], index: Sequence[Tensor], width: int = 1) -> Tensor:
    """The numbers of each tensor at its `index`, in rows of `width`; a single number stands for all positions."""
    home = index[0].device
    shape = (-1,) if width == 1 else (-1, width)  # torch selects from rows of one number several times more slowly
    found = [
        tensor.view(shape).index_select(0, places) if tensor.dim() else tensor.expand(width * places.shape[0])
        for tensor, places in zip(tensors, index, strict=True)
    ]
    return torch.cat([part.view(-1).to(home) for part in found])


def values_at(matrices: Shards, index: Sequence[Tensor], width: int = 1) -> Tensor:
    """The scores at each matrix's `index`, bit for bit as the other passes compute them; see `_gathered`."""
    looked = [matrix._to_read() for matrix in matrices]
    # Gathered first and scored together: these are few scores, and a call costs more than its arithmetic.
    if looked[0].read is None or "" in looked[0].read:
        weight = _gathered([own.weight for own in looked], index, width)
    else:
        weight = looked[0].weight.new_zeros(())
    state = {name: _gathered([own.state[name] for own in looked], index, width) for name in looked[0].state}
    # Compiled where the others are: eager square roots on a CPU round one in six numbers differently, and a cut taken
    # from such a score would not be met by the unit that it was taken from.
    value: Tensor = max(looked, key=lambda own: own.size)._pass(passes.values)(state, weight)
    return value


def block_values(matrices: Shards, index: Sequence[Tensor]) -> Tensor:
    """The scores of the blocks at each matrix's `index`, a row each; NaN behind the end of a matrix."""
    if all(matrix.size % BLOCK == 0 for matrix in matrices):
        return values_at(matrices, index, BLOCK).view(-1, BLOCK)
    places = [blocks[:, None] * BLOCK + torch.arange(BLOCK, device=blocks.device) for blocks in index]
    sizes = [matrix.size for matrix in matrices]
    inside = [place.clamp(max=size - 1).view(-1) for place, size in zip(places, sizes, strict=True)]
    value = values_at(matrices, inside).view(-1, BLOCK)
    behind = torch.cat([(place >= size).to(value.device) for place, size in zip(places, sizes, strict=True)])
    return value.masked_fill(behind, torch.nan)


def preview(matrices: Shards, index: Sequence[Tensor], gradients: Sequence[Tensor | None], phase: int) -> Tensor:
    """The scores at each matrix's `index` as `update` will make them; nothing is changed."""
    score, found = matrices[0].score, list[Tensor]()
    for has_gradient in (True, False):
        chosen = [own for own in zip(matrices, index, gradients, strict=True) if (own[2] is not None) == has_gradient]
        if chosen:
            own, places, sampled = zip(*chosen, strict=True)
            weight = _gathered([matrix.weight for matrix in own], places)
            state = {name: _gathered([matrix.state[name] for matrix in own], places) for name in own[0].state}
            signal = passes.signal_of(weight, _gathered(sampled, places)) if has_gradient else None
            found.append(score.value(score.update(state | score.factors(state), signal, phase), weight))
    return torch.cat([value.to(matrices[0].device) for value in found])


def _total(found: list[Tensor]) -> Tensor:
    return found[0] if len(found) == 1 else torch.stack(found).sum(0, dtype=torch.int32)
