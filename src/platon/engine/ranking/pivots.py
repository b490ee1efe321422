"""Pivots: from a small sample of the scores, a narrow range in which the k-th score of all lies."""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

COUNT = 3  # counted in one pass: more of them cost more than the memory traffic that they share


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


def float_keys(numbers: Tensor) -> Tensor:
    """Whole numbers in the order of the float32 numbers, without gaps."""
    bits = numbers.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def key_floats(keys: Tensor) -> Tensor:
    """The float32 numbers that `float_keys` gives these keys for."""
    return torch.where(keys < 0, -keys - (1 << 31), keys).to(torch.int32).view(torch.float32)
