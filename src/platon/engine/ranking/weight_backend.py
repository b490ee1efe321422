"""The back end of the ranking where every weight is a unit: fused passes over memory, and exactly k stay."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from platon.engine.activation import InputNorms
from platon.engine.matrix import Matrix
from platon.engine.ranking import bits, noise, row
from platon.engine.ranking.bracket import refuse_nan
from platon.engine.ranking.compiling import worth_compiling
from platon.engine.ranking.pivots import sample_index
from platon.engine.ranking.pool import Pool, how_many
from platon.engine.ranking.scored import ScoredWeights, names_read
from platon.engine.ranking.select import Cut, find_cut, update_and_find_cut
from platon.engine.score import Above, Score, TopK
from platon.engine.shard import ALONE, Ranks, laid_out_as


class WeightBackend:
    """Weights of matrices, each a unit."""

    def __init__(self, score: Score, matrices: Sequence[Matrix], ranks: Ranks = ALONE) -> None:
        self.score, self.matrices, self.ranks = score, matrices, ranks
        self.pools = [Pool.of_matrix(matrix, score) for matrix in matrices]
        self.total = sum(pool.weights for pool in self.pools)
        self.fused = worth_compiling(self.total, matrices[0].device)
        self._read = names_read(score)
        self._samples: dict[tuple[int, ...], list[Tensor]] = {}  # positions sampled for a selection among some pools

    def update(self, phase: int) -> None:
        for pool, scored in zip(self.pools, self._scored(self.pools), strict=True):
            scored.update(_matrix(pool).gradient, phase)

    def keep_top(self, parts: Sequence[Sequence[Pool]], keep: float, phase: int | None) -> tuple[int, list[Tensor]]:
        """Of the pools of each part together, exactly round(keep · N) weights; the scores at the cuts."""
        kept, cuts = 0, list[Tensor]()
        for alike in _alike(parts) if phase is None else [[part] for part in parts]:
            pools = [pool for part in alike for pool in part]
            total = sum(pool.total for pool in alike[0])
            k = how_many(keep, total)
            kept += k * len(alike)
            scored = self._scored(pools)
            gradients = [_matrix(pool).gradient for pool in pools]
            if k == total:
                # Nothing to remove: the weights are not even rewritten, so training is what it is without a pruner.
                for own, gradient in zip(scored, gradients, strict=True):
                    if phase is not None:
                        own.update(gradient, phase)
                self._keep_all(pools)
                continue
            sample = self._sample(pools, total)
            if phase is None:
                cut = find_cut(scored, k, total, sample=sample, ranks=self.ranks, parts=len(alike))
            else:
                cut = update_and_find_cut(scored, gradients, phase, k, total, sample, self.ranks)
            cut.apply(scored, [pool.bits for pool in pools])
            cuts.extend(cut.value.unbind())
        return kept, cuts

    def keep_in_rows(self, choice: TopK) -> int:
        kept = 0
        # Before anything is pruned, so that a matrix that does not fit leaves all of them as they were.
        sizes = [row.keep_of(choice.scope, choice.keep, _matrix(pool)) for pool in self.pools]
        for pool, own, (size, k) in zip(self.pools, self._scored(self.pools), sizes, strict=True):
            matrix = _matrix(pool)
            kept += k * pool.total // size
            if k == size:
                self._keep_all([pool])
                continue
            values = own.values()
            if bool(self.ranks.any(values.isnan().any())):
                refuse_nan([own], self.ranks)
            mask = row.best(matrix.by_output(values), size, k)
            bits.pack(matrix.flat(mask), pool.bits)
            bits.zero_pruned(matrix.weight, pool.bits)
        return kept

    def read_inputs(self, norms: InputNorms, phase: int) -> None:
        for pool in self.pools:
            norm = norms.take(_matrix(pool))
            pool.update(self.score, None if norm is None else _matrix(pool).by_input(norm), phase)

    def keep_above(self, choice: Above) -> tuple[int, float | None]:
        """Of each matrix the weights above a value and at least a share; also the share above the watched value."""
        scored = self._scored(self.pools)
        values = [choice.value] if choice.watched is None else [choice.value, choice.watched]
        counts = self._count_above(scored, values)
        kept = 0
        above: list[tuple[ScoredWeights, Tensor]] = []
        for pool, own, (count, *_) in zip(self.pools, scored, counts, strict=True):
            k = max(count, how_many(choice.min_keep, pool.total)) if choice.min_keep else count
            kept += k
            if k == pool.total:
                self._keep_all([pool])
            elif k > count:
                sample = self._sample([pool], pool.total)
                find_cut([own], k, pool.total, sample=sample, ranks=self.ranks).apply([own], [pool.bits])
            else:
                above.append((own, pool.bits))
        if above:
            Cut.above(choice.value, self.matrices[0].device).apply(*zip(*above, strict=True))
        watched = None if choice.watched is None else sum(count[-1] for count in counts) / self.total
        return kept, watched

    def hold(self, what: Literal["weight", "gradient"]) -> None:
        for pool in self.pools:
            matrix = _matrix(pool)
            tensor = matrix.weight if what == "weight" else matrix.gradient
            if tensor is not None:
                bits.zero_pruned(tensor, pool.bits)

    def draw(self, seed: int, step: int) -> None:
        for pool in self.pools:
            noise.draw(pool.state["noise"], seed, step, pool.start, self.fused)

    def write_gated(self, full: Callable[[str], Tensor] | None, settled: bool) -> None:
        for pool, scored in zip(self.pools, self._scored(self.pools), strict=True):
            scored.write_gated(None if full is None else full(pool.name), settled)

    def masks(self) -> dict[str, Tensor]:
        return {pool.name: laid_out_as(_matrix(pool).parameter, pool.kept()) for pool in self.pools}

    def count(self, kept: Sequence[Tensor]) -> int:
        home = self.matrices[0].device
        return int(self.ranks.sum(torch.stack([mask.sum().to(home) for mask in kept]).sum()))

    def _scored(self, pools: Sequence[Pool]) -> list[ScoredWeights]:
        return [
            ScoredWeights(self.score, _matrix(pool).weight, pool.state, pool.start, self.fused, pool.name, self._read)
            for pool in pools
        ]

    def _sample(self, pools: Sequence[Pool], total: int) -> list[Tensor]:
        key = tuple(pool.start for pool in pools)
        if key not in self._samples:
            self._samples[key] = [sample_index(pool.count, total, _matrix(pool).device) for pool in pools]
        return self._samples[key]

    def _count_above(self, scored: Sequence[ScoredWeights], values: Sequence[float]) -> list[list[int]]:
        """For each matrix, how many of its scores on all ranks are above each value; one read of device memory."""
        home = scored[0].device
        beyond = torch.nextafter(torch.tensor(values), torch.tensor(torch.inf))
        found = [own.count(beyond.to(own.device)) for own in scored]
        counts = torch.stack([torch.cat([count, nan.view(1)]).to(home) for count, nan in found])
        numbers: list[list[int]] = self.ranks.sum(counts).tolist()
        if any(row[-1] for row in numbers):
            refuse_nan(scored, self.ranks)
        return [row[:-1] for row in numbers]

    @staticmethod
    def _keep_all(pools: Sequence[Pool]) -> None:
        for pool in pools:
            pool.bits.fill_(0xFF)


def _alike(parts: Sequence[Sequence[Pool]]) -> list[list[Sequence[Pool]]]:
    """The parts whose matrices have the same shapes, which are cut together; the same on all ranks."""
    found: dict[tuple[torch.Size, ...], list[Sequence[Pool]]] = {}
    for part in parts:
        found.setdefault(tuple(_matrix(pool).parameter.shape for pool in part), []).append(part)
    return list(found.values())


def _matrix(pool: Pool) -> Matrix:
    assert pool.matrix is not None
    return pool.matrix
