"""Linears that read only some of the features that they are given, and biases that take up what was removed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from platon.engine.cut import chosen
from platon.engine.topology import is_conv1d

COLUMNS = "columns"  # buffer that says which features are read; it is saved with the weights


class Gathered(nn.Linear):
    """A linear that reads some of the features that it is given: those in `columns`.

    `in_features` is what it is given; the matrix has a column for each that it reads.
    """

    gathers_columns = True
    columns: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_picked(x, self.columns))


class GatheredConv1D(Conv1D):
    """GPT-2's linear, which stores the transpose, in the same way."""

    gathers_columns = True
    columns: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(_picked(x, self.columns))
        return out


def _picked(x: Tensor, columns: Tensor) -> Tensor:
    # As a matrix, because torch gathers columns of a matrix several times faster than the last of three dimensions.
    return x.reshape(-1, x.shape[-1]).index_select(1, columns).view(*x.shape[:-1], -1)


def outputs(linear: Any) -> int:
    """How many features a linear writes."""
    return int(linear.weight.shape[int(is_conv1d(linear))])


def reads(linear: Any) -> Tensor:
    """The matrix with a column for each feature that is read, however it is stored."""
    weight: Tensor = linear.weight.detach()
    return weight.T if is_conv1d(linear) else weight


def gather(linear: Any, kept: Tensor) -> None:
    """Let a linear read those of its columns that are in `kept`, and no other."""
    before = getattr(linear, COLUMNS, None)
    linear.weight = chosen(linear.weight, int(not is_conv1d(linear)), kept)
    become_gathered(linear, kept.to(linear.weight.device) if before is None else before[kept.to(before.device)])


def become_gathered(linear: Any, columns: Tensor) -> None:
    """Make a linear read the features in `columns`; its matrix has a column for each already."""
    # The module stays the one that everybody holds; only what it does with its input changes.
    linear.__class__ = GatheredConv1D if is_conv1d(linear) else Gathered
    linear.register_buffer(COLUMNS, columns)


def add_to_bias(linear: Any, constant: Tensor) -> None:
    """Add what removed groups contributed whatever the input; the bias is made where there is none."""
    if linear.bias is None:
        linear.bias = nn.Parameter(torch.zeros_like(linear.weight[:, 0]), requires_grad=linear.weight.requires_grad)
    with torch.no_grad():
        linear.bias.copy_(linear.bias.double() + constant)


def is_plain(linear: nn.Module) -> bool:
    """Whether a linear's class computes a product and nothing else; a class derived from it may do anything."""
    return type(linear) in (nn.Linear, Conv1D, Gathered, GatheredConv1D)
