"""The ranking of units of many weights: few enough that all of them are sorted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from platon.engine.matrix import Matrix
from platon.engine.ranking.bits import pack
from platon.engine.ranking.passes import signal_of
from platon.engine.ranking.ranking import Pool, Ranking, how_many
from platon.engine.score import Above, Score, TopK, nan_error
from platon.engine.shard import Ranks, laid_out_as
from platon.engine.slices import Group


class GroupPool(Pool):
    """Units of many weights each, which every rank knows."""

    def __init__(self, score: Score, group: Group, start: int, device: torch.device) -> None:
        super().__init__(score, group.name, group.count, group.count, start, device)
        self.sizes, self.group = group.sizes.to(device), group.here()  #: weights of each unit, on all ranks
        self.weight_count = int(self.sizes.sum())

    def weigh(self, kept: Tensor) -> Tensor:
        return self.sizes[kept].sum()


class SliceRanking(Ranking):
    """Units that are slices of matrices.

    A unit's signal is Σ w g over its n weights, and the absolute value comes after the sum. Scores get it by weight,
    Σ w g / n, and magnitude is the mean of |w|, so that units of different size compare; `keep` counts weights, so this
    is the greedy choice. A score that is learned gets the sum itself, which is the gradient of the unit's gate.

    A unit may span the shards of several ranks: sums are added over the ranks, in float64, and from there on every rank
    knows every unit.
    """

    pools: Sequence[GroupPool]

    def __init__(self, score: Score, matrices: Sequence[Matrix], groups: Sequence[Group], ranks: Ranks) -> None:
        score.check_groups()
        self._matrix = {matrix.name: matrix for matrix in matrices}
        device, starts = matrices[0].device, accumulate((group.count for group in groups), initial=0)
        pools = [GroupPool(score, group, start, device) for group, start in zip(groups, starts, strict=False)]
        super().__init__(score, matrices, ranks, pools)

    def update(self, phase: int) -> None:
        gates = [self.score.gate(pool.state, settled=False) for pool in self.pools]  # those of the forward pass
        for pool, total in zip(self.pools, self._sums(_products), strict=True):
            signal = None if total is None else (total / pool.sizes if self.score.averages_signal else total).float()
            pool.update(self.score, signal, phase)
        for matrix, gate in self._expanded(gates):
            gradient = matrix.gradient
            if gradient is not None:
                gradient.view(matrix.shape).mul_(gate)

    def keep_top(self, choice: TopK, phase: int | None) -> None:
        """Of all pools together, or of each, the best units that fit into round(keep · N) weights, and at least one.

        Spared units come first, whatever their score; then units follow in the order of their scores until the next one
        would exceed the number of weights. Of equal scores the first unit stays.
        """
        if phase is not None:
            self.update(phase)
        values = self._values()
        if choice.scope == "global":
            kept = _fill(self.pools, values, choice.keep)
            if choice.keep < 1:
                self.cut = torch.cat(values)[torch.cat(kept)].amin()
        else:
            kept = [_fill([pool], [own], choice.keep)[0] for pool, own in zip(self.pools, values, strict=True)]
        self._apply(kept)

    def keep_above(self, choice: Above) -> float | None:
        values = self._values()
        kept = []
        for pool, value in zip(self.pools, values, strict=True):
            floor = max(pool.group.spare, how_many(choice.min_keep, pool.count) if choice.min_keep else 0)
            kept.append((value > choice.value) | _best(value, floor))
        self._apply(kept)
        return None if choice.watched is None else self.count([value > choice.watched for value in values]) / self.total

    def write_gated(self, full: Mapping[str, Tensor] | None, settled: bool) -> None:
        for matrix, gate in self._expanded([self.score.gate(pool.state, settled) for pool in self.pools]):
            source = matrix.weight if full is None else full[matrix.name]
            matrix.weight.view(matrix.shape).copy_(source.view(matrix.shape).float() * gate)

    def masks(self) -> dict[str, Tensor]:
        kept = {matrix.name: own for matrix, own in self._expanded([pool.kept() for pool in self.pools])}
        return {own.name: laid_out_as(own.parameter, kept[own.name].expand(own.shape)) for own in self.matrices}

    def _zero_pruned(self, what: Literal["weight", "gradient"]) -> None:
        for matrix, kept in self._expanded([pool.kept() for pool in self.pools]):
            tensor = matrix.weight if what == "weight" else matrix.gradient
            if tensor is not None:
                tensor.view(matrix.shape).masked_fill_(~kept, 0)

    def _apply(self, kept: Sequence[Tensor]) -> None:
        for pool, mask in zip(self.pools, kept, strict=True):
            pack(mask.clone(), pool.bits)  # a copy of its own memory: eight bytes are read at a time
        self.kept_count = self.count(kept)
        self.hold("weight")

    def _expanded(self, numbers: Sequence[Tensor | None]) -> Iterator[tuple[Matrix, Tensor]]:
        """Each matrix with the numbers of its units, in a shape that broadcasts to its own."""
        for pool, own in zip(self.pools, numbers, strict=True):
            if own is not None:
                for name, spread in pool.group.expand(own).items():
                    yield self._matrix[name], spread.to(self._matrix[name].device)

    def _values(self) -> list[Tensor]:
        """The scores of all units."""
        values = []
        for pool, total in zip(self.pools, self._sums(lambda own: own.weight.abs().view(own.shape)), strict=True):
            assert total is not None
            values.append(self.score.value(pool.state, (total / pool.sizes).float()))
            if bool(values[-1].isnan().any()):
                raise nan_error(pool.name)
        return values

    def _sums(self, values: Callable[[Matrix], Tensor | None]) -> list[Tensor | None]:
        """The sums over each unit, of all ranks in one message; a group without gradients has none on any rank."""
        found = [pool.group.reduce(lambda name: values(self._matrix[name])) for pool in self.pools]
        here = [None if total is None else total.to(self.matrices[0].device) for total in found]
        if self.ranks.group is None or not (there := [total for total in here if total is not None]):
            return here
        added = iter(torch.split(self.ranks.sum(torch.cat(there)), [total.numel() for total in there]))
        return [None if total is None else next(added) for total in here]


def _products(matrix: Matrix) -> Tensor | None:
    gradient = matrix.gradient
    return None if gradient is None else signal_of(matrix.weight, gradient).view(matrix.shape)


def _fill(pools: Sequence[GroupPool], values: Sequence[Tensor], keep: float) -> list[Tensor]:
    if keep == 1:
        return [torch.ones_like(value, dtype=torch.bool) for value in values]
    sizes = torch.cat([pool.sizes for pool in pools])
    kept = torch.cat([_best(value, pool.group.spare) for pool, value in zip(pools, values, strict=True)])
    room = how_many(keep, int(sizes.sum())) - int(sizes[kept].sum())
    order = torch.cat(list(values)).sort(descending=True, stable=True).indices
    order = order[~kept[order]]
    fits = sizes[order].cumsum(0) <= room
    kept[order[fits]] = True
    if not bool(kept.any()):
        kept[order[0]] = True
    return list(torch.split(kept, [len(value) for value in values]))


def _best(value: Tensor, count: int) -> Tensor:
    """A mask of the `count` highest; of equal ones the first."""
    best = value.sort(descending=True, stable=True).indices[:count]
    return torch.zeros_like(value, dtype=torch.bool).index_fill(0, best, True)
