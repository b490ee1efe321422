"""Pools: units that share the tensors of a state, and the last selection among them."""

import torch
from torch import Tensor

from platon.engine.matrix import Matrix
from platon.engine.ranking import bits as packed
from platon.engine.ranking.passes import take_signal
from platon.engine.score import Score
from platon.engine.slices import Group


class Pool:
    """The weights of one matrix, or the units of one group; none is pruned yet."""

    matrix: Matrix | None = None  #: where each weight is a unit: it has the shape and sharding of the state's tensors

    def __init__(self, score: Score, name: str, count: int, total: int, start: int, device: torch.device) -> None:
        self.name = name  #: stands before the names of its tensors in a checkpoint
        self.count, self.total = count, total  #: units on this rank, and on all ranks
        self.start = start  #: the position of its first unit among all, which decides between equal scores
        self.state = score.init(count, device)
        self.bits = packed.full(count, device)  #: the last selection, a bit a unit

    def update(self, score: Score, signal: Tensor | None, phase: int) -> None:
        """Take the signal of this step into the state."""
        take_signal(score, phase, self.state | score.factors(self.state), signal)

    def kept(self) -> Tensor:
        """The last selection, a bool a unit."""
        return packed.unpack(self.bits, self.count)

    def weigh(self, kept: Tensor) -> Tensor:
        """How many weights a mask of the units that are here keeps."""
        return kept.sum()


class MatrixPool(Pool):
    """Every weight of a matrix is a unit."""

    matrix: Matrix

    def __init__(self, score: Score, matrix: Matrix) -> None:
        super().__init__(score, matrix.name, matrix.size, matrix.total, matrix.start, matrix.device)
        self.matrix = matrix


class GroupPool(Pool):
    """Units of many weights each, which every rank knows."""

    def __init__(self, score: Score, group: Group, start: int, device: torch.device) -> None:
        super().__init__(score, group.name, group.count, group.count, start, device)
        self.sizes = group.sizes.to(device)  #: weights of each unit, on all ranks
        self.group = group.here()

    def weigh(self, kept: Tensor) -> Tensor:
        return self.sizes[kept].sum()


def how_many(keep: float, total: int) -> int:
    """How many of `total` stay: round(keep · total), and at least one."""
    return max(1, round(keep * total))
