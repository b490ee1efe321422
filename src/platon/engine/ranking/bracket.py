"""What lies around the cut: counts of scores, and the k-th among the few candidates that a range holds.

Every tensor here has a row for each part; shards come in one list, the same number for each part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from platon.engine.ranking.passes import BLOCK
from platon.engine.ranking.pivots import Pivots
from platon.engine.ranking.scored import ScoredWeights, block_values
from platon.engine.score import nan_error
from platon.engine.shard import ALONE, Ranks


def for_each(shards: Sequence[ScoredWeights], numbers: Tensor) -> list[Tensor]:
    """For each shard the row of its part."""
    own = len(shards) // numbers.shape[0]
    return [row for row in numbers.unbind() for _ in range(own)]


def refuse_nan(shards: Sequence[ScoredWeights], ranks: Ranks = ALONE) -> None:
    """Raise an error that names the first parameter with a score that is NaN, if there is one; on every rank alike."""
    device = shards[0].device
    found = [shard.count(torch.zeros(1, device=shard.device))[1].to(device) > 0 for shard in shards]
    for shard, is_nan in zip(shards, ranks.any(torch.stack(found)).tolist(), strict=True):
        if is_nan:
            raise nan_error(shard.name)


def count(shards: Sequence[ScoredWeights], pivots: Tensor, ranks: Ranks) -> Tensor:
    """How many scores of each part, on all ranks, are at or above each of its pivots."""
    found = [
        shard.count(own.to(shard.device))[0].to(pivots.device)
        for shard, own in zip(shards, for_each(shards, pivots), strict=True)
    ]
    return ranks.sum(torch.stack(found).view(len(pivots), -1, pivots.shape[1]).sum(1))  # in int64


@dataclass(frozen=True)
class Part:
    """What the host knows of a part and its range [low, high].

    Args:
        above: scores above the range, on all ranks.
        within: scores in it, on all ranks.
        low: the range's lower end.
        high: its upper end.
        local: candidates, and blocks with candidates, of each shard here.
        known: (score, how many are at or above it), for the search that follows an unlucky guess.
    """

    above: int
    within: int
    low: float
    high: float
    local: list[tuple[int, int]]
    known: list[tuple[float, int]]

    def holds(self, k: int) -> bool:
        return self.above < k <= self.above + self.within


class Bracket:
    """What lies in [low, high] of each part: measured in one pass, and read by the host once."""

    def __init__(
        self, shards: Sequence[ScoredWeights], low: Tensor, high: Tensor, ranks: Ranks, pivots: Pivots | None = None
    ) -> None:
        self.shards, self.ranks, self.low, self.high = shards, ranks, low, high
        own = len(shards) // len(low)
        ends = zip(shards, for_each(shards, low), for_each(shards, high), strict=True)
        found = [shard.bracket(lowest.to(shard.device), highest.to(shard.device)) for shard, lowest, highest in ends]
        self.blocks = [blocks for _, blocks in found]
        local = torch.stack([numbers.to(low.device) for numbers, _ in found]).view(len(low), own, -1)
        over_all = ranks.sum(torch.cat([local[..., :2], local[..., 3:].isnan()], 2).sum(1))
        rows = [over_all, low[:, None], high[:, None], local[..., 1:3].flatten(1)]
        if pivots is not None and pivots.count is not None:
            rows.append(torch.stack([pivots.value.double(), pivots.count.double()], 2).flatten(1))
        read: list[list[float]] = torch.cat([row.double() for row in rows], 1).tolist()  # waits for a device
        if any(row[2] for row in read):
            refuse_nan(shards, ranks)  # or the sum is NaN because it adds infinite scores of either sign
        self.parts: list[Part] = []
        for above, within, _, lowest, highest, *pairs in read:
            numbers = list(zip(pairs[::2], pairs[1::2], strict=True))
            mine = [(int(inside), int(filled)) for inside, filled in numbers[:own]]
            known = [(value, int(number)) for value, number in numbers[own:]]
            self.parts.append(Part(int(above), int(within), lowest, highest, mine, known))

    def cut(self, k: int, room: int) -> tuple[Tensor, Tensor]:
        """Score and position of each part's k-th: one of few candidates, or the last of many equal ones that stays."""
        own = len(self.shards) // len(self.parts)
        few = [i for i, part in enumerate(self.parts) if part.within <= room]
        if len(few) < len(self.parts):
            cuts = [self._among(k, [i], own) if i in few else self._tie(k, i, own) for i in range(len(self.parts))]
            value, position = zip(*cuts, strict=True)
            return torch.cat(value), torch.cat(position)
        return self._among(k, few, own)

    def _among(self, k: int, chosen: Sequence[int], own: int) -> tuple[Tensor, Tensor]:
        """The k-th among the candidates of some parts, collected from the blocks that have any."""
        values, positions = map(self.ranks.gather, self._collect(chosen, own))
        if self.ranks.group is not None:
            positions, order = positions.sort()
            values = values[order]
        sizes = [self.parts[i].within for i in chosen]
        rows = pad_sequence(list(torch.split(values, sizes)), batch_first=True, padding_value=-math.inf)
        # Stable, so that among equal scores the first positions come first, and the padding last.
        ranking = rows.sort(descending=True, stable=True)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        numbers = [(k - self.parts[i].above - 1, start) for i, start in zip(chosen, starts, strict=True)]
        place, start = torch.tensor(numbers, device=self.low.device).T
        index = ranking.indices.gather(1, place[:, None])[:, 0]
        return ranking.values.gather(1, place[:, None])[:, 0], positions.take(index + start)

    def _collect(self, chosen: Sequence[int], own: int) -> tuple[Tensor, Tensor]:
        """Scores and positions of the candidates of some parts that are here."""
        device = self.low.device
        found = [
            (i, i * own + number, within, filled)
            for i in chosen
            for number, (within, filled) in enumerate(self.parts[i].local)
            if within
        ]
        if not found:
            return torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
        part, place, within, filled = zip(*found, strict=True)
        shards = [self.shards[i] for i in place]
        blocks = [
            torch.nonzero_static(self.blocks[i], size=size).view(-1) for i, size in zip(place, filled, strict=True)
        ]
        first = torch.cat([(b * BLOCK + s.start).to(device) for b, s in zip(blocks, shards, strict=True)])
        value = block_values(shards, blocks).to(device)
        row = torch.tensor(part).repeat_interleave(torch.tensor(filled)).to(device)
        low, high = (ends.index_select(0, row)[:, None] for ends in (self.low, self.high))
        inside = torch.nonzero_static((value >= low) & (value <= high), size=sum(within))
        row, column = inside.unbind(1)
        return value[row, column], first[row] + column

    def _tie(self, k: int, part: int, own: int) -> tuple[Tensor, Tensor]:
        """The cut among too many equal scores to collect: their counts per block lead to the last one that stays."""
        device = self.low.device
        shards, local = self.shards[part * own : (part + 1) * own], self.parts[part].local
        mine = torch.tensor([(shard.start, within) for shard, (within, _) in zip(shards, local, strict=True)])
        everyone: list[int] = self.ranks.gather(mine.flatten().to(device)).tolist()
        left = k - self.parts[part].above
        start = -1
        for start, within in sorted(zip(everyone[::2], everyone[1::2], strict=True)):  # noqa: B007  # the last one counts
            if left <= within:
                break
            left -= within
        position = torch.zeros((), dtype=torch.int64, device=device)
        value = self.low[part]
        for shard, blocks in zip(shards, self.blocks[part * own :], strict=False):
            if shard.start == start and shard.size:
                position = (start + self._nth(shard, blocks, left, value.to(shard.device))).to(device)
        return value.view(1), self.ranks.sum(position).view(1)

    @staticmethod
    def _nth(shard: ScoredWeights, blocks: Tensor, n: int, value: Tensor) -> Tensor:
        seen = blocks.cumsum(0, dtype=torch.float64)
        block = torch.searchsorted(seen, torch.tensor([n], dtype=seen.dtype, device=seen.device))
        equal = block_values([shard], [block]).view(-1) == value
        before = seen[block] - blocks[block]
        return block[0] * BLOCK + (equal.cumsum(0) + before >= n).int().argmax()
