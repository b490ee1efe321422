"""Selection: the exact k best of scores that lie in many tensors, or on many ranks.

No sort, no concatenation, no copy of the scores. A small sample of them gives pivots around the k-th; one pass counts
the scores at or above each pivot (the same pass updates the scores); the counts say, almost to the unit, where the k-th
lies; a second pass counts inside that narrow range, block by block, and only blocks with candidates are read again.
Every count is exact, so an unlucky sample costs further passes and never the result. Equal scores are told apart by
position: the first ones stay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from platon.engine import pivots as sampling
from platon.engine.passes import BLOCK
from platon.engine.pivots import Pivots, float_keys, key_floats, pick_pivots, sample_index
from platon.engine.scored import ScoredWeights, preview
from platon.engine.shard import ALONE, Ranks

_SMALL = 1 << 16  # units up to which sampling before the update does not pay off


@dataclass(frozen=True)
class Cut:
    """The boundary: a unit stays if its score is above `value`, or equal to it at `position` or before."""

    value: Tensor
    position: Tensor

    @classmethod
    def above(cls, value: float, device: torch.device) -> "Cut":
        """Units that score above `value` stay, however many."""
        return cls(torch.tensor(value, dtype=torch.float32, device=device), torch.tensor(-1, device=device))

    def apply(self, shards: Sequence[ScoredWeights], bits: Sequence[Tensor]) -> None:
        """Zero the weights that go, and write to `bits` which stay."""
        beyond = torch.nextafter(self.value, torch.full_like(self.value, math.inf))
        # Nothing is above infinity: NaN as the second bound keeps nothing.
        beyond = torch.where(beyond == self.value, torch.nan, beyond)
        room = max(shard.size for shard in shards)
        scratch = {device: torch.empty(room, dtype=torch.uint8, device=device) for device in {s.device for s in shards}}
        for shard, last, target in zip(shards, self.lasts(shards), bits, strict=True):
            here = shard.device
            shard.mask(self.value.to(here), beyond.to(here), last.to(here), target, scratch[here])

    def lasts(self, shards: Sequence[ScoredWeights]) -> tuple[Tensor, ...]:
        """How many units of each shard lie at the boundary's position or before."""
        places = torch.tensor([(shard.start, shard.size) for shard in shards]).T.to(self.position.device)
        return (self.position + 1 - places[0]).clamp(min=0).minimum(places[1]).to(torch.int32).unbind()


def update_and_find_cut(
    shards: Sequence[ScoredWeights],
    gradients: Sequence[Tensor | None],
    phase: int,
    k: int,
    total: int,
    sample: Sequence[Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> Cut:
    """Take the gradients into the scores, then find the cut that keeps exactly `k` of `total` units.

    Large models sample the new scores first, so that one pass both updates all scores and counts them around the cut.
    `sample`: the result of `sample_index` for each shard, if it is at hand.
    """
    if total <= _SMALL:
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.update(gradient, phase)
        return find_cut(shards, k, total, ranks=ranks)
    index = sample or [sample_index(shard.size, total, shard.device) for shard in shards]
    found = pick_pivots(ranks.gather(preview(shards, index, gradients, phase)), k, total)
    counts = [
        shard.update(gradient, phase, found.value.to(shard.device))
        for shard, gradient in zip(shards, gradients, strict=True)
    ]
    home = found.value.device
    here = torch.stack([count.to(home) for count in counts if count is not None]).sum(0)  # in int64
    return find_cut(shards, k, total, found.counted(ranks.sum(here)), ranks=ranks)


def find_cut(
    shards: Sequence[ScoredWeights],
    k: int,
    total: int,
    pivots: Pivots | None = None,
    sample: Sequence[Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> Cut:
    """The cut that keeps exactly `k` of `total` units; one read of device memory unless the sample was unlucky."""
    if not 1 <= k <= total:
        raise ValueError(f"k must be between 1 and the number of units, {total}, got {k}")
    device = shards[0].device
    room = max(4096, total // 512)  # candidates worth collecting
    low, high = -math.inf, math.inf
    if total > room:
        if pivots is None:
            index = sample or [sample_index(shard.size, total, shard.device) for shard in shards]
            seen = [shard.values_at(places).to(device) for shard, places in zip(shards, index, strict=True)]
            pivots = pick_pivots(ranks.gather(torch.cat(seen)), k, total)
            pivots = pivots.counted(_count(shards, pivots.value, ranks))
        found = _Bracket(shards, *pivots.narrow(k), ranks, pivots)
        if found.holds(k) and found.within <= room:
            return found.cut(k)
        low, high = _search(shards, k, total, room, found, ranks)
    found = _Bracket(shards, torch.tensor(low, device=device), torch.tensor(high, device=device), ranks)
    return found.cut(k) if found.within <= room else found.tie(k)


def refuse_nan(shards: Sequence[ScoredWeights], ranks: Ranks = ALONE) -> None:
    """Raise an error that names the first parameter with a score that is NaN, if there is one; on every rank alike."""
    device = shards[0].device
    found = [shard.count(torch.zeros(1, device=shard.device))[1].to(device) > 0 for shard in shards]
    for shard, is_nan in zip(shards, ranks.any(torch.stack(found)).tolist(), strict=True):
        if is_nan:
            raise ValueError(
                f"a score of {shard.name!r} is NaN, so there is no order; look for NaN among its weights or in the "
                "pruner's state"
            )


def _count(shards: Sequence[ScoredWeights], pivots: Tensor, ranks: Ranks) -> Tensor:
    """How many scores of all shards and ranks are at or above each pivot."""
    found = [shard.count(pivots.to(shard.device))[0].to(pivots.device) for shard in shards]
    return ranks.sum(torch.stack(found).sum(0))  # in int64, however many matrices


class _Bracket:
    """What lies in [low, high]: measured in one pass, and read by the host once."""

    def __init__(
        self, shards: Sequence[ScoredWeights], low: Tensor, high: Tensor, ranks: Ranks, pivots: Pivots | None = None
    ) -> None:
        self.shards, self.ranks, self.bounds = shards, ranks, (low, high)
        found = [shard.bracket(low.to(shard.device), high.to(shard.device)) for shard in shards]
        self.blocks = [blocks for _, blocks in found]
        local = torch.stack([numbers.to(low.device) for numbers, _ in found])
        over_all = ranks.sum(torch.cat([local[:, :2].sum(0), local[:, 3:].isnan().sum(0).double()]))
        known = [] if pivots is None or pivots.count is None else [pivots.value.double(), pivots.count.double()]
        ends = torch.stack([low, high]).double()
        read: list[float] = torch.cat([over_all, ends, *known, local[:, 1:3].flatten()]).tolist()  # waits for a device
        self.above, self.within = int(read[0]), int(read[1])
        if read[2]:
            refuse_nan(shards, ranks)  # or the sum is NaN because it adds infinite scores of either sign
        self.low, self.high = read[3:5]
        rest = read[5:]
        #: (score, how many are at or above it), for the search that follows an unlucky guess
        self.known: list[tuple[float, int]] = []
        if known:
            size = known[0].numel()
            self.known = [
                (value, int(number)) for value, number in zip(rest[:size], rest[size : 2 * size], strict=True)
            ]
            rest = rest[2 * size :]
        #: (candidates, blocks with candidates) of each shard
        self.local = [(int(inside), int(filled)) for inside, filled in zip(rest[::2], rest[1::2], strict=True)]

    def holds(self, k: int) -> bool:
        return self.above < k <= self.above + self.within

    def cut(self, k: int) -> Cut:
        """The k-th, among the candidates collected from the blocks that have any."""
        device = self.bounds[0].device
        value, position = [torch.empty(0, device=device)], [torch.empty(0, dtype=torch.int64, device=device)]
        for shard, blocks, (within, filled) in zip(self.shards, self.blocks, self.local, strict=True):
            if within:
                found, index = self._collect(shard, blocks, within, filled)
                value.append(found.to(device))
                position.append((index + shard.start).to(device))
        values = self.ranks.gather(torch.cat(value))
        positions, order = self.ranks.gather(torch.cat(position)).sort()
        # Stable, so that among equal scores the first positions come first.
        ranking = values[order].sort(descending=True, stable=True)
        place = k - self.above - 1
        return Cut(ranking.values[place], positions.take(ranking.indices[place]))

    def _collect(self, shard: ScoredWeights, blocks: Tensor, within: int, filled: int) -> tuple[Tensor, Tensor]:
        chosen = torch.nonzero_static(blocks, size=filled).view(-1)
        value = shard.block_values(chosen).view(-1)
        low, high = (bound.to(shard.device) for bound in self.bounds)
        inside = torch.nonzero_static((value >= low) & (value <= high), size=within).view(-1)
        return value[inside], chosen[inside // BLOCK] * BLOCK + inside % BLOCK

    def tie(self, k: int) -> Cut:
        """The cut among too many equal scores to collect: their counts per block lead to the last one that stays."""
        device = self.bounds[0].device
        mine = torch.tensor([(shard.start, within) for shard, (within, _) in zip(self.shards, self.local, strict=True)])
        everyone: list[int] = self.ranks.gather(mine.flatten().to(device)).tolist()
        left = k - self.above
        start = -1
        for start, within in sorted(zip(everyone[::2], everyone[1::2], strict=True)):  # noqa: B007  # the last one counts
            if left <= within:
                break
            left -= within
        position = torch.zeros((), dtype=torch.int64, device=device)
        for shard, blocks in zip(self.shards, self.blocks, strict=True):
            if shard.start == start and shard.size:
                position = (start + self._nth(shard, blocks, left)).to(device)
        return Cut(self.bounds[0], self.ranks.sum(position))

    def _nth(self, shard: ScoredWeights, blocks: Tensor, n: int) -> Tensor:
        seen = blocks.cumsum(0, dtype=torch.float64)
        block = torch.searchsorted(seen, torch.tensor([n], dtype=seen.dtype, device=seen.device))
        equal = shard.block_values(block).view(-1) == self.bounds[0].to(shard.device)
        before = seen[block] - blocks[block]
        return block[0] * BLOCK + (equal.cumsum(0) + before >= n).int().argmax()


def _search(
    shards: Sequence[ScoredWeights], k: int, total: int, room: int, guess: _Bracket, ranks: Ranks
) -> tuple[float, float]:
    """Bounds of the k-th, few enough scores or a single value apart: a search over the float32 numbers themselves."""

    def key(number: float) -> int:
        return int(float_keys(torch.tensor([number], dtype=torch.float32))[0])

    low, high = key(-math.inf), key(math.inf)  # at least k at or above low, fewer than k above high
    at_least, above = total, 0

    def learn(place: int, number: int) -> None:
        nonlocal low, high, at_least, above
        if number >= k and place > low:
            low, at_least = place, number
        elif number < k and place - 1 < high:
            high, above = place - 1, number

    for value, number in guess.known:
        learn(key(value), number)
    if guess.low <= guess.high:
        learn(key(guess.low), guess.above + guess.within)
        learn(key(guess.high) + 1, guess.above)
    while low < high and at_least - above > room:
        # The number after low comes first: very many scores that equal low are common, and this settles them at once.
        parts = sampling.COUNT
        keys = sorted({low + 1} | {low + max(1, (high - low) * i // parts) for i in range(1, parts)})
        keys += [keys[-1]] * (parts - len(keys))
        pivots = key_floats(torch.tensor(keys)).to(shards[0].device)
        for place, number in zip(keys, _count(shards, pivots, ranks).tolist(), strict=True):
            learn(place, number)
    return tuple(key_floats(torch.tensor([low, high])).tolist())
