"""What lies around the cut: counts of scores, and the k-th among the few candidates that a range holds.

Every tensor here has a row for each part; shards come in one list, the same number for each part.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from platon.engine.ranking.passes import BLOCK
from platon.engine.ranking.scored import Shards, block_values
from platon.engine.score import nan_error
from platon.engine.shard import Ranks


def for_each(shards: Shards, numbers: Tensor) -> Tensor:
    """For each shard the row of its part."""
    return numbers.repeat_interleave(len(shards) // len(numbers), 0)


def count(shards: Shards, pivots: Tensor, ranks: Ranks) -> Tensor:
    """For each part, on all ranks: how many scores are at or above each of its pivots, and last how many are NaN."""
    pairs = zip(shards, for_each(shards, pivots), strict=True)
    found = [shard.count(own.to(shard.device)).to(pivots.device) for shard, own in pairs]
    return ranks.sum(torch.stack(found).view(len(pivots), -1, pivots.shape[1] + 1).sum(1))  # in int64


def refuse_nan(shards: Shards, counts: Sequence[Sequence[int]]) -> None:
    """Raise an error that names the first shard with a score that is NaN; `counts` has what `count` says of each."""
    for shard, (*_, nans) in zip(shards, counts, strict=True):
        if nans:
            raise nan_error(shard.name)


class Bracket:
    """What lies in [low, high] of each part: measured in one pass, and read by the host once."""

    def __init__(self, shards: Shards, low: Tensor, high: Tensor, ranks: Ranks) -> None:
        self.shards, self.ranks, self.low, self.high = shards, ranks, low, high
        self._own = len(shards) // len(low)  # shards of a part
        ends = for_each(shards, torch.stack([low, high], 1))
        found = [shard.bracket(*own.to(shard.device).unbind()) for shard, own in zip(shards, ends, strict=True)]
        self._blocks = [blocks for _, blocks in found]  # candidates of each shard, by block
        local = torch.stack([numbers.to(low.device) for numbers, _ in found]).view(len(low), self._own, -1)
        over_all = ranks.sum(torch.cat([local[..., :2], local[..., 3:].isnan()], 2).sum(1))
        read: list[list[float]] = torch.cat([over_all, local[..., 1:3].flatten(1)], 1).tolist()  # waits for a device
        if any(row[2] for row in read):  # a score is NaN, or the sum adds infinite scores of either sign
            refuse_nan(shards, count(shards, torch.zeros(len(shards), 1, device=low.device), ranks).tolist())
        self.above = [int(row[0]) for row in read]  # how many scores of each part, on all ranks, are above its range
        self.within = [int(row[1]) for row in read]  # and within it
        numbers = [int(number) for row in read for number in row[3:]]
        self._local = list(zip(numbers[::2], numbers[1::2], strict=True))  # candidates and their blocks, by shard

    def cut(self, k: int, room: int) -> tuple[Tensor, Tensor]:
        """Score and position of each part's k-th: one of few candidates, or the last of many equal ones that stays."""
        every = range(len(self.within))
        if max(self.within) <= room:
            return self._among(k, every)
        cuts = [self._among(k, [i]) if self.within[i] <= room else self._tie(k, i) for i in every]
        value, position = zip(*cuts, strict=True)
        return torch.cat(value), torch.cat(position)

    def _among(self, k: int, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The k-th among the candidates of some parts, collected from the blocks that have any."""
        values, positions = map(self.ranks.gather, self._collect(chosen))
        if self.ranks.group is not None:
            positions, order = positions.sort()
            values = values[order]
        sizes = [self.within[i] for i in chosen]
        rows = pad_sequence(list(torch.split(values, sizes)), batch_first=True, padding_value=-math.inf)
        places = pad_sequence(list(torch.split(positions, sizes)), batch_first=True)
        # Stable, so that among equal scores the first positions come first, and the padding last.
        ranking = rows.sort(descending=True, stable=True)
        nth = torch.tensor([[k - self.above[i] - 1] for i in chosen], device=self.low.device)
        return ranking.values.gather(1, nth)[:, 0], places.gather(1, ranking.indices.gather(1, nth))[:, 0]

    def _collect(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Scores and positions of the candidates of some parts that are here."""
        device = self.low.device
        here = [i for i, (within, _) in enumerate(self._local) if within and i // self._own in chosen]
        if not here:
            return torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
        shards = [self.shards[i] for i in here]
        within, filled = zip(*(self._local[i] for i in here), strict=True)
        blocks = [torch.nonzero_static(self._blocks[i], size=self._local[i][1]).view(-1) for i in here]
        first = torch.cat([(b * BLOCK + s.start).to(device) for b, s in zip(blocks, shards, strict=True)])
        value = block_values(shards, blocks).to(device)
        part = torch.tensor([i // self._own for i in here]).repeat_interleave(torch.tensor(filled)).to(device)
        low, high = (ends.index_select(0, part)[:, None] for ends in (self.low, self.high))
        inside = torch.nonzero_static((value >= low) & (value <= high), size=sum(within))
        row, column = inside.unbind(1)
        return value[row, column], first[row] + column

    def _tie(self, k: int, part: int) -> tuple[Tensor, Tensor]:
        """The cut among too many equal scores to collect: their counts per block lead to the last one that stays."""
        value, n = self.low[part], k - self.above[part]
        here = range(part * self._own, (part + 1) * self._own)
        mine = torch.tensor([(self.shards[i].start, self._local[i][0]) for i in here], device=value.device)
        everyone: list[int] = self.ranks.gather(mine.flatten()).tolist()
        position = torch.zeros((), dtype=torch.int64, device=value.device)
        for i in here:
            start, within = self.shards[i].start, self._local[i][0]
            before = sum(count for other, count in zip(everyone[::2], everyone[1::2], strict=True) if other < start)
            if before < n <= before + within:
                position += start + self._nth(i, n - before, value).to(value.device)
        return value.view(1), self.ranks.sum(position).view(1)

    def _nth(self, i: int, n: int, value: Tensor) -> Tensor:
        """Where the n-th score of a shard that equals `value` is."""
        blocks = self._blocks[i]
        seen = blocks.cumsum(0, dtype=torch.float64)
        block = torch.searchsorted(seen, torch.tensor([n], dtype=seen.dtype, device=seen.device))
        equal = block_values([self.shards[i]], [block]).view(-1) == value.to(seen.device)
        before = seen[block] - blocks[block]
        return block[0] * BLOCK + (equal.cumsum(0) + before >= n).int().argmax()
