"""Selection: the exact k best of scores that lie in many tensors, or on many ranks.

No sort, no concatenation, no copy of the scores. A small sample of them gives pivots around the k-th; one pass counts
what is at or above each (the pruner fuses it into the update); the counts say, almost to the unit, where the k-th lies;
a second pass counts inside that narrow bracket, block by block, and only the blocks with candidates are read again.
Every count is exact, so an unlucky sample costs further passes and never the result. Equal scores are told apart by
position: the first ones stay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from platon.engine.kernels import BLOCK, Scored
from platon.engine.shard import ALONE, Ranks

PIVOTS = 3  # counted in one pass: more of them cost more than the memory traffic that they ride on


@dataclass(frozen=True)
class Cut:
    """The boundary: a unit stays if its score is above `value`, or equal to it at `position` or before."""

    value: Tensor
    position: Tensor

    @classmethod
    def above(cls, value: float, device: torch.device) -> "Cut":
        """What scores above `value` stays, however much that is."""
        return cls(torch.tensor(value, dtype=torch.float32, device=device), torch.tensor(-1, device=device))

    def zero(self, shards: Sequence[Scored], bits: Sequence[Tensor]) -> None:
        """Zero the weights that go, and write to `bits` which stay."""
        beyond = torch.nextafter(self.value, torch.full_like(self.value, math.inf))
        # Nothing is above infinity, and no score reaches NaN.
        beyond = torch.where(beyond == self.value, torch.nan, beyond)
        room = max(shard.size for shard in shards)
        scratch = {device: torch.empty(room, dtype=torch.uint8, device=device) for device in {s.device for s in shards}}
        for shard, last, target in zip(shards, self.lasts(shards), bits, strict=True):
            here = shard.device
            shard.mask(self.value.to(here), beyond.to(here), last.to(here), target, scratch[here])

    def lasts(self, shards: Sequence[Scored]) -> tuple[Tensor, ...]:
        """How many units of each shard lie at the boundary's position or before."""
        places = torch.tensor([(shard.start, shard.size) for shard in shards]).T.to(self.position.device)
        return (self.position + 1 - places[0]).clamp(min=0).minimum(places[1]).to(torch.int32).unbind()


@dataclass(frozen=True)
class Pivots:
    """Three scores around the k-th, descending, with the part of the sample that lies between them.

    Args:
        value: the pivots.
        place: how many of `window` are at or above each.
        window: the sampled scores between the outer pivots, descending.
        count: how many of all scores are at or above each, once they are counted.
    """

    value: Tensor
    place: Tensor
    window: Tensor
    count: Tensor | None = None

    def counted(self, count: Tensor) -> "Pivots":
        """With the counts of all scores."""
        return replace(self, count=count)


def sample_index(size: int, total: int, device: torch.device) -> Tensor:
    """Positions of a tensor's share of the sample: one in each of equal strips, at a place that follows no period."""
    # As large as it takes for the bracket that it leads to to hold no more than is worth collecting.
    sample = min(max(total // 32, 1024), 1 << 16)
    count = min(size, math.ceil(sample * size / total))
    strip = torch.arange(count, dtype=torch.float64, device=device)
    place = (strip * ((math.sqrt(5) - 1) / 2)) % 1  # a Weyl sequence: even, aperiodic, and no random state
    return ((strip + place) * (size / max(count, 1))).long().clamp_(max=max(size - 1, 0))


def pick_pivots(sample: Tensor, k: int, total: int) -> Pivots:
    """Pivots that most likely enclose the k-th of `total`, and one between them where the sample leaves its widest gap.

    Once pruning has settled, that gap is real: kept and pruned weights live in different ranges, and the k-th stands at
    its edge. Where scores are spread smoothly, any place near the k-th serves.
    """
    size = sample.numel()
    middle = k / total * size
    spread = math.sqrt(middle * (1 - k / total))
    first = min(max(math.floor(middle - 4 * spread) - 2, 0), size - 1)
    last = min(math.ceil(middle + 4 * spread) + 2, size - 1)
    if last < size // 2:
        window = sample.topk(last + 1).values[first:]
    else:
        window = sample.topk(size - first, largest=False).values[size - 1 - last :].flip(0)
    start = min(max(math.floor(middle - 2 * spread) - first, 0), window.numel() - 1)
    near = slice(start, math.ceil(middle + 2 * spread) - first + 2)
    keys = _keys(window[near])
    edge = (keys[:-1] - keys[1:]).argmax().clamp(min=0) if keys.numel() > 1 else torch.zeros_like(keys[0])
    # `take`, here and below: indexing by a tensor of a single number makes the host read that number first.
    sides = keys.take(torch.stack([edge, (edge + 1).clamp(max=keys.numel() - 1)]))
    gap = _numbers(sides.sum().div(2, rounding_mode="floor"))
    value = torch.stack([window[0], gap, window[-1]])
    place = torch.stack([torch.zeros_like(edge), near.start + edge + 1, torch.full_like(edge, window.numel())])
    return Pivots(value, place, window)


def find_cut(shards: Sequence[Scored], k: int, total: int, pivots: Pivots | None = None, ranks: Ranks = ALONE) -> Cut:
    """The cut that keeps exactly `k` of `total` units; one read of device memory unless the sample was unlucky."""
    if not 1 <= k <= total:
        raise ValueError(f"k must be between 1 and the number of units, {total}, got {k}")
    device = shards[0].device
    room = max(4096, total // 512)  # candidates worth collecting
    low, high = -math.inf, math.inf
    if total > room:
        if pivots is None:
            sample = [shard.peek(sample_index(shard.size, total, shard.device)) for shard in shards]
            pivots = pick_pivots(ranks.gather(torch.cat([part.to(device) for part in sample])), k, total)
            pivots = pivots.counted(count(shards, pivots.value, ranks))
        found = _Bracket(shards, *_narrow(pivots, k), ranks, pivots)
        if found.holds(k) and found.within <= room:
            return found.cut(k)
        low, high = _search(shards, k, total, room, found, ranks)
    found = _Bracket(shards, torch.tensor(low, device=device), torch.tensor(high, device=device), ranks)
    if not found.holds(k):
        raise ValueError(
            "a score is NaN, so there is no order; look for NaN among the weights or in the pruner's state"
        )
    return found.cut(k) if found.within <= room else found.tie(k)


def count(shards: Sequence[Scored], pivots: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """How many scores of all shards and ranks are at or above each pivot."""
    found = [shard.count(pivots.to(shard.device)).to(pivots.device) for shard in shards]
    return ranks.sum(torch.stack(found).sum(0))  # in int64, however many matrices


def _narrow(pivots: Pivots, k: int) -> tuple[Tensor, Tensor]:
    """The bracket in which the k-th lies, up to chance; worked out on the device.

    The counts at two pivots are exact, so what lies between them is known but for how the sample strays in between: a
    bridge, whose deviation at the share f of m samples is √(m f (1-f)).
    """
    assert pivots.count is not None
    window, place, counts = pivots.window, pivots.place, pivots.count
    upper = (counts[1] < k).long()
    ends = torch.stack([upper, upper + 1])
    (begin, end), (above, at_least), (top, bottom) = (t.take(ends) for t in (place, counts, pivots.value))
    between = (end - begin).double()
    share = ((k - above) / (at_least - above).clamp(min=1)).clamp(0, 1).double()
    middle = begin + share * between
    error = 4 * (between * share * (1 - share)).sqrt() + 3
    first, last = (middle - error).floor().long(), (middle + error).ceil().long()
    inner = window.take(torch.stack([first, last]).clamp(0, window.numel() - 1))
    high = torch.where(first < begin, top, inner[0])
    low = torch.where(last >= end, bottom, inner[1])
    return low, high


class _Bracket:
    """What lies in [low, high]: measured in one pass, and read by the host once."""

    def __init__(
        self, shards: Sequence[Scored], low: Tensor, high: Tensor, ranks: Ranks, pivots: Pivots | None = None
    ) -> None:
        self.shards, self.ranks, self.bounds = shards, ranks, (low, high)
        found = [shard.bracket(low.to(shard.device), high.to(shard.device)) for shard in shards]
        self.blocks = [blocks for _, blocks in found]
        local = torch.stack([numbers.to(low.device) for numbers, _ in found])
        over_all = ranks.sum(local[:, :2].sum(0))
        known = [] if pivots is None or pivots.count is None else [pivots.value.double(), pivots.count.double()]
        ends = torch.stack([low, high]).double()
        read: list[float] = torch.cat([over_all, ends, *known, local.flatten()]).tolist()  # the one synchronisation
        self.above, self.within = int(read[0]), int(read[1])
        self.low, self.high = read[2:4]
        rest = read[4:]
        #: (score, how many are at or above it), for the search that follows an unlucky guess
        self.known: list[tuple[float, int]] = []
        if known:
            size = known[0].numel()
            self.known = [
                (value, int(number)) for value, number in zip(rest[:size], rest[size : 2 * size], strict=True)
            ]
            rest = rest[2 * size :]
        #: (candidates, blocks with candidates) of each shard
        self.local = [(int(inside), int(filled)) for inside, filled in zip(rest[1::3], rest[2::3], strict=True)]

    def holds(self, k: int) -> bool:
        """Whether the k-th is in here."""
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

    def _collect(self, shard: Scored, blocks: Tensor, within: int, filled: int) -> tuple[Tensor, Tensor]:
        chosen = torch.nonzero_static(blocks, size=filled).view(-1)
        value = shard.peek_blocks(chosen).view(-1)
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

    def _nth(self, shard: Scored, blocks: Tensor, n: int) -> Tensor:
        seen = blocks.cumsum(0, dtype=torch.float64)
        block = torch.searchsorted(seen, torch.tensor([n], dtype=seen.dtype, device=seen.device))
        equal = shard.peek_blocks(block).view(-1) == self.bounds[0].to(shard.device)
        before = seen[block] - blocks[block]
        return block[0] * BLOCK + (equal.cumsum(0) + before >= n).int().argmax()


def _search(
    shards: Sequence[Scored], k: int, total: int, room: int, guess: _Bracket, ranks: Ranks
) -> tuple[float, float]:
    """Bounds of the k-th, few enough scores or a single value apart: a search over the float32 numbers themselves."""

    def key(number: float) -> int:
        return int(_keys(torch.tensor([number], dtype=torch.float32))[0])

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
        # The number after low settles at once what is common: that very many scores equal low.
        keys = sorted({low + 1} | {low + max(1, (high - low) * i // PIVOTS) for i in range(1, PIVOTS)})
        keys += [keys[-1]] * (PIVOTS - len(keys))
        pivots = _numbers(torch.tensor(keys)).to(shards[0].device)
        for place, number in zip(keys, count(shards, pivots, ranks).tolist(), strict=True):
            learn(place, number)
    return tuple(_numbers(torch.tensor([low, high])).tolist())


def _keys(numbers: Tensor) -> Tensor:
    """Whole numbers in the order of the float32 numbers, without gaps."""
    bits = numbers.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _numbers(keys: Tensor) -> Tensor:
    """The float32 numbers of keys."""
    return torch.where(keys < 0, -keys - (1 << 31), keys).to(torch.int32).view(torch.float32)
