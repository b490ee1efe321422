"""The ranking where every weight is a unit: fused passes over memory, and exactly k stay."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from platon.engine.activation import InputNorms
from platon.engine.matrix import Matrix
from platon.engine.ranking import bits, row
from platon.engine.ranking.bracket import count, refuse_nan
from platon.engine.ranking.compiling import worth_compiling
from platon.engine.ranking.ranking import Pool, Ranking, how_many
from platon.engine.ranking.scored import ScoredWeights, names_read
from platon.engine.ranking.select import Cut, find_cut, update_and_count
from platon.engine.score import Above, Score, TopK, nan_error
from platon.engine.shard import Ranks, laid_out_as


class MatrixPool(Pool):
    """Every weight of a matrix is a unit."""

    matrix: Matrix

    def __init__(self, score: Score, matrix: Matrix) -> None:
        super().__init__(score, matrix.name, matrix.size, matrix.total, matrix.start, matrix.device)
        self.matrix = matrix


class WeightRanking(Ranking):
    """Weights of matrices, each a unit; `norms` of what they multiply, for a score that reads them."""

    pools: Sequence[MatrixPool]

    def __init__(self, score: Score, matrices: Sequence[Matrix], ranks: Ranks, norms: InputNorms | None = None) -> None:
        super().__init__(score, matrices, ranks, [MatrixPool(score, matrix) for matrix in matrices])
        self.fused = worth_compiling(self.total, matrices[0].device)
        self._read, self._norms = names_read(score), norms

    def update(self, phase: int) -> None:
        if self._norms is not None:
            for pool in self.pools:
                norm = self._norms.take(pool.matrix)
                pool.update(self.score, None if norm is None else pool.matrix.by_input(norm), phase)
            return
        for pool, shard in zip(self.pools, self._scored(self.pools), strict=True):
            shard.update(pool.matrix.gradient, phase)

    def keep_top(self, choice: TopK, phase: int | None) -> None:
        """Of all matrices together, of each, or of each row exactly round(keep · N) weights."""
        if choice.scope not in ("global", "matrix"):
            self._keep_in_rows(choice)
            return
        kept = 0
        for pools, parts in self._cut_together(choice):
            total = sum(pool.total for pool in pools) // parts
            k = how_many(choice.keep, total)
            kept += k * parts
            if k == total:
                # Nothing to remove: the weights are not even rewritten, so training is what it is without a pruner.
                if phase is not None:
                    self.update(phase)
                for pool in pools:
                    pool.bits.fill_(0xFF)
                continue
            shards = self._scored(pools)
            gradients = [pool.matrix.gradient for pool in pools]
            pivots = None if phase is None else update_and_count(shards, gradients, phase, k, total, self.ranks)
            cut = find_cut(shards, k, total, pivots, self.ranks, parts)
            cut.apply(shards, [pool.bits for pool in pools])
            if choice.scope == "global":
                self.cut = cut.value[0]
        self.kept_count = kept

    def _cut_together(self, choice: TopK) -> list[tuple[Sequence[MatrixPool], int]]:
        """Pools, and how many parts they are: all matrices as one part, or each of those of one shape as a part."""
        if choice.scope == "global":
            return [(self.pools, 1)]
        # By the shapes of whole matrices, so that all ranks cut the same ones together.
        alike: dict[torch.Size, list[MatrixPool]] = {}
        for pool in self.pools:
            alike.setdefault(pool.matrix.parameter.shape, []).append(pool)
        return [(pools, len(pools)) for pools in alike.values()]

    def _keep_in_rows(self, choice: TopK) -> None:
        # Before anything is pruned, so that a matrix that does not fit leaves all of them as they were.
        sizes = [row.keep_of(choice.scope, choice.keep, pool.matrix) for pool in self.pools]
        kept = 0
        for pool, shard, (size, k) in zip(self.pools, self._scored(self.pools), sizes, strict=True):
            kept += k * pool.total // size
            if k == size:
                pool.bits.fill_(0xFF)
                continue
            values = shard.values()
            if bool(self.ranks.any(values.isnan().any())):
                raise nan_error(pool.name)
            mask = row.best(pool.matrix.by_output(values), size, k)
            bits.pack(pool.matrix.flat(mask), pool.bits)
            bits.zero_pruned(pool.matrix.weight, pool.bits)
        self.kept_count = kept

    def keep_above(self, choice: Above) -> float | None:
        shards = self._scored(self.pools)
        values = [choice.value] if choice.watched is None else [choice.value, choice.watched]
        beyond = torch.nextafter(torch.tensor(values), torch.tensor(torch.inf)).to(self.matrices[0].device)
        counts = count(shards, beyond.expand(len(shards), -1), self.ranks).tolist()
        refuse_nan(shards, counts)
        kept = 0
        above: list[tuple[ScoredWeights, Tensor]] = []
        for pool, shard, (number, *_) in zip(self.pools, shards, counts, strict=True):
            k = max(number, how_many(choice.min_keep, pool.total)) if choice.min_keep else number
            kept += k
            if k == pool.total:
                pool.bits.fill_(0xFF)
            elif k > number:
                find_cut([shard], k, pool.total, ranks=self.ranks).apply([shard], [pool.bits])
            else:
                above.append((shard, pool.bits))
        if above:
            Cut.above(choice.value, self.matrices[0].device).apply(*zip(*above, strict=True))
        self.kept_count = kept
        return None if choice.watched is None else sum(own[1] for own in counts) / self.total

    def write_gated(self, full: Mapping[str, Tensor] | None, settled: bool) -> None:
        for pool, shard in zip(self.pools, self._scored(self.pools), strict=True):
            shard.write_gated(None if full is None else full[pool.name], settled)

    def masks(self) -> dict[str, Tensor]:
        return {pool.name: laid_out_as(pool.matrix.parameter, pool.kept()) for pool in self.pools}

    def _zero_pruned(self, what: Literal["weight", "gradient"]) -> None:
        for pool in self.pools:
            tensor = pool.matrix.weight if what == "weight" else pool.matrix.gradient
            if tensor is not None:
                bits.zero_pruned(tensor, pool.bits)

    def _scored(self, pools: Sequence[MatrixPool]) -> list[ScoredWeights]:
        score, fused, read = self.score, self.fused, self._read
        return [ScoredWeights(score, own.matrix.weight, own.state, own.start, fused, own.name, read) for own in pools]
