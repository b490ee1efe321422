"""Slices: the rows or columns of matrices that live or die together, as one unit.

A head, for example, is some rows of the query, key and value matrices and some columns of the output matrix. The heads
of one attention form a `Group`; a `Slice` says how the units of a group lie in one of its matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from platon.engine.shard import is_sharded, rows_of


class Index:
    """Which unit each row (or each column) of a matrix belongs to; -1: none. Some of the units may have no row here."""

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

    def spread(self, numbers: Tensor) -> Tensor:
        """Each row's number, which is its unit's; 1 (no gate, not pruned) for rows of no unit."""
        unit = self.unit.to(numbers.device)
        found = numbers.index_select(0, unit.clamp(min=0))
        return found if len(self._order) == len(unit) else found.masked_fill(unit[:, None] < 0, 1)


@dataclass(frozen=True)
class Slice:
    """How the units of a group lie in one matrix: as rows, as columns or, with both, as rectangles."""

    name: str
    parameter: nn.Parameter
    rows: Index | None = None  # the units of its rows; `None`: a unit takes whole columns
    columns: Index | None = None  # the units of its columns; `None`: a unit takes whole rows

    @cached_property
    def sizes(self) -> Tensor:
        height, width = self.parameter.shape
        rows = torch.tensor([height]) if self.rows is None else self.rows.lengths
        columns = torch.tensor([width]) if self.columns is None else self.columns.lengths
        return (rows[:, None] * columns).view(-1)  # rectangle (r, c) is unit r · columns.count + c

    def here(self) -> "Slice":
        """The same units in the rows that this rank has of a sharded matrix."""
        if self.rows is None or not is_sharded(self.parameter):
            return self
        first, last = rows_of(self.parameter)
        return replace(self, rows=Index(self.rows.unit[first:last], self.rows.count))

    def reduce(self, values: Tensor) -> Tensor:
        """The sum of `values`, of the shape of the matrix or of these rows, over each unit; in float64."""
        if self.rows is None:
            assert self.columns is not None
            return self.columns.sum(values.sum(0, dtype=torch.float64))
        if self.columns is None:
            return self.rows.sum(values.sum(1, dtype=torch.float64))
        return self.columns.sum(self.rows.sum(values.double()).T).T.reshape(-1)

    def expand(self, numbers: Tensor) -> Tensor:
        """Each weight's number, which is its unit's, in a shape that broadcasts to the matrix's."""
        found = numbers.view(1 if self.rows is None else self.rows.count, -1)
        if self.rows is not None:
            found = self.rows.spread(found)
        return found if self.columns is None else self.columns.spread(found.T).T


@dataclass(frozen=True)
class Group:
    """Units that are cut from the same matrices: the heads of one attention, the columns of one matrix."""

    name: str  # the module or parameter that they belong to
    count: int  # how many units there are
    slices: tuple[Slice, ...]  # where their weights are
    spare: int = 0  # so many units stay whatever their score, the best of them

    @cached_property
    def sizes(self) -> Tensor:
        return torch.stack([part.sizes for part in self.slices]).sum(0)

    def here(self) -> "Group":
        """The same units in the rows that this rank has of each matrix."""
        return replace(self, slices=tuple(part.here() for part in self.slices))

    def reduce(self, values: Callable[[str], Tensor | None]) -> Tensor | None:
        """The sum over each unit, in float64; `values` gives the numbers of a matrix, in its shape, or none."""
        found = [part.reduce(own) for part in self.slices if (own := values(part.name)) is not None]
        return torch.stack([tensor.to(found[0].device) for tensor in found]).sum(0) if found else None

    def expand(self, numbers: Tensor) -> dict[str, Tensor]:
        """The units' numbers as one tensor a matrix, in a shape that broadcasts to the matrix's."""
        return {part.name: part.expand(numbers) for part in self.slices}
