"""The ranking: all units of a pruner with their state. It takes gradients in and decides which units stay."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from platon.engine.activation import InputNorms
from platon.engine.matrix import Matrix
from platon.engine.ranking import noise
from platon.engine.ranking.pool import Pool
from platon.engine.ranking.slice_backend import SliceBackend
from platon.engine.ranking.weight_backend import WeightBackend
from platon.engine.score import Above, Choice, Score, StepInfo, TopK
from platon.engine.shard import ALONE, Ranks
from platon.engine.slices import Group


class Backend(Protocol):
    """The passes over memory, which differ between single weights and units of many weights."""

    pools: list[Pool]
    total: int  # weights, on all ranks
    fused: bool  # whether the passes are compiled

    def update(self, phase: int) -> None:
        """Take this step's gradients into the state; where gates were in the forward pass, apply them to gradients."""

    def keep_top(self, parts: Sequence[Sequence[Pool]], keep: float, phase: int | None) -> tuple[int, list[Tensor]]:
        """Keep the highest scores of each part, zero the rest; with a phase, update the scores in the same pass.

        Returns the weights kept and the score at the cut of each part that lost any.
        """
        ...

    def keep_in_rows(self, choice: TopK) -> int:
        """Keep the highest scores inside the rows of each matrix, zero the rest; the weights kept."""
        ...

    def read_inputs(self, norms: InputNorms, phase: int) -> None:
        """Take the norms of what the weights multiplied into the state."""

    def keep_above(self, choice: Above) -> tuple[int, float | None]:
        """Keep the scores above a value, zero the rest; the weights kept, and the share above the watched value."""
        ...

    def hold(self, what: Literal["weight", "gradient"]) -> None:
        """Zero the pruned weights, or their gradients, once more."""

    def draw(self, seed: int, step: int) -> None:
        """Fill each pool's "noise" for this step."""

    def write_gated(self, full: Callable[[str], Tensor] | None, settled: bool) -> None:
        """Write weights times gates; `full` gives those kept aside for a matrix, `None`: what the model holds."""

    def masks(self) -> dict[str, Tensor]:
        """The last selection: a bool tensor a parameter, True = kept; sharded where the parameter is."""
        ...

    def count(self, kept: Sequence[Tensor]) -> int:
        """How many weights the masks of the pools keep, on all ranks."""
        ...


class Ranking:
    """What a pruner asks of its units, whatever they are.

    Args:
        score: the method.
        matrices: where the units' weights are.
        groups: units of many weights; without any, each weight is a unit.
        ranks: what the matrices are sharded over.
        norms: of what the weights multiply, for a score that reads them.
    """

    def __init__(
        self,
        score: Score,
        matrices: Sequence[Matrix],
        groups: Sequence[Group] = (),
        ranks: Ranks = ALONE,
        norms: InputNorms | None = None,
    ) -> None:
        self.score, self.matrices, self.ranks, self.norms = score, matrices, ranks, norms
        if groups:
            score.check_groups()
        self.backend: Backend = (
            SliceBackend(score, matrices, groups, ranks) if groups else WeightBackend(score, matrices, ranks)
        )
        self.pools = self.backend.pools
        self.total = self.kept_count = self.backend.total  #: weights, and how many the last selection kept
        self.cut: Tensor | None = None  #: the score at the boundary, where there is one for all

    def set_numbers(self, info: StepInfo) -> None:
        """Set the single numbers of the state for this step."""
        for pool in self.pools:
            for name, number in self.score.numbers(info, 1 / (len(self.pools) * pool.total)).items():
                pool.state[name].fill_(number)

    def observe(self, info: StepInfo) -> None:
        """For scores that read w·g before the optimizer moves the weights: update the scores."""
        if self.score.reads == "before":
            self.backend.update(self.score.phase(info.step))

    def advance(self, info: StepInfo, choice: Choice | None) -> float | None:
        """For scores that read w·g after the step: update them. Then find and apply the cut of `choice`.

        Returns the share of weights above `choice.watched`, if that is asked for.
        """
        phase = self.score.phase(info.step) if self.score.reads == "after" else None
        if self.norms is not None:
            self.backend.read_inputs(self.norms, self.score.phase(info.step))
        if isinstance(choice, TopK):
            self._keep_top(choice, phase)
            return None
        if phase is not None:
            self.backend.update(phase)
        if choice is None:
            return None
        self.kept_count, watched = self.backend.keep_above(choice)
        return watched

    def _keep_top(self, choice: TopK, phase: int | None) -> None:
        if choice.scope != "global":
            if phase is not None:
                self.backend.update(phase)
            if choice.scope == "matrix":
                self.kept_count, _ = self.backend.keep_top([[pool] for pool in self.pools], choice.keep, None)
            else:
                self.kept_count = self.backend.keep_in_rows(choice)
            return
        self.kept_count, cuts = self.backend.keep_top([self.pools], choice.keep, phase)
        if cuts:
            self.cut = cuts[0]

    def hold(self, what: Literal["weight", "gradient"]) -> None:
        """Zero the pruned weights, or their gradients, once more."""
        if self.kept_count < self.total:
            self.backend.hold(what)

    def draw(self, step: int) -> None:
        """Random numbers for the gates of this step, if the method wants any."""
        if self.score.noise_seed is not None:
            self.backend.draw(self.score.noise_seed, step)

    def digest(self) -> int:
        """A hash of the masks: the same on any number of ranks."""
        found = [noise.digest(pool.bits, pool.count, pool.start).to(self.matrices[0].device) for pool in self.pools]
        total: Tensor = torch.stack(found).sum()
        # Every rank knows all units of groups, but only its own shard's weights.
        return int(self.ranks.sum(total) if self.pools[0].matrix is not None else total)
