"""Cuts rows and columns out of linears, and tells the modules around them how many heads are left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from platon.engine.family import anatomy, attribute
from platon.engine.topology import is_conv1d

COLUMNS, BIAS_HEADS = "columns", "bias_heads"  # buffers that say what is left: they are saved with the weights


class Gathered(nn.Linear):
    """A linear that reads some of the features that it is given: those in `columns`.

    `in_features` is what it is given; the matrix has a column for each that it reads.
    """

    columns: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_picked(x, self.columns))


class GatheredConv1D(Conv1D):
    """GPT-2's linear, which stores the transpose, in the same way."""

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


def cut_rows(linear: Any, kept: Tensor) -> None:
    """Leave a linear the outputs in `kept`."""
    linear.weight = _chosen(linear.weight, int(is_conv1d(linear)), kept)
    if linear.bias is not None:
        linear.bias = _chosen(linear.bias, 0, kept)
    _set_width(linear, "out_features", "nf", len(kept))


def cut_columns(linear: Any, kept: Tensor, width: int) -> None:
    """Leave a linear the inputs whose features are in `kept`, of which there were `width`."""
    new_place = torch.full((width,), -1, dtype=torch.int64)
    new_place[kept] = torch.arange(len(kept))
    columns = getattr(linear, COLUMNS, None)
    features = new_place if columns is None else new_place[columns.cpu()]
    linear.weight = _chosen(linear.weight, int(not is_conv1d(linear)), (features >= 0).nonzero().view(-1))
    if columns is not None:
        linear.register_buffer(COLUMNS, features[features >= 0].to(columns.device))
    _set_width(linear, "in_features", "nx", len(kept))


def gather(linear: Any, kept: Tensor) -> None:
    """Let a linear read those of its columns that are in `kept`, and no other."""
    before = getattr(linear, COLUMNS, None)
    linear.weight = _chosen(linear.weight, int(not is_conv1d(linear)), kept)
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


def choose_bias_heads(module: Any, kept: Tensor) -> None:
    """MPNet's scores get a bias for each head, made once for all layers: this layer takes those of its heads."""
    before = getattr(module, BIAS_HEADS, None)
    register_bias_heads(module, kept if before is None else before[kept.to(before.device)])


def register_bias_heads(module: Any, chosen: Tensor) -> None:
    """Take these heads' part of the bias from now on."""
    first = not hasattr(module, BIAS_HEADS)
    module.register_buffer(BIAS_HEADS, chosen.to(next(module.parameters()).device))
    if first:
        module.register_forward_pre_hook(_take_bias_heads)


def _take_bias_heads(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    hidden, mask, bias, *rest = inputs
    return None if bias is None else (hidden, mask, bias.index_select(1, module.bias_heads), *rest)


def recount(module: nn.Module) -> None:
    """Write the number of heads that the matrices have into the attributes of an attention that say it."""
    plan = anatomy(module)
    if plan.size is None:
        return
    query = next(writer for writer in plan.writers if "query" in writer.roles)
    width = outputs(attribute(module, query.path)) // len(query.roles)
    values = dict.fromkeys(plan.counts, width // int(attribute(module, plan.size))) | dict.fromkeys(plan.widths, width)
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        setattr(attribute(module, owner) if owner else module, name, value)


def _chosen(parameter: nn.Parameter, dim: int, kept: Tensor) -> nn.Parameter:
    data = parameter.detach().index_select(dim, kept.to(parameter.device))
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _set_width(linear: Any, of_linear: str, of_conv1d: str, width: int) -> None:
    setattr(linear, of_conv1d if is_conv1d(linear) else of_linear, width)
