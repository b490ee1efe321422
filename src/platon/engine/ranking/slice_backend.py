"""The back end of the ranking for units of many weights: few enough that all of them are sorted."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from platon.engine.activation import InputNorms
from platon.engine.matrix import Matrix
from platon.engine.ranking import noise
from platon.engine.ranking.bits import pack
from platon.engine.ranking.pool import Pool, how_many
from platon.engine.score import Above, Score, TopK, nan_error
from platon.engine.shard import ALONE, Ranks, laid_out_as
from platon.engine.slices import Group


class SliceBackend:
    """Units that are slices of matrices.

    A unit's signal is Σ w g over its n weights, and the absolute value comes after the sum. Scores get it by weight,
    Σ w g / n, and magnitude is the mean of |w|, so that units of different size compare; `keep` counts weights, so this
    is the greedy choice. A score that is learned gets the sum itself, which is the gradient of the unit's gate.

    A unit may span the shards of several ranks: sums are added over the ranks, in float64, and from there on every rank
    knows every unit.
    """

    fused = False

    def __init__(self, score: Score, matrices: Sequence[Matrix], groups: Sequence[Group], ranks: Ranks = ALONE) -> None:
        self.score, self.matrices, self.ranks = score, matrices, ranks
        self._matrix = {matrix.name: matrix for matrix in matrices}
        self._groups = [group.of_rows(lambda name: self._matrix[name].rows) for group in groups]
        self._device = matrices[0].device
        self._sizes = [group.sizes.to(self._device) for group in groups]
        self.total = int(torch.cat(self._sizes).sum())
        starts = torch.tensor([0, *(group.count for group in groups)]).cumsum(0).tolist()
        self.pools = [
            Pool.of_group(group.name, group.count, int(sizes.sum()), start, score, self._device)
            for group, sizes, start in zip(groups, self._sizes, starts, strict=False)
        ]

    def update(self, phase: int) -> None:
        sums = [group.reduce(self._products) for group in self._groups]
        for pool, group, sizes, total in zip(
            self.pools, self._groups, self._sizes, self._over_ranks(sums), strict=True
        ):
            signal = None if total is None else (total / sizes if self.score.averages_signal else total).float()
            gate = self.score.gate(pool.state, settled=False)  # the gate that the gradient came through
            pool.update(self.score, signal, phase)
            if gate is not None:
                for name, own in group.expand(gate).items():
                    gradient = self._view(name, "gradient")
                    if gradient is not None:
                        gradient.mul_(own.to(gradient.device))

    def keep_top(self, parts: Sequence[Sequence[Pool]], keep: float, phase: int | None) -> tuple[int, list[Tensor]]:
        """Of the pools of each part together, the best units that fit into round(keep · N) weights, and at least one.

        Spared units come first, whatever their score; then units follow in the order of their scores until the next one
        would exceed the number of weights. Of equal scores the first unit stays.
        """
        if phase is not None:
            self.update(phase)
        values = self._values()
        kept: dict[str, Tensor] = {}
        cuts = []
        for part in parts:
            chosen = [self.pools.index(pool) for pool in part]
            found = self._fill([values[i] for i in chosen], chosen, keep)
            kept.update(zip((pool.name for pool in part), found, strict=True))
            if keep < 1:
                cuts.append(torch.cat([values[i][mask] for i, mask in zip(chosen, found, strict=True)]).amin())
        return self._apply([kept[pool.name] for pool in self.pools]), cuts

    def _fill(self, values: Sequence[Tensor], chosen: Sequence[int], keep: float) -> list[Tensor]:
        sizes = torch.cat([self._sizes[i] for i in chosen])
        if keep == 1:
            return [torch.ones_like(value, dtype=torch.bool) for value in values]
        reserved = torch.cat([_best(value, self._groups[i].spare) for value, i in zip(values, chosen, strict=True)])
        room = how_many(keep, int(sizes.sum())) - int(sizes[reserved].sum())
        order = torch.cat(list(values)).sort(descending=True, stable=True).indices
        order = order[~reserved[order]]
        fits = sizes[order].cumsum(0) <= room
        kept = reserved.index_fill(0, order[fits], True)
        if not bool(kept.any()):
            kept[order[0]] = True
        return list(torch.split(kept, [len(value) for value in values]))

    def keep_in_rows(self, choice: TopK) -> int:
        raise NotImplementedError("a unit of many weights has no row; `Ranking` refuses this scope")

    def read_inputs(self, norms: InputNorms, phase: int) -> None:
        raise NotImplementedError("a unit of many weights has no input of its own; `Ranking` refuses such scores")

    def keep_above(self, choice: Above) -> tuple[int, float | None]:
        """Of each group the units above a value and at least a share; also the share above the watched value."""
        values = self._values()
        kept = []
        for group, value in zip(self._groups, values, strict=True):
            floor = max(group.spare, how_many(choice.min_keep, group.count) if choice.min_keep else 0)
            kept.append((value > choice.value) | _best(value, floor))
        if choice.watched is None:
            return self._apply(kept), None
        watched = int(torch.cat(self._sizes)[torch.cat(values) > choice.watched].sum()) / self.total
        return self._apply(kept), watched

    def hold(self, what: Literal["weight", "gradient"]) -> None:
        for pool, group in zip(self.pools, self._groups, strict=True):
            for name, kept in group.expand(pool.kept()).items():
                tensor = self._view(name, what)
                if tensor is not None:
                    tensor.masked_fill_(~kept.to(tensor.device), 0)

    def draw(self, seed: int, step: int) -> None:
        for pool in self.pools:
            noise.draw(pool.state["noise"], seed, step, pool.start)

    def write_gated(self, full: Callable[[str], Tensor] | None, settled: bool) -> None:
        for pool, group in zip(self.pools, self._groups, strict=True):
            gate = self.score.gate(pool.state, settled)
            assert gate is not None
            for name, own in group.expand(gate).items():
                weight = self._view(name, "weight")
                assert weight is not None
                source = weight if full is None else full(name).view(weight.shape)
                weight.copy_(source.float() * own.to(weight.device))

    def masks(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for pool, group in zip(self.pools, self._groups, strict=True):
            for name, kept in group.expand(pool.kept()).items():
                matrix = self._matrix[name]
                found[name] = laid_out_as(matrix.parameter, kept.expand(matrix.shape).to(matrix.device))
        return {matrix.name: found[matrix.name] for matrix in self.matrices}

    def count(self, kept: Sequence[Tensor]) -> int:
        return int(torch.cat(self._sizes)[torch.cat(list(kept))].sum())

    def _apply(self, kept: Sequence[Tensor]) -> int:
        for pool, mask in zip(self.pools, kept, strict=True):
            pack(mask.clone(), pool.bits)  # a copy of its own memory: eight bytes are read at a time
        count = self.count(kept)
        if count < self.total:
            self.hold("weight")
        return count

    def _values(self) -> list[Tensor]:
        """The scores of all units."""
        sums = self._over_ranks([group.reduce(self._magnitudes) for group in self._groups])
        values = []
        for pool, sizes, total in zip(self.pools, self._sizes, sums, strict=True):
            assert total is not None
            values.append(self.score.value(pool.state, (total / sizes).float()))
            if bool(values[-1].isnan().any()):
                raise nan_error(pool.name)
        return values

    def _products(self, name: str) -> Tensor | None:
        weight, gradient = self._view(name, "weight"), self._view(name, "gradient")
        return None if weight is None or gradient is None else weight.float() * gradient.float()

    def _magnitudes(self, name: str) -> Tensor | None:
        weight = self._view(name, "weight")
        return None if weight is None else weight.abs()

    def _view(self, name: str, what: Literal["weight", "gradient"]) -> Tensor | None:
        """The weights or the gradient of what is here of a matrix, in its shape."""
        matrix = self._matrix[name]
        tensor = matrix.weight if what == "weight" else matrix.gradient
        return None if tensor is None else tensor.view(matrix.shape)

    def _over_ranks(self, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Added over the ranks, all in one message; a group without gradients has none on any rank."""
        here = [None if total is None else total.to(self._device) for total in sums]
        if self.ranks.group is None or not (there := [total for total in here if total is not None]):
            return here
        added = iter(torch.split(self.ranks.sum(torch.cat(there)), [total.numel() for total in there]))
        return [None if total is None else next(added) for total in here]


def _best(value: Tensor, count: int) -> Tensor:
    """A mask of the `count` highest; of equal ones the first."""
    best = value.sort(descending=True, stable=True).indices[:count]
    return torch.zeros_like(value, dtype=torch.bool).index_fill(0, best, True)
