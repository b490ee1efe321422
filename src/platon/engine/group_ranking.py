"""Ranking of groups: one number each, so that all of them are sorted. How they are chosen is said at `select`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from platon.engine import kernels
from platon.engine.learned import Gated, Learned
from platon.engine.matrix import Matrix
from platon.engine.part import Groups, Part, sum_of
from platon.engine.ranking import Pool, Ranking, how_many
from platon.engine.score import Score
from platon.engine.shard import ALONE, Ranks, laid_out_as


class GroupRanking(Ranking):
    """Groups of weights are the units.

    A group's signal is Σ w g, and the absolute value comes after the sum. A score that averages it gets that sum by
    weight, Σ w g / n, and magnitude is the mean of |w|: so a score says what a weight of the group is worth, and groups
    of unlike size compare. Since `keep` counts weights, that is the greedy choice: the most worth for the weights kept.
    A learned score gets the sum itself, which is its gradient.

    A group may span the shards of several ranks: sums are added up over them, in float64, and from there on every rank
    knows every group.
    """

    def __init__(
        self, score: Score, matrices: Sequence[Matrix], groups: Sequence[Groups], ranks: Ranks = ALONE
    ) -> None:
        device = matrices[0].device
        starts = torch.tensor([0, *(own.count for own in groups)]).cumsum(0).tolist()
        pools = [
            Pool.fresh(own.name, own.count, start, score, device) for own, start in zip(groups, starts, strict=False)
        ]
        self.groups = groups
        self._sizes = torch.cat([own.sizes for own in groups]).to(device)
        self._matrix = {matrix.name: matrix for matrix in matrices}
        self._here = [[part.of_rows(*self._matrix[part.name].rows) for part in own.parts] for own in groups]
        super().__init__(score, matrices, pools, int(self._sizes.sum()), ranks)

    def update(self, step: int, keep: float | None = None) -> None:
        """Per group: a sum over its weights, then the score's own equations on one number."""
        phase = self.score.phase(step)
        for pool, parts, signal in zip(self.pools, self._here, self._signals(), strict=True):
            gate = self.score.gate(pool.state, settled=False) if isinstance(self.score, Gated) else None
            for name, tensor in self.score.update(pool.state, signal, phase).items():
                pool.state[name].copy_(tensor)
            for part in parts:
                gradient = self._look(part, "gradient")
                if gate is not None and gradient is not None:
                    gradient.mul_(part.expand(gate))

    def _look(self, part: Part, what: str) -> Tensor | None:
        """The "weight" or the "gradient" of what is here of a part's matrix, in its shape; a view."""
        matrix = self._matrix[part.name]
        tensor = matrix.weight if what == "weight" else matrix.gradient
        return None if tensor is None else tensor.view(matrix.shape)

    def _signals(self) -> list[Tensor | None]:
        sums: list[Tensor | None] = []
        for parts, pool in zip(self._here, self.pools, strict=True):
            seen = [
                part.reduce(self._weight(part).float() * gradient.float()).to(pool.bits.device)
                for part in parts
                if (gradient := self._look(part, "gradient")) is not None
            ]
            sums.append(sum_of(seen) if seen else None)
        learned = isinstance(self.score, Learned)
        return [
            None if total is None else (total if learned else total / own.sizes.to(total.device)).float()
            for total, own in zip(self._over_ranks(sums), self.groups, strict=True)
        ]

    def _weight(self, part: Part) -> Tensor:
        weight = self._look(part, "weight")
        assert weight is not None
        return weight

    def _over_ranks(self, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Added up over the ranks, all in one message; a family without gradients has none on any rank."""
        if self.ranks.group is None or not (there := [total for total in sums if total is not None]):
            return list(sums)
        added = iter(torch.split(self.ranks.sum(torch.cat(there)), [total.numel() for total in there]))
        return [None if total is None else next(added) for total in sums]

    def _values(self) -> list[Tensor]:
        """The scores of all groups."""
        sums = [
            sum_of(part.reduce(self._weight(part).abs()).to(pool.bits.device) for part in parts)
            for parts, pool in zip(self._here, self.pools, strict=True)
        ]
        return [
            self.score.value(pool.state, (weight / own.sizes.to(weight.device)).float())
            for own, pool, weight in zip(self.groups, self.pools, self._over_ranks(sums), strict=True)
            if weight is not None
        ]

    def select(self, keep: float) -> None:
        """The longest run of the ranking that does not exceed k weights, after the spared groups are set aside.

        k = round(keep · N) of all N weights, or of each pool's. Equal scores: the first stays.
        """
        values = self._values()
        if bool(torch.cat(values).isnan().any()):
            raise ValueError(
                "a score is NaN, so there is no order; look for NaN among the weights or in the pruner's state"
            )
        if keep == 1:
            kept = [torch.ones_like(value, dtype=torch.bool) for value in values]
        elif self.score.scope == "matrix":
            kept = [
                _longest([value], [own], how_many(keep, int(own.sizes.sum())))[0]
                for value, own in zip(values, self.groups, strict=True)
            ]
        else:
            kept = _longest(values, self.groups, how_many(keep, self.total))
            self.cut = torch.cat([v[k] for v, k in zip(values, kept, strict=True)]).amin()
        self._apply(kept)

    def open(self, value: float, least: float) -> None:
        """Of each pool at least what is spared."""
        kept = []
        for own, score in zip(self.groups, self._values(), strict=True):
            floor = max(own.spare, how_many(least, own.count) if least else 0)
            best = score.sort(descending=True, stable=True).indices[:floor]
            kept.append((score > value).index_fill(0, best, True))
        self._apply(kept)

    def above(self, value: float) -> float:
        """A group counts as many times as it has weights."""
        return int(self._sizes[torch.cat(self._values()) > value].sum()) / self.total

    def _apply(self, kept: Sequence[Tensor]) -> None:
        for pool, mask in zip(self.pools, kept, strict=True):
            kernels.pack(mask.clone(), pool.bits)  # a copy, because eight bytes are read at a time
        self.kept_count = int(self._sizes[torch.cat(list(kept))].sum())
        self.hold("weight")

    def hold(self, what: str) -> None:
        """Matrix by matrix."""
        if self.kept_count == self.total:
            return
        for pool, part in self._parts():
            tensor = self._look(part, what)
            if tensor is not None:
                tensor.masked_fill_(~part.expand(pool.kept()).to(tensor.device), 0)

    def gate(self, settled: bool) -> None:
        """A group's weights share a gate."""
        assert isinstance(self.score, Gated)
        for pool, part in self._parts():
            weights = self._matrix[part.name].full
            assert weights is not None
            gate = part.expand(self.score.gate(pool.state, settled)).to(weights.device)
            seen = self._weight(part)
            seen.copy_(weights.view(seen.shape).float() * gate)

    def masks(self) -> dict[str, Tensor]:
        """Each weight as its group."""
        found = {
            part.name: part.expand(pool.kept()).expand(self._matrix[part.name].shape) for pool, part in self._parts()
        }
        return {m.name: laid_out_as(m.parameter, found[m.name].to(m.device)) for m in self.matrices}

    def _parts(self) -> list[tuple[Pool, Part]]:
        return [(pool, part) for parts, pool in zip(self._here, self.pools, strict=True) for part in parts]


def _longest(values: Sequence[Tensor], groups: Sequence[Groups], k: int) -> list[Tensor]:
    """Which groups stay: those that are spared, then down the ranking until the next would be one too many."""
    device = values[0].device
    spared = []
    for value, own in zip(values, groups, strict=True):
        best = value.sort(descending=True, stable=True).indices[: own.spare]
        spared.append(torch.zeros_like(value, dtype=torch.bool).index_fill(0, best, True))
    reserved = torch.cat(spared)
    sizes = torch.cat([own.sizes for own in groups]).to(device)
    room = k - int(sizes[reserved].sum())
    order = torch.cat(list(values)).sort(descending=True, stable=True).indices
    order = order[~reserved[order]]
    filled = sizes[order].cumsum(0) <= room
    kept = reserved.index_fill(0, order[filled], True)
    return list(torch.split(kept, [own.count for own in groups]))
