"""Selection: the exact k best of scores that lie in many tensors, or on many ranks.

No sort, no concatenation, no copy of the scores. A small sample of them gives pivots around the k-th; one pass counts
the scores at or above each pivot (the same pass updates the scores); the counts say, almost to the unit, where the k-th
lies; a second pass counts inside that narrow range, block by block, and only blocks with candidates are read again.
Every count is exact, so an unlucky sample costs further passes and never the result. Equal scores are told apart by
position: the first ones stay.

Parts (matrices of the same size, each ranked by itself) are cut together: the arithmetic above has a row for each part.
Shards come in one list, in order of position and the same number for each part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from platon.engine.ranking import pivots as sampling
from platon.engine.ranking.bracket import Bracket, Part, count, for_each
from platon.engine.ranking.pivots import Pivots, float_keys, key_floats, pick_pivots, sample_index
from platon.engine.ranking.scored import ScoredWeights, preview, values_at
from platon.engine.shard import ALONE, Ranks

_SMALL = 1 << 16  # units up to which sampling before the update does not pay off


@dataclass(frozen=True)
class Cut:
    """The boundary: a unit stays if its score is above `value`, or equal to it at `position` or before.

    One number of each for every part, or for all shards.
    """

    value: Tensor
    position: Tensor

    @classmethod
    def above(cls, value: float, device: torch.device) -> "Cut":
        """Units that score above `value` stay, however many."""
        return cls(torch.tensor([value], dtype=torch.float32, device=device), torch.tensor([-1], device=device))

    def apply(self, shards: Sequence[ScoredWeights], bits: Sequence[Tensor]) -> None:
        """Zero the weights that go, and write to `bits` which stay."""
        beyond = torch.nextafter(self.value, torch.full_like(self.value, math.inf))
        # Nothing is above infinity: NaN as the second bound keeps nothing.
        beyond = torch.where(beyond == self.value, torch.nan, beyond)
        room = max(shard.size for shard in shards)
        scratch = {device: torch.empty(room, dtype=torch.uint8, device=device) for device in {s.device for s in shards}}
        values, after = for_each(shards, self.value), for_each(shards, beyond)
        for shard, cut, next_cut, last, target in zip(shards, values, after, self.lasts(shards), bits, strict=True):
            here = shard.device
            shard.mask(cut.to(here), next_cut.to(here), last.to(here), target, scratch[here])

    def lasts(self, shards: Sequence[ScoredWeights]) -> tuple[Tensor, ...]:
        """How many units of each shard lie at the boundary's position or before."""
        places = torch.tensor([(shard.start, shard.size) for shard in shards]).T.to(self.position.device)
        position = torch.stack(for_each(shards, self.position))
        return (position + 1 - places[0]).clamp(min=0).minimum(places[1]).to(torch.int32).unbind()


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
    found = pick_pivots(ranks.gather(preview(shards, index, gradients, phase))[None], k, total)
    counts = [
        shard.update(gradient, phase, found.value[0].to(shard.device))
        for shard, gradient in zip(shards, gradients, strict=True)
    ]
    home = found.value.device
    here = torch.stack([count.to(home) for count in counts if count is not None]).sum(0, keepdim=True)  # in int64
    return find_cut(shards, k, total, found.counted(ranks.sum(here)), ranks=ranks)


def find_cut(
    shards: Sequence[ScoredWeights],
    k: int,
    total: int,
    pivots: Pivots | None = None,
    sample: Sequence[Tensor] | None = None,
    ranks: Ranks = ALONE,
    parts: int = 1,
) -> Cut:
    """The cut that keeps exactly `k` of `total` units in each part; one read of device memory unless unlucky."""
    if not 1 <= k <= total:
        raise ValueError(f"k must be between 1 and the number of units, {total}, got {k}")
    device = shards[0].device
    room = max(4096, total // 512)  # candidates worth collecting
    if total <= room:
        all_scores = torch.full((parts,), math.inf, device=device)
        return Cut(*Bracket(shards, -all_scores, all_scores, ranks).cut(k, room))
    if pivots is None:
        index = sample or [sample_index(shard.size, total, shard.device) for shard in shards]
        seen = values_at(shards, index)
        columns = seen.view(parts, seen.numel() // parts).T  # a column a part, so that those of other ranks fit below
        pivots = pick_pivots(ranks.gather(columns.flatten()).view(-1, parts).T, k, total)
        pivots = pivots.counted(count(shards, pivots.value, ranks))
    found = Bracket(shards, *pivots.narrow(k), ranks, pivots)
    if all(part.holds(k) and part.within <= room for part in found.parts):
        return Cut(*found.cut(k, room))
    own = len(shards) // parts
    bounds = [
        _search(shards[i * own : (i + 1) * own], k, total, room, part, ranks) for i, part in enumerate(found.parts)
    ]
    low, high = torch.tensor(bounds, device=device).T
    return Cut(*Bracket(shards, low, high, ranks).cut(k, room))


def _search(
    shards: Sequence[ScoredWeights], k: int, total: int, room: int, guess: Part, ranks: Ranks
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

    if guess.holds(k) and guess.within <= room:
        return guess.low, guess.high
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
        for place, number in zip(keys, count(shards, pivots[None], ranks)[0].tolist(), strict=True):
            learn(place, number)
    return tuple(key_floats(torch.tensor([low, high])).tolist())
