"""Selection: the exact k best of scores that lie in many tensors, or on many ranks.

No sort, no concatenation, no copy of the scores. A small sample of them gives pivots around the k-th; one pass counts
the scores at or above each pivot (the same pass updates the scores); the counts say, almost to the unit, where the k-th
lies; a second pass counts inside that narrow range, block by block, and only blocks with candidates are read again.
Every count is exact, so an unlucky sample costs further passes and never the result. Equal scores are told apart by
position: the first ones stay.

Parts (matrices of the same size, each ranked by itself) are cut together: the arithmetic above has a row for each part.
Shards come in one list, in order of position and the same number for each part.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from platon.engine.ranking.bracket import Bracket, count, for_each
from platon.engine.ranking.scored import Shards, preview, values_at
from platon.engine.shard import ALONE, Ranks

_PIVOTS = 3  # counted in one pass: more of them cost more than the memory traffic that they share
_SMALL = 1 << 16  # units up to which sampling before the update does not pay off


@dataclass(frozen=True)
class Cut:
    """The boundary: a unit stays if its score is above `value`, or equal to it at `position` or before."""

    value: Tensor  # a number for each part, or one for all shards
    position: Tensor  # likewise

    @classmethod
    def above(cls, value: float, device: torch.device) -> "Cut":
        """Units that score above `value` stay, however many."""
        return cls(torch.tensor([value], dtype=torch.float32, device=device), torch.tensor([-1], device=device))

    def apply(self, shards: Shards, bits: Sequence[Tensor]) -> None:
        """Zero the weights that go, and write to `bits` which stay."""
        beyond = torch.nextafter(self.value, torch.full_like(self.value, math.inf))
        # Nothing is above infinity: NaN as the second bound keeps nothing.
        beyond = torch.where(beyond == self.value, torch.nan, beyond)
        room = max(shard.size for shard in shards)
        scratch = {device: torch.empty(room, dtype=torch.uint8, device=device) for device in {s.device for s in shards}}
        starts, sizes = torch.tensor([(shard.start, shard.size) for shard in shards]).T.to(self.position.device)
        # How many units of each shard lie at the boundary's position or before.
        lasts = (for_each(shards, self.position) + 1 - starts).clamp(min=0).minimum(sizes).to(torch.int32)
        bounds = for_each(shards, self.value), for_each(shards, beyond), lasts
        for shard, target, cut, next_cut, last in zip(shards, bits, *bounds, strict=True):
            here = shard.device
            shard.mask(cut.to(here), next_cut.to(here), last.to(here), target, scratch[here])


@dataclass(frozen=True)
class Pivots:
    """Three scores around the k-th, descending, with the part of the sample that lies between them; a row a part."""

    value: Tensor
    between: Tensor  # the sampled scores between the outer pivots, descending
    place: Tensor  # how many of `between` are at or above each pivot
    count: Tensor | None = None  # how many of all scores are at or above each pivot, once they are counted

    def counted(self, count: Tensor) -> "Pivots":
        return replace(self, count=count)

    def narrow(self, k: int) -> tuple[Tensor, Tensor]:
        """The range in which the k-th score of each part most likely lies; computed on the device."""
        assert self.count is not None
        upper = (self.count[:, 1] < k).long()
        ends = torch.stack([upper, upper + 1], 1)
        (begin, end), (above, at_least), (top, bottom) = (
            rows.gather(1, ends).unbind(1) for rows in (self.place, self.count, self.value)
        )
        # The counts at two neighbouring pivots are exact. Between them the sample deviates like a Brownian bridge: at
        # the share f of m samples by a standard deviation of √(m f (1-f)). The range has four of them on either side.
        samples = (end - begin).double()
        share = ((k - above) / (at_least - above).clamp(min=1)).clamp(0, 1).double()
        middle = begin + share * samples
        error = 4 * (samples * share * (1 - share)).sqrt() + 3
        first, last = (middle - error).floor().long(), (middle + error).ceil().long()
        inner = self.between.gather(1, torch.stack([first, last], 1).clamp(0, self.between.shape[1] - 1))
        high = torch.where(first < begin, top, inner[:, 0])
        low = torch.where(last >= end, bottom, inner[:, 1])
        return low, high


def update_and_count(
    shards: Shards, gradients: Sequence[Tensor | None], phase: int, k: int, total: int, ranks: Ranks
) -> Pivots | None:
    """Take the gradients into the scores; the pivots for `find_cut`, if the same pass has counted around the k-th."""
    pairs = list(zip(shards, gradients, strict=True))
    if total <= _SMALL:
        for shard, gradient in pairs:
            shard.update(gradient, phase)
        return None
    sample = preview(shards, _sample(shards, total), gradients, phase)
    pivots = pick_pivots(ranks.gather(sample)[None], k, total)
    counts = [shard.update(gradient, phase, pivots.value[0].to(shard.device)) for shard, gradient in pairs]
    home = pivots.value.device
    here = torch.stack([count.to(home) for count in counts if count is not None]).sum(0, keepdim=True)  # in int64
    return pivots.counted(ranks.sum(here))


def find_cut(
    shards: Shards, k: int, total: int, pivots: Pivots | None = None, ranks: Ranks = ALONE, parts: int = 1
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
        sample = values_at(shards, _sample(shards, total))
        # A column a part, so that those of other ranks fit below.
        columns = sample.view(parts, sample.numel() // parts).T
        pivots = pick_pivots(ranks.gather(columns.flatten()).view(-1, parts).T, k, total)
        pivots = pivots.counted(count(shards, pivots.value, ranks)[:, :-1])
    bracket = Bracket(shards, *pivots.narrow(k), ranks)
    counted = zip(bracket.above, bracket.within, strict=True)
    if not all(above < k <= above + within and within <= room for above, within in counted):
        known, own = _known(bracket, pivots, total), len(shards) // parts
        bounds = [_search(shards[i * own : (i + 1) * own], k, room, known[i], ranks) for i in range(parts)]
        low, high = torch.tensor(bounds, device=device).T
        bracket = Bracket(shards, low, high, ranks)
    return Cut(*bracket.cut(k, room))


def _sample(shards: Shards, total: int) -> list[Tensor]:
    return [sample_index(shard.size, total, shard.device) for shard in shards]


@functools.lru_cache(maxsize=64)  # every selection asks for the same ones again
def sample_index(size: int, total: int, device: torch.device) -> Tensor:
    """Positions of a matrix's part of the sample: one in each of equal strips, at a place that follows no period."""
    # Large enough that the range that it leads to holds few candidates.
    sample = min(max(total // 32, 1024), 1 << 16)
    count = min(size, math.ceil(sample * size / total))
    strip = torch.arange(count, dtype=torch.float64, device=device)
    place = (strip * ((math.sqrt(5) - 1) / 2)) % 1  # a Weyl sequence: even, aperiodic, and no random state
    return ((strip + place) * (size / max(count, 1))).long().clamp_(max=max(size - 1, 0))


def pick_pivots(sample: Tensor, k: int, total: int) -> Pivots:
    """For each row: pivots that most likely enclose the k-th of `total` scores, and one in the sample's widest gap."""
    size = sample.shape[1]
    middle = k / total * size
    spread = math.sqrt(middle * (1 - k / total))
    first = min(max(math.floor(middle - 4 * spread) - 2, 0), size - 1)
    last = min(math.ceil(middle + 4 * spread) + 2, size - 1)
    if last < size // 2:
        between = sample.topk(last + 1).values[:, first:]
    else:
        between = sample.topk(size - first, largest=False).values[:, size - 1 - last :].flip(1)
    start = min(max(math.floor(middle - 2 * spread) - first, 0), between.shape[1] - 1)
    near = slice(start, math.ceil(middle + 2 * spread) - first + 2)
    # Once pruning has settled, the gap is real: kept and pruned weights score in different ranges, and the k-th stands
    # at the edge of the gap. Where scores are spread smoothly, any place near the k-th serves.
    keys = float_keys(between[:, near])
    edge = (keys[:, :-1] - keys[:, 1:]).argmax(1) if keys.shape[1] > 1 else torch.zeros_like(keys[:, 0])
    # `gather`, here and above: indexing with a tensor of one number would make the host wait for that number.
    sides = keys.gather(1, torch.stack([edge, (edge + 1).clamp(max=keys.shape[1] - 1)], 1))
    gap = key_floats(sides.sum(1).div(2, rounding_mode="floor"))
    value = torch.stack([between[:, 0], gap, between[:, -1]], 1)
    place = torch.stack([torch.zeros_like(edge), start + edge + 1, torch.full_like(edge, between.shape[1])], 1)
    return Pivots(value, between, place)


#: some float32 numbers, as whole numbers in their order, and how many scores are at or above each
_Known = list[tuple[int, int]]


def _known(bracket: Bracket, pivots: Pivots, total: int) -> list[_Known]:
    """What an unlucky guess has found out about each part."""
    assert pivots.count is not None
    ends = float_keys(torch.tensor([-math.inf, math.inf])).tolist()
    counted = zip(float_keys(pivots.value).tolist(), pivots.count.tolist(), strict=True)
    found = [[(ends[0], total), (ends[1] + 1, 0), *zip(*own, strict=True)] for own in counted]
    lows, highs = float_keys(bracket.low).tolist(), float_keys(bracket.high).tolist()
    for own, above, within, low, high in zip(found, bracket.above, bracket.within, lows, highs, strict=True):
        if low <= high:
            own += [(low, above + within), (high + 1, above)]
    return found


def _search(shards: Shards, k: int, room: int, known: _Known, ranks: Ranks) -> tuple[float, float]:
    """Bounds of the k-th, few enough scores or a single value apart: a search over the float32 numbers themselves."""
    while True:
        low, at_least = max((key, number) for key, number in known if number >= k)
        high, above = min((key, number) for key, number in known if number < k)
        if high == low + 1 or at_least - above <= room:
            return tuple(key_floats(torch.tensor([low, high - 1])).tolist())
        # The number after low comes first: very many scores that equal low are common, and this settles them at once.
        keys = sorted({low + 1} | {low + max(1, (high - 1 - low) * i // _PIVOTS) for i in range(1, _PIVOTS)})
        keys += [keys[-1]] * (_PIVOTS - len(keys))
        pivots = key_floats(torch.tensor(keys)).to(shards[0].device)
        known += zip(keys, count(shards, pivots[None], ranks)[0, :-1].tolist(), strict=True)


def float_keys(numbers: Tensor) -> Tensor:
    """Whole numbers in the order of the float32 numbers, without gaps."""
    bits = numbers.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def key_floats(keys: Tensor) -> Tensor:
    """The float32 numbers that `float_keys` gives these keys for."""
    return torch.where(keys < 0, -keys - (1 << 31), keys).to(torch.int32).view(torch.float32)
