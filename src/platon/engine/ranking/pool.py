"""Pools: units that share the tensors of a state, and the last selection among them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from platon.engine.matrix import Matrix
from platon.engine.ranking import bits as packed
from platon.engine.score import Score, State


@dataclass
class Pool:
    """The weights of one matrix, or the units of one group.

    Args:
        name: stands before the names of its tensors in a checkpoint.
        count: units that are on this rank.
        total: units on all ranks.
        weights: weights of these units on all ranks.
        start: the position of its first unit among all, which decides between equal scores.
        state: the score's state of these units.
        bits: the last selection, a bit a unit.
        matrix: where each weight is a unit: its matrix, whose shape and sharding the state's tensors share.
    """

    name: str
    count: int
    total: int
    weights: int
    start: int
    state: State
    bits: Tensor
    matrix: Matrix | None = None

    @classmethod
    def of_matrix(cls, matrix: Matrix, score: Score) -> "Pool":
        """Every weight is a unit; nothing is pruned yet."""
        state = score.init(matrix.size, matrix.device)
        bits = packed.full(matrix.size, matrix.device)
        return cls(matrix.name, matrix.size, matrix.total, matrix.total, matrix.start, state, bits, matrix)

    @classmethod
    def of_group(cls, name: str, count: int, weights: int, start: int, score: Score, device: torch.device) -> "Pool":
        """Units of many weights each, which every rank knows; nothing is pruned yet."""
        return cls(name, count, count, weights, start, score.init(count, device), packed.full(count, device))

    def update(self, score: Score, signal: Tensor | None, phase: int) -> None:
        """Take the signal of this step into the state."""
        state = self.state | score.factors(self.state)
        for name, tensor in score.update(state, signal, phase).items():
            state[name].copy_(tensor)

    def kept(self) -> Tensor:
        """The last selection, a bool a unit."""
        return packed.unpack(self.bits, self.count)


def how_many(keep: float, total: int) -> int:
    """How many of `total` stay: round(keep · total), and at least one."""
    return max(1, round(keep * total))
