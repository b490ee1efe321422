"""Cuts a newly built model to the shapes of one that was compacted before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy import surgery
from platon.engine.family import Family, anatomy, attribute, heads, neurons, width_in
from platon.engine.topology import is_conv1d

Shapes = Mapping[str, tuple[int, ...]]


def cut_to(model: nn.Module, shapes: Shapes) -> None:
    """Give the linears of the blocks the shapes that are asked for; the values of the weights are any.

    A model whose shapes fit already is left alone, of whatever architecture it is. What cannot be (a matrix that is
    larger, half a head, a feed-forward whose two matrices differ) is refused.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if all(own.get(name) == shape for name, shape in shapes.items()):
        return
    for family in heads(model) + neurons(model):
        _cut_family(model, family, shapes)


def _cut_family(model: nn.Module, family: Family, shapes: Shapes) -> None:
    module = model.get_submodule(family.name)
    plan = anatomy(module)
    writers = [attribute(module, writer.path) for writer in plan.writers]
    reader = attribute(module, plan.reader)
    names = [member.name.removesuffix(".weight") for member in family.members]
    # One of the writers says how many groups are left; all have to agree.
    kept = {
        _asked(shapes, name, writer, int(is_conv1d(writer))) * family.count / surgery.outputs(writer)
        for name, writer in zip(names, writers, strict=False)
    }
    count = min(kept)
    if len(kept) != 1 or not count.is_integer() or not 1 <= count <= family.count:
        raise ValueError(f"the manifest does not fit: {family.name!r} cannot be cut to the shapes that it gives")
    left = torch.arange(int(count))
    width = width_in(reader)
    if count < family.count:
        for member, writer in zip(family.members, writers, strict=False):
            surgery.cut_rows(writer, (member.group < count).nonzero().view(-1))
        surgery.cut_columns(reader, torch.arange(int(width * count / family.count)), width)
        surgery.recount(module)
    for name, linear in zip(names, [*writers, reader], strict=True):
        _cut_inputs(name, linear, shapes)
    chosen = next((name for name in shapes if name == f"{family.name}.attn.{surgery.BIAS_HEADS}"), None)
    if plan.bias_by_head and chosen is not None:
        if shapes[chosen] != (len(left),):
            raise ValueError(f"the manifest does not fit: {chosen!r} is {list(shapes[chosen])} for {len(left)} heads")
        surgery.register_bias_heads(module.attn, left)


def _cut_inputs(name: str, linear: Any, shapes: Shapes) -> None:
    """The columns that it gathers, and whether it has a bias."""
    gathered = shapes.get(f"{name}.{surgery.COLUMNS}")
    if gathered is not None:
        there = linear.weight.shape[int(not is_conv1d(linear))]
        if len(gathered) != 1 or not 1 <= gathered[0] <= there:
            raise ValueError(f"the manifest does not fit: {name!r} cannot gather {list(gathered)} of {there} inputs")
        surgery.gather(linear, torch.arange(gathered[0]))
    if f"{name}.bias" in shapes and linear.bias is None:
        surgery.add_to_bias(linear, torch.zeros(surgery.outputs(linear)))
    elif f"{name}.bias" not in shapes and linear.bias is not None:
        linear.bias = None


def check_choice(model: nn.Module, name: str, chosen: Tensor) -> None:
    """Refuse a list of inputs or heads that names one that is not there; other tensors may hold anything."""
    path, _, kind = name.rpartition(".")
    if kind not in (surgery.COLUMNS, surgery.BIAS_HEADS):
        return
    module: Any = model.get_submodule(path)
    there = width_in(module) if kind == surgery.COLUMNS else _config_heads(model)
    if chosen.dtype != torch.int64 or bool(((chosen < 0) | (chosen >= there)).any()):
        raise ValueError(f"the weights are damaged: {name!r} names some that are not there, of {there}")


def _config_heads(model: Any) -> int:
    return int(model.config.num_attention_heads)


def _asked(shapes: Shapes, name: str, linear: Any, dim: int) -> int:
    shape = shapes.get(f"{name}.weight", ())
    if len(shape) != 2:
        raise ValueError(f"the manifest does not fit: it has no matrix {name + '.weight'!r}")
    return shape[dim]
