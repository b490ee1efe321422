"""Slices: the rows or columns of matrices that live or die together, as one unit.

A head, for example, is some rows of the query, key and value matrices and some columns of the output matrix. The heads
of one attention form a `Group`; a `Slice` says how the units of a group lie in one of its matrices.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn


class Index:
    """Which unit each row (or each column) of a matrix belongs to.

    Args:
        unit: int64, the unit of each row; -1: none.
        count: how many units there are; some may have no row here.
    """

    def __init__(self, unit: Tensor, count: int) -> None:
        self.unit, self.count = unit, count
        inside = unit >= 0
        self.lengths = torch.bincount(unit[inside], minlength=count)  #: rows of each unit
        self._order = unit.argsort(stable=True)[int((~inside).sum()) :]
        self._even = bool((self.lengths == self.lengths[0]).all()) if count else True

    def sum(self, values: Tensor) -> Tensor:
        """The sum over each unit's rows; in a fixed order, so that it is always the same to the bit."""
        if not len(self._order):  # a rank's empty shard
            return values.new_zeros(self.count, *values.shape[1:])
        by_unit = values.index_select(0, self._order.to(values.device))
        if self._even:
            return by_unit.view(self.count, -1, *values.shape[1:]).sum(1)
        lengths = self.lengths.to(values.device)
        found: Tensor = torch.segment_reduce(by_unit, "sum", lengths=lengths, axis=0)
        return found

    def spread(self, numbers: Tensor, elsewhere: float) -> Tensor:
        """Each row's number, which is its unit's; `elsewhere` for rows of no unit."""
        unit = self.unit.to(numbers.device)
        found = numbers.index_select(0, unit.clamp(min=0))
        if int(self.lengths.sum()) == len(self.unit):
            return found
        return torch.where((unit >= 0).view(-1, *[1] * (numbers.dim() - 1)), found, numbers.new_tensor(elsewhere))


@dataclass(frozen=True)
class Slice:
    """How the units of a group lie in one matrix: as rows, as columns or, with both, as rectangles.

    Args:
        name: the parameter's.
        parameter: two-dimensional.
        rows: the units of its rows; `None`: a unit takes whole columns.
        columns: the units of its columns; `None`: a unit takes whole rows. With both, rectangle (r, c) is unit
            r · columns.count + c.
    """

    name: str
    parameter: nn.Parameter
    rows: Index | None = None
    columns: Index | None = None

    @cached_property
    def sizes(self) -> Tensor:
        """Weights of each unit in this matrix."""
        height, width = self.parameter.shape
        if self.rows is not None and self.columns is not None:
            return (self.rows.lengths[:, None] * self.columns.lengths).view(-1)
        if self.rows is not None:
            return self.rows.lengths * width
        assert self.columns is not None
        return self.columns.lengths * height

    def of_rows(self, first: int, last: int) -> "Slice":
        """The same units in these rows alone: what a rank has of a sharded matrix."""
        if self.rows is None or (first == 0 and last == len(self.rows.unit)):
            return self
        return replace(self, rows=Index(self.rows.unit[first:last], self.rows.count))

    def reduce(self, values: Tensor) -> Tensor:
        """The sum of `values`, of the shape of the matrix or of these rows, over each unit; in float64."""
        if self.rows is not None and self.columns is not None:
            return self.columns.sum(self.rows.sum(values.double()).T).T.reshape(-1)
        if self.rows is not None:
            return self.rows.sum(values.sum(1, dtype=torch.float64))
        assert self.columns is not None
        return self.columns.sum(values.sum(0, dtype=torch.float64))

    def expand(self, numbers: Tensor, elsewhere: float = 1) -> Tensor:
        """Each weight's number, which is its unit's, in a shape that broadcasts to the matrix's."""
        if self.rows is not None and self.columns is not None:
            by_rows = self.rows.spread(numbers.view(self.rows.count, self.columns.count), elsewhere)
            return self.columns.spread(by_rows.T, elsewhere).T
        if self.rows is not None:
            return self.rows.spread(numbers, elsewhere)[:, None]
        assert self.columns is not None
        return self.columns.spread(numbers, elsewhere)[None, :]


@dataclass(frozen=True)
class Group:
    """Units that are cut from the same matrices: the heads of one attention, the columns of one matrix.

    Args:
        name: the module or parameter that they belong to.
        count: how many units there are.
        slices: where their weights are.
        spare: so many units stay whatever their score, the best of them.
    """

    name: str
    count: int
    slices: tuple[Slice, ...]
    spare: int = 0

    @cached_property
    def sizes(self) -> Tensor:
        """Weights of each unit."""
        return _sum(part.sizes for part in self.slices)

    def of_rows(self, rows: Callable[[str], tuple[int, int]]) -> "Group":
        """The same units in a rank's rows; `rows` gives the first row, and the one after the last, of a matrix."""
        sizes = self.sizes
        here = replace(self, slices=tuple(part.of_rows(*rows(part.name)) for part in self.slices))
        here.__dict__["sizes"] = sizes  # of whole units, wherever their rows are
        return here

    def reduce(self, values: Callable[[str], Tensor | None]) -> Tensor | None:
        """The sum over each unit, in float64; `values` gives the numbers of a matrix, in its shape, or none."""
        found = [part.reduce(own) for part in self.slices if (own := values(part.name)) is not None]
        return _sum(tensor.to(found[0].device) for tensor in found) if found else None

    def expand(self, numbers: Tensor) -> dict[str, Tensor]:
        """The units' numbers as one tensor a matrix, in a shape that broadcasts to the matrix's."""
        return {part.name: part.expand(numbers) for part in self.slices}


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)
