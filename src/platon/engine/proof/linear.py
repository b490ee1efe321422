"""Linears with smaller matrices in places whose width is fixed: they read some features, or make some and zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from platon.engine.topology import is_conv1d, weights_of

COLUMNS = "columns"  # buffer of `Gathered`: the features that are read
ROWS = "rows"  # buffer of `Padded`: the row that makes each feature


class Gathered(nn.Linear):
    """A linear that reads some of the features that it is given: those in `columns`.

    `in_features` is what it is given; the matrix has a column for each that it reads.
    """

    gathers_columns = True
    columns: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(picked(x, self.columns))


class Padded(nn.Linear):
    """A linear that makes some of its features; the others are their biases, or zero.

    `out_features` is how many it gives. `rows` holds, for each of them, the row of the matrix that makes it, or the
    number of rows where none does. The bias is of all features. It may gather what it reads, too.
    """

    rows: Tensor

    def forward(self, x: Tensor) -> Tensor:
        columns = gathered(self)
        read = x if columns is None else picked(x, columns)
        made = picked(F.pad(F.linear(read, self.weight), (0, 1)), self.rows)
        return made if self.bias is None else made + self.bias


def gathered(module: nn.Module) -> Tensor | None:
    """The features that a linear gathers from those that it is given; `None`: it reads all, or is no linear."""
    columns = getattr(module, COLUMNS, None)
    return columns if isinstance(columns, Tensor) and weights_of(module) else None


def inputs_of(linear: Any) -> Tensor:
    """The features that a linear reads, one for each column of its matrix."""
    columns = gathered(linear)
    return torch.arange(width_in(linear)) if columns is None else columns.cpu()


def width_in(linear: Any) -> int:
    """How many features a linear is given, whether it gathers some of them or reads all."""
    return int(linear.nx if is_conv1d(linear) else linear.in_features)


def chosen(tensor: Tensor, dim: int, places: Tensor) -> Any:
    """Some places along a dimension; a parameter stays one."""
    data = tensor.detach().index_select(dim, places.to(tensor.device))
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def picked(x: Tensor, places: Tensor) -> Tensor:
    """Places along the last dimension."""
    # As a matrix, because torch gathers columns of a matrix several times faster than the last of three dimensions.
    return x.reshape(-1, x.shape[-1]).index_select(1, places).view(*x.shape[:-1], -1)


def by_feature(linear: nn.Module, of_rows: Tensor, elsewhere: float) -> Tensor:
    """A number for each feature that a linear gives, from one for each row of its matrix."""
    if not isinstance(linear, Padded):
        return of_rows
    return torch.cat([of_rows, of_rows.new_tensor([elsewhere])])[linear.rows.to(of_rows.device)]


def may_pad(linear: nn.Module) -> bool:
    """Whether a linear's class is known well enough to give it fewer rows or columns than it has features."""
    return type(linear) in (nn.Linear, Gathered, Padded)


def keep_rows(linear: Any, kept: Tensor) -> None:
    """Leave a linear these rows of its matrix; what the others made is constant from now on."""
    before = linear.rows.cpu() if isinstance(linear, Padded) else torch.arange(len(linear.weight))
    new = torch.full((int(before.max()) + 2,), len(kept))
    new[kept] = torch.arange(len(kept))
    linear.weight = chosen(linear.weight, 0, kept)
    linear.__class__ = Padded
    linear.register_buffer(ROWS, new[before].to(linear.weight.device))


def keep_columns(linear: Any, kept: Tensor) -> None:
    """Let a linear read those of its columns that are in `kept`, and no other."""
    before = gathered(linear)
    linear.weight = chosen(linear.weight, 1, kept)
    if not isinstance(linear, Padded):
        linear.__class__ = Gathered
    columns = kept if before is None else before[kept.to(before.device)]
    linear.register_buffer(COLUMNS, columns.to(linear.weight.device))
