"""Rankings: all units of a pruner with their state. They take gradients in, and say which units stay."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from platon.engine import kernels
from platon.engine.learned import Gated, Learned, Moment
from platon.engine.matrix import Matrix
from platon.engine.score import Score, State
from platon.engine.select import Cut, Pivots, find_cut, pick_pivots, sample_index
from platon.engine.shard import ALONE, Ranks, laid_out_as, own_part


@dataclass
class Pool:
    """Units that share the tensors of a state: the weights of one matrix, or the groups of one family.

    Args:
        name: stands before the names of its tensors in a checkpoint.
        count: units of it that are here.
        state: the score's, of these units.
        bits: the last selection, a bit a unit.
        start: the position of its first unit among all, which decides ties.
        whole: units of it on all ranks.
    """

    name: str
    count: int
    state: State
    bits: Tensor
    start: int
    whole: int

    @classmethod
    def fresh(
        cls, name: str, count: int, start: int, score: Score, device: torch.device, whole: int | None = None
    ) -> "Pool":
        """Nothing learned and nothing pruned."""
        bits = torch.full((-(-count // 8),), 0xFF, dtype=torch.uint8, device=device)
        return cls(name, count, score.init(count, device), bits, start, count if whole is None else whole)

    def kept(self) -> Tensor:
        """The last selection, a bool a unit."""
        return kernels.unpack(self.bits, self.count)


class Ranking(ABC):
    """What a pruner asks of its units, whatever they are.

    Args:
        score: the method.
        matrices: where the units' weights are.
        pools: the units.
        total: prunable weights, on all ranks.
        ranks: what the matrices are sharded over.
    """

    def __init__(
        self, score: Score, matrices: Sequence[Matrix], pools: Sequence[Pool], total: int, ranks: Ranks
    ) -> None:
        self.score, self.matrices, self.pools, self.ranks = score, matrices, pools, ranks
        self.total = self.kept_count = total  # weights, and how many the last selection kept
        self.cut: Tensor | None = None  #: the score at the boundary, where there is one for all
        if isinstance(score, Learned):
            self.put_aside()

    # --- where pruned weights come back -------------------------------------------------------------------------------

    def put_aside(self) -> None:
        """Remember all weights as they are behind mask and gates."""
        for matrix in self.matrices:
            matrix.put_aside()

    def bring_back(self) -> None:
        """Give the optimizer the weights behind mask and gates, and gradients that can be written to."""
        for matrix in self.matrices:
            matrix.bring_back()
            matrix.free_gradient()

    def tell(self, rate: float, progress: float, pressure: float) -> None:
        """Set the single numbers that learned scores read at this step."""
        assert isinstance(self.score, Learned)
        for pool in self.pools:
            share = 1 / (len(self.pools) * pool.whole)
            for name, number in self.score.numbers(Moment(rate, progress, pressure, share)).items():
                pool.state[name].fill_(number)

    def draw(self, step: int) -> None:
        """The noise of this step's gates."""
        assert isinstance(self.score, Gated)
        for pool in self.pools:
            kernels.draw(pool.state["noise"], self.score.seed, step, pool.start)

    # --- what differs between weights and groups ----------------------------------------------------------------------

    @abstractmethod
    def update(self, step: int, keep: float | None = None) -> None:
        """Take this step's gradients into the state; `keep` is the share that is selected right after it, if any."""

    @abstractmethod
    def select(self, keep: float) -> None:
        """Keep this share, zero the rest."""

    @abstractmethod
    def open(self, value: float, least: float) -> None:
        """Keep what scores above `value`, and of each pool at least the share `least`; zero the rest."""

    @abstractmethod
    def above(self, value: float) -> float:
        """The share of the weights whose score is above `value`."""

    @abstractmethod
    def hold(self, what: str) -> None:
        """Zero what the last selection removed once more: of the "weight" or of the "gradient"."""

    @abstractmethod
    def gate(self, settled: bool) -> None:
        """Put the weights times their gates before the forward pass; `settled`: the gates of evaluation."""

    @abstractmethod
    def masks(self) -> dict[str, Tensor]:
        """The last selection: a bool tensor a parameter, True = kept; sharded where the parameter is."""

    def digest(self) -> int:
        """A number that tells selections apart: the same on any number of ranks."""
        found = [kernels.digest(pool.bits, pool.count, pool.start).to(self.matrices[0].device) for pool in self.pools]
        total: Tensor = torch.stack(found).sum()
        return int(self.ranks.sum(total) if self.by_matrix() else total)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def by_matrix(self) -> dict[str, Matrix]:
        """The pools that have a unit a weight, by name: their tensors lie as the weights of a matrix do."""
        return {}

    def tensors(self) -> State:
        """What a checkpoint must hold, as it is here."""
        held = {f"{p.name}:{key}": tensor for p in self.pools for key, tensor in {**p.state, "mask": p.bits}.items()}
        return held | {f"{m.name}:full": m.full for m in self.matrices if m.full is not None}

    def whole_tensors(self) -> State:
        """The same as any number of ranks can read it: in a parameter's shape and sharded as it is, masks as bools."""
        kept = {f"{pool.name}:mask": pool.kept() for pool in self.pools}
        return {
            name: tensor
            if matrix is None or not tensor.dim()
            else laid_out_as(matrix.parameter, kept.get(name, tensor))
            for name, tensor, matrix in self._with_matrices(self.tensors())
        }

    def own_tensors(self, given: Mapping[str, Tensor]) -> State:
        """What is here of such tensors, or of those that one process held by itself."""
        found: State = {}
        for name, tensor, matrix in self._with_matrices(given):
            if matrix is None or not isinstance(tensor, Tensor) or not tensor.dim():
                found[name] = tensor
                continue
            is_bits = name.endswith(":mask") and tensor.dtype == torch.uint8
            if is_bits and matrix.size == matrix.whole:
                found[name] = tensor
                continue
            mine = own_part(matrix.parameter, kernels.unpack(tensor, matrix.whole) if is_bits else tensor)
            found[name] = kernels.pack(mine.clone()) if mine.dtype == torch.bool else mine
        return found

    def _with_matrices(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Matrix | None]]:
        full = {matrix.name: matrix for matrix in self.matrices}
        own = self.by_matrix()
        return [
            (name, tensor, (full if key == "full" else own).get(place))
            for name, tensor in tensors.items()
            for place, _, key in [name.rpartition(":")]
        ]


class WeightRanking(Ranking):
    """Every weight is a unit: fused passes over memory, and exactly k stay."""

    def __init__(self, score: Score, matrices: Sequence[Matrix], ranks: Ranks = ALONE) -> None:
        pools = [Pool.fresh(m.name, m.size, m.start, score, m.device, m.whole) for m in matrices]
        super().__init__(score, matrices, pools, sum(matrix.whole for matrix in matrices), ranks)
        self._fused = kernels.worth_compiling(self.total, matrices[0].device)
        self._index: list[Tensor] | None = None
        self._pivots: Pivots | None = None

    def by_matrix(self) -> dict[str, Matrix]:
        """All of them."""
        return {matrix.name: matrix for matrix in self.matrices}

    def _scored(self) -> list[kernels.Scored]:
        return [
            kernels.Scored(self.score, matrix.weight, pool.state, pool.start, self._fused)
            for matrix, pool in zip(self.matrices, self.pools, strict=True)
        ]

    def update(self, step: int, keep: float | None = None) -> None:
        """Where a selection follows, scores are counted around its cut in the same pass."""
        phase = self.score.phase(step)
        scored = self._scored()
        gradients = [matrix.gradient for matrix in self.matrices]
        self._pivots = None
        k = None if keep is None or self.score.scope == "matrix" else how_many(keep, self.total)
        if k is None or k == self.total or self.total <= 1 << 16:
            for matrix, gradient in zip(scored, gradients, strict=True):
                matrix.update(gradient, phase)
            return
        if self._index is None:
            self._index = [sample_index(matrix.size, self.total, matrix.device) for matrix in scored]
        sample = self.ranks.gather(kernels.preview(scored, self._index, gradients, phase))
        pivots = pick_pivots(sample, k, self.total)
        counts = [
            matrix.update(gradient, phase, pivots.value.to(matrix.device))
            for matrix, gradient in zip(scored, gradients, strict=True)
        ]
        home = pivots.value.device
        here = torch.stack([count.to(home) for count in counts if count is not None]).sum(0)
        self._pivots = pivots.counted(self.ranks.sum(here))

    def select(self, keep: float) -> None:
        """Exactly k of all weights, or of each matrix's."""
        scored = self._scored()
        if self.score.scope == "matrix":
            self.kept_count = sum(
                self._mask([pool], [one], how_many(keep, pool.whole))[0]
                for pool, one in zip(self.pools, scored, strict=True)
            )
            return
        pivots, self._pivots = self._pivots, None
        self.kept_count, cut = self._mask(self.pools, scored, how_many(keep, self.total), pivots)
        if cut is not None:
            self.cut = cut.value

    def _mask(
        self, pools: Sequence[Pool], scored: list[kernels.Scored], k: int, pivots: Pivots | None = None
    ) -> tuple[int, Cut | None]:
        total = sum(pool.whole for pool in pools)
        if k == total:
            # Nothing to remove: the weights are not even rewritten, so training is what it is without a pruner.
            for pool in pools:
                pool.bits.fill_(0xFF)
            return k, None
        cut = find_cut(scored, k, total, pivots, self.ranks)
        cut.zero(scored, [pool.bits for pool in pools])
        return k, cut

    def open(self, value: float, least: float) -> None:
        """The cut is given; where it would leave too little of a matrix, its best weights stay instead."""
        scored = self._scored()
        counts = open_counts(scored, value, self.ranks)
        self.kept_count = 0
        for pool, one, count in zip(self.pools, scored, counts, strict=True):
            floor = how_many(least, pool.whole) if least else 0
            if count < floor or count == pool.whole:
                self.kept_count += self._mask([pool], [one], max(count, floor))[0]
            else:
                Cut.above(value, one.device).zero([one], [pool.bits])
                self.kept_count += count

    def above(self, value: float) -> float:
        """One pass over the scores."""
        return sum(open_counts(self._scored(), value, self.ranks)) / self.total

    def hold(self, what: str) -> None:
        """Matrix by matrix, piece by piece."""
        if self.kept_count == self.total:
            return
        for matrix, pool in zip(self.matrices, self.pools, strict=True):
            tensor = matrix.weight if what == "weight" else matrix.gradient
            if tensor is not None:
                kernels.hold_zero(tensor, pool.bits)

    def gate(self, settled: bool) -> None:
        """One pass."""
        for one, matrix in zip(self._scored(), self.matrices, strict=True):
            assert matrix.full is not None
            one.gate(matrix.full, settled)

    def masks(self) -> dict[str, Tensor]:
        """Unpacked."""
        return {m.name: laid_out_as(m.parameter, p.kept()) for m, p in zip(self.matrices, self.pools, strict=True)}


def how_many(keep: float, total: int) -> int:
    """How many stay: round(keep · N), and at least one."""
    return max(1, round(keep * total))


def open_counts(scored: Sequence[kernels.Scored], value: float, ranks: Ranks = ALONE) -> list[int]:
    """How many scores of each matrix are above `value`; one read of device memory."""
    home = scored[0].device
    beyond = torch.nextafter(torch.tensor([value]), torch.tensor([torch.inf]))
    here = torch.cat([one.count(beyond.to(one.device)).to(home) for one in scored])
    counts: list[int] = ranks.sum(here).tolist()
    return counts
