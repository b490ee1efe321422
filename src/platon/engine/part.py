"""Parts: how groups of weights lie in one matrix. They add up what a group holds, and spread a group's number again."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn


class Strips:
    """Consecutive or scattered places along one side of a matrix, and the group that each belongs to.

    Args:
        group: int64, a group for each place; -1 for none.
        count: how many groups there are; some may have no place here.
    """

    def __init__(self, group: Tensor, count: int) -> None:
        self.group, self.count = group, count
        members = group >= 0
        self.lengths = torch.bincount(group[members], minlength=count)
        self._order = group.argsort(stable=True)[int((~members).sum()) :]
        self._even = bool((self.lengths == self.lengths[0]).all())

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of each group along the first dimension; in a fixed order, so that a sum is always the same."""
        if not len(self._order):  # a rank's empty shard
            return values.new_zeros(self.count, *values.shape[1:])
        sorted_values = values.index_select(0, self._order.to(values.device))
        if self._even:
            return sorted_values.view(self.count, -1, *values.shape[1:]).sum(1)
        lengths = self.lengths.to(values.device)
        found: Tensor = torch.segment_reduce(sorted_values, "sum", lengths=lengths, axis=0)
        return found

    def spread(self, values: Tensor, elsewhere: float) -> Tensor:
        """The number of each place's group, along the first dimension; `elsewhere` where there is none."""
        group = self.group.to(values.device)
        found = values.index_select(0, group.clamp(min=0))
        if bool(self.lengths.sum() == len(self.group)):
            return found
        return torch.where((group >= 0).view(-1, *[1] * (values.dim() - 1)), found, values.new_tensor(elsewhere))


@dataclass(frozen=True)
class Part:
    """The groups' share of one matrix: by rows, by columns, or, with both, by blocks.

    Args:
        name: the parameter's.
        parameter: two-dimensional.
        rows: groups along its first side; `None`: a group takes whole columns.
        columns: groups along its second side; `None`: whole rows. With both, block (r, c) is group
            r · columns.count + c.
    """

    name: str
    parameter: nn.Parameter
    rows: Strips | None = None
    columns: Strips | None = None

    @cached_property
    def sizes(self) -> Tensor:
        """Weights of each group in this matrix."""
        height, width = self.parameter.shape
        if self.rows is not None and self.columns is not None:
            return (self.rows.lengths[:, None] * self.columns.lengths).view(-1)
        if self.rows is not None:
            return self.rows.lengths * width
        assert self.columns is not None
        return self.columns.lengths * height

    def of_rows(self, first: int, last: int) -> "Part":
        """The same groups in these rows alone: what a rank has of a sharded matrix."""
        if self.rows is None or (first == 0 and last == len(self.rows.group)):
            return self
        return replace(self, rows=Strips(self.rows.group[first:last], self.rows.count))

    def reduce(self, values: Tensor) -> Tensor:
        """The sum of `values`, of the shape of the matrix or of these rows, over each group; in float64."""
        if self.rows is not None and self.columns is not None:
            return self.columns.add_up(self.rows.add_up(values.double()).T).T.reshape(-1)
        if self.rows is not None:
            return self.rows.add_up(values.sum(1, dtype=torch.float64))
        assert self.columns is not None
        return self.columns.add_up(values.sum(0, dtype=torch.float64))

    def expand(self, values: Tensor, elsewhere: float = 1) -> Tensor:
        """Each weight's number, of its group, in a shape that broadcasts to the matrix's; `elsewhere` for the rest."""
        if self.rows is not None and self.columns is not None:
            by_rows = self.rows.spread(values.view(self.rows.count, self.columns.count), elsewhere)
            return self.columns.spread(by_rows.T, elsewhere).T
        if self.rows is not None:
            return self.rows.spread(values, elsewhere)[:, None]
        assert self.columns is not None
        return self.columns.spread(values, elsewhere)[None, :]


@dataclass(frozen=True)
class Groups:
    """Groups that lie in the same matrices: the heads of one attention, the columns of one matrix.

    Args:
        name: what they are named after.
        count: how many there are.
        parts: where their weights are.
        spare: so many stay whatever their score, the best of them.
    """

    name: str
    count: int
    parts: tuple[Part, ...]
    spare: int = 0

    @cached_property
    def sizes(self) -> Tensor:
        """Weights of each group."""
        return sum_of(part.sizes for part in self.parts)


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Added up; there is at least one."""
    return torch.stack(list(tensors)).sum(0)
