"""Linears that read only some of the features that they are given, and biases that take up what was removed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from platon.engine.proof.linear import COLUMNS, Gathered, Padded, by_feature, chosen, keep_columns, picked
from platon.engine.topology import is_conv1d


class GatheredConv1D(Conv1D):
    """GPT-2's linear, which stores the transpose; it reads some of the features that it is given."""

    gathers_columns = True
    columns: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(picked(x, self.columns))
        return out


def outputs(linear: Any) -> int:
    """How many features a linear writes."""
    return int(linear.weight.shape[int(is_conv1d(linear))])


def reads(linear: Any) -> Tensor:
    """The matrix with a column for each feature that is read, however it is stored."""
    weight: Tensor = linear.weight.detach()
    return weight.T if is_conv1d(linear) else weight


def gather(linear: Any, kept: Tensor) -> None:
    """Let a linear read those of its columns that are in `kept`, and no other."""
    if not is_conv1d(linear):
        keep_columns(linear, kept)
        return
    before = getattr(linear, COLUMNS, None)
    linear.weight = chosen(linear.weight, 0, kept)
    # The module stays the one that everybody holds; only what it does with its input changes.
    linear.__class__ = GatheredConv1D
    columns = kept if before is None else before[kept.to(before.device)]
    linear.register_buffer(COLUMNS, columns.to(linear.weight.device))


def add_to_bias(linear: Any, constant: Tensor) -> None:
    """Add what removed groups contributed whatever the input; the bias is made where there is none."""
    if linear.bias is None:
        zeros = by_feature(linear, torch.zeros_like(linear.weight[:, 0]), 0.0)
        linear.bias = nn.Parameter(zeros, requires_grad=linear.weight.requires_grad)
    with torch.no_grad():
        linear.bias.copy_(linear.bias.double() + by_feature(linear, constant, 0.0))


def is_plain(linear: nn.Module) -> bool:
    """Whether a linear's class computes a product and nothing else; a class derived from it may do anything."""
    return type(linear) in (nn.Linear, Conv1D, Gathered, GatheredConv1D, Padded)
