"""Takes units out of a block: places of its tensors, and the numbers by which its modules count them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.proof.attention import shrink_attention
from platon.engine.proof.bias import choose
from platon.engine.proof.linear import COLUMNS, chosen, gathered, inputs_of, keep_columns, keep_rows, width_in
from platon.engine.proof.pattern import Number, Pattern, Side
from platon.engine.topology import is_conv1d, weights_of


def cut(block: nn.Module, pattern: Pattern, kept: Tensor) -> None:
    """Leave a block the units that the mask `kept` names; at least one."""
    if pattern.padded:
        _cut_padded(block, pattern, kept)
        return
    for side in (*pattern.writers, *pattern.extras):
        _cut_tensor(block, side, kept)
    _cut_reader(block, pattern.reader, kept)
    share = pattern.count / int(kept.sum())
    for path in pattern.norms:
        _rescale(block.get_submodule(path), share)
    for number in pattern.numbers:
        set_number(block, number, number.value * int(kept.sum()) // pattern.count)
    for given in pattern.inputs:
        choose(block.get_submodule(given.module), given, kept.nonzero().view(-1))
    for path in pattern.swaps:
        shrink_attention(block.get_submodule(path), int(kept.sum()) / pattern.count)


def _cut_padded(block: nn.Module, pattern: Pattern, kept: Tensor) -> None:
    """Take the units' weights; what the block computes with keeps its shape."""
    for side in pattern.writers:
        keep_rows(block.get_submodule(side.module), side.places(kept))
    reader = block.get_submodule(pattern.reader.module)
    unit = pattern.reader.unit[inputs_of(reader)]
    keep_columns(reader, (kept[unit.clamp(min=0)] & (unit >= 0)).nonzero().view(-1))


def _cut_reader(block: nn.Module, side: Side, kept: Tensor) -> None:
    """Leave the reader the features of the kept units; it may gather some of them only."""
    linear: Any = block.get_submodule(side.module)
    places = side.places(kept)
    new_place = torch.full((width_in(linear),), -1, dtype=torch.int64)
    new_place[places] = torch.arange(len(places))
    columns = gathered(linear)
    features = new_place[inputs_of(linear)]
    linear.weight = chosen(linear.weight, side.dim, (features >= 0).nonzero().view(-1))
    if columns is not None:
        linear.register_buffer(COLUMNS, features[features >= 0].to(columns.device))
    setattr(linear, "nx" if is_conv1d(linear) else "in_features", len(places))


def _cut_tensor(block: nn.Module, side: Side, kept: Tensor) -> None:
    owner: Any = block.get_submodule(side.module)
    key = side.path.rpartition(".")[2]
    tensor: Tensor = getattr(owner, key)
    places = side.places(kept)
    setattr(owner, key, chosen(tensor, side.dim, places))
    if weights_of(owner) and key == "weight":
        setattr(owner, "nf" if is_conv1d(owner) else "out_features", len(places))
    elif not list(owner.children()) and not weights_of(owner):  # a norm, an embedding: its numbers are of its tensor
        before = tensor.shape[side.dim]
        for name, value in list(vars(owner).items()):
            if type(value) is int and value == before:
                setattr(owner, name, len(places))
            elif type(value) in (tuple, torch.Size) and value and value[-1] == before:
                setattr(owner, name, (*value[:-1], len(places)))


def _rescale(norm: Any, share: float) -> None:
    """Let a norm over all units divide by the mean over as many features as there were; those that went were zero.

    √(Σx²/n + ε) with n features in place of n·share is √share · √(Σx²/(n·share) + ε/share).
    """
    for name, parameter in list(norm.named_parameters(recurse=False)):
        setattr(norm, name, nn.Parameter(parameter.detach() * share**0.5, requires_grad=parameter.requires_grad))
    for name, value in list(vars(norm).items()):
        if isinstance(value, float) and 0 < value < 0.01:
            setattr(norm, name, value * share)


def set_number(block: nn.Module, number: Number, value: int) -> None:
    """Give a number of a block another value."""
    owner: Any = block.get_submodule(number.module)
    name = number.attribute
    if name.startswith("config."):
        name = name.removeprefix("config.")
        owner.config = copy.copy(owner.config)
        owner = owner.config
    if number.place is None:
        setattr(owner, name, value)
    else:
        before = getattr(owner, name)
        after = [value if place == number.place else one for place, one in enumerate(before)]
        setattr(owner, name, type(before)(after))
