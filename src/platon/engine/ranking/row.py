"""Selection inside rows: the best weights of each output feature, or of every few neighbours among its inputs."""

import torch
from torch import Tensor

from platon.engine.matrix import Matrix
from platon.engine.ranking.ranking import how_many
from platon.engine.scope import Scope, pattern_of

_AT_ONCE = 1 << 22  # scores that are sorted at a time


def keep_of(scope: Scope, keep: float, matrix: Matrix) -> tuple[int, int]:
    """Of how many neighbours how many stay, in each row of a matrix, at a share of `keep`."""
    width = matrix.inputs
    pattern = pattern_of(scope)
    if pattern is None:
        return width, how_many(keep, width)
    least, size = pattern
    if width % size:
        raise ValueError(
            f"{matrix.name!r} has {width} inputs, no multiple of {size}, so scope {scope} does not fit it; "
            "leave it out with exclude"
        )
    if keep < least / size - 1e-6:
        raise ValueError(
            f"scope {scope} keeps {least / size:g} of the weights, and {keep:g} is asked for; ask for that"
        )
    return size, max(least, how_many(keep, size))  # more than N of M stay while the share falls


def best(values: Tensor, size: int, k: int) -> Tensor:
    """A mask of the `k` highest of every `size` neighbours; of equal scores the first stay. `values` are rows."""
    groups = values.reshape(-1, size)
    kept = torch.empty(groups.shape, dtype=torch.bool, device=values.device)
    step = max(1, _AT_ONCE // size)
    for start in range(0, len(groups), step):
        part = groups[start : start + step]
        order = part.sort(dim=1, descending=True, stable=True).indices[:, :k]
        kept[start : start + step] = torch.zeros_like(part, dtype=torch.bool).scatter_(1, order, True)
    return kept.view(values.shape)
