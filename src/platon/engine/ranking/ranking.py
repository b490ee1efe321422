"""The ranking: all units of a pruner with their state. It takes gradients in and decides which units stay."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from platon.engine.matrix import Matrix
from platon.engine.ranking import noise
from platon.engine.ranking.bits import unpack
from platon.engine.ranking.passes import take_signal
from platon.engine.score import Above, Choice, Score, StepInfo, TopK
from platon.engine.shard import Ranks


class Pool:
    """Units that share the tensors of a state, and the last selection among them; none is pruned yet."""

    matrix: Matrix | None = None  #: where each weight is a unit: it has the shape and sharding of the state's tensors

    def __init__(self, score: Score, name: str, count: int, total: int, start: int, device: torch.device) -> None:
        self.name = name  #: stands before the names of its tensors in a checkpoint
        self.count, self.total = count, total  #: units on this rank, and on all ranks
        self.weight_count = total  #: weights on all ranks
        self.start = start  #: the position of its first unit among all, which decides between equal scores
        self.state = score.init(count, device)
        self.bits = torch.full((-(-count // 8),), 0xFF, dtype=torch.uint8, device=device)  #: a bit a unit, 1 = kept

    def update(self, score: Score, signal: Tensor | None, phase: int) -> None:
        take_signal(score, phase, self.state | score.factors(self.state), signal)

    def kept(self) -> Tensor:
        """The last selection, a bool a unit."""
        return unpack(self.bits, self.count)

    def weigh(self, kept: Tensor) -> Tensor:
        """How many weights a mask of the units that are here keeps."""
        return kept.sum()


def how_many(keep: float, total: int) -> int:
    """How many of `total` stay: round(keep · total), and at least one."""
    return max(1, round(keep * total))


class Ranking(ABC):
    """What a pruner asks of its units; the passes over memory differ between single weights and units of many."""

    fused = False  #: whether the passes are compiled

    def __init__(self, score: Score, matrices: Sequence[Matrix], ranks: Ranks, pools: Sequence[Pool]) -> None:
        self.score, self.matrices, self.ranks, self.pools = score, matrices, ranks, pools
        #: weights on all ranks, and those that the last selection kept
        self.total = self.kept_count = sum(pool.weight_count for pool in pools)
        self.cut: Tensor | None = None  #: the score at the boundary, where there is one for all

    def observe(self, info: StepInfo) -> None:
        """Before the optimizer moves the weights: set the state's single numbers, update scores that read w·g now."""
        for pool in self.pools:
            for name, number in self.score.numbers(info, 1 / (len(self.pools) * pool.total)).items():
                pool.state[name].fill_(number)
        if self.score.reads == "before":
            self.update(self.score.phase(info.step))

    def advance(self, info: StepInfo, choice: Choice | None) -> float | None:
        """After the step: update scores that read now, apply the cut of `choice`; the share above `choice.watched`."""
        phase, reads = self.score.phase(info.step), self.score.reads
        in_one_pass = reads == "after" and isinstance(choice, TopK) and choice.scope == "global"
        if reads in ("after", "inputs") and not in_one_pass:
            self.update(phase)
        if isinstance(choice, TopK):
            self.keep_top(choice, phase if in_one_pass else None)
            return None
        return None if choice is None else self.keep_above(choice)

    def hold(self, what: Literal["weight", "gradient"]) -> None:
        """Zero the pruned weights, or their gradients, once more."""
        if self.kept_count < self.total:
            self._zero_pruned(what)

    def draw(self, step: int) -> None:
        """Random numbers for the gates of this step, if the method wants any."""
        if self.score.noise_seed is not None:
            for pool in self.pools:
                noise.draw(pool.state["noise"], self.score.noise_seed, step, pool.start, self.fused)

    def digest(self) -> int:
        """A hash of the masks: the same on any number of ranks."""
        return self._sum([noise.digest(pool.bits, pool.count, pool.start) for pool in self.pools])

    def count(self, kept: Sequence[Tensor]) -> int:
        """How many weights the masks of the pools keep, on all ranks."""
        return self._sum([pool.weigh(mask) for pool, mask in zip(self.pools, kept, strict=True)])

    def _sum(self, numbers: Sequence[Tensor]) -> int:
        total = torch.stack([number.to(self.matrices[0].device) for number in numbers]).sum()
        # Every rank knows all units of groups, but only its own shard's weights.
        return int(self.ranks.sum(total) if self.pools[0].matrix is not None else total)

    @abstractmethod
    def update(self, phase: int) -> None:
        """Take what the score reads into the state; where gates were in the forward pass, apply them to gradients."""

    @abstractmethod
    def keep_top(self, choice: TopK, phase: int | None) -> None:
        """Keep the highest scores, zero the rest; with a phase, update the scores first, in the same pass."""

    @abstractmethod
    def keep_above(self, choice: Above) -> float | None:
        """Keep the scores above a value and the best of each pool, zero the rest; the share above `choice.watched`."""

    @abstractmethod
    def write_gated(self, full: Mapping[str, Tensor] | None, settled: bool) -> None:
        """Write weights times gates; `full` has those kept aside, by matrix, `None`: what the model holds."""

    @abstractmethod
    def masks(self) -> dict[str, Tensor]:
        """The last selection: a bool tensor a parameter, True = kept; sharded where the parameter is."""

    @abstractmethod
    def _zero_pruned(self, what: Literal["weight", "gradient"]) -> None: ...
