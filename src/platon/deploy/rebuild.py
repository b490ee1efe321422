"""Cuts a newly built model to the shapes of one that was compacted before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from platon.deploy import surgery
from platon.engine.proof.bias import CHOSEN, Chooser
from platon.engine.proof.cut import cut
from platon.engine.proof.discovery import Finding, proved, remember
from platon.engine.proof.linear import ROWS, Padded, width_in
from platon.engine.proof.pattern import Pattern
from platon.engine.topology import blocks, is_conv1d, weights_of

_BUFFER_BYTES = 64 << 20  # of buffers that are computed

Shapes = Mapping[str, tuple[int, ...]]


def cut_to(model: nn.Module, shapes: Shapes) -> bool:
    """Give the linears of the blocks the shapes that are asked for; the values of the weights are any.

    A model whose shapes fit already is left alone, of whatever architecture it is. What cannot be (a matrix that is
    larger, half a head, a feed-forward whose two matrices differ) is refused. So that nothing large is built for a
    configuration of another model, a model with other shapes outside its blocks is left alone too.

    Returns:
        Whether the shapes fitted already.
    """
    there = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    differ = [name for name, shape in shapes.items() if there.get(name) != shape]
    if not differ:
        return True
    inside = tuple(f"{name}." for name in blocks(model))
    if not all(name.startswith(inside) for name in differ):
        return False
    for name, finding in proved(_with_buffers(model, shapes)).items():
        block = model.get_submodule(name)
        left = tuple(_cut_group(block, name, pattern, shapes) for pattern in finding.patterns)
        for path, linear in block.named_modules():
            if weights_of(linear) and surgery.is_plain(linear):
                _cut_inputs(f"{name}.{path}", linear, shapes)
        remember(block, Finding(left, finding.refusals, finding.calls))
    return False


def _with_buffers(model: Any, shapes: Shapes) -> nn.Module:
    """A model that can be tried: one whose buffers hold numbers; parameters may be on the meta device."""
    if not any(buffer.is_meta for buffer in model.buffers()):
        return model
    weights = 4 * sum(math.prod(shape) for shape in shapes.values())
    if sum(buffer.nbytes for buffer in model.buffers()) > max(_BUFFER_BYTES, weights):
        raise ValueError(f"the manifest does not fit: the buffers would take far more than {weights} bytes of weights")
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        built: nn.Module = type(model)(model.config)
    return built


def _cut_group(block: nn.Module, name: str, pattern: Pattern, shapes: Shapes) -> Pattern:
    where = ".".join(filter(None, (name, pattern.module)))
    counts = set()
    for side in pattern.writers:
        shape = shapes.get(f"{name}.{side.path}", ())
        if len(shape) != 2:
            raise ValueError(f"the manifest does not fit: it has no matrix {f'{name}.{side.path}'!r}")
        fixed = int((side.unit < 0).sum())
        counts.add((shape[side.dim] - fixed) * pattern.count / (len(side.unit) - fixed))
    count = min(counts)
    if len(counts) != 1 or not count.is_integer() or not 1 <= count <= pattern.count:
        raise ValueError(f"the manifest does not fit: {where!r} cannot be cut to the shapes that it gives")
    if count == pattern.count:
        return pattern
    kept = torch.arange(pattern.count) < count
    cut(block, pattern, kept)
    for given in pattern.inputs:
        path = ".".join(filter(None, (name, given.module, CHOSEN)))
        left: Tensor = getattr(block.get_submodule(given.module), CHOSEN)
        if shapes.get(path, tuple(left.shape)) != tuple(left.shape):
            raise ValueError(f"the manifest does not fit: {path!r} is {list(shapes[path])} for {len(left)} heads")
    return pattern.cut(kept)


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
    if kind not in (surgery.COLUMNS, ROWS, CHOSEN):
        return
    module: Any = model.get_submodule(path)
    if kind == surgery.COLUMNS:
        there = width_in(module)
    elif kind == ROWS:
        if not isinstance(module, Padded):
            return
        there = len(module.weight) + 1
    else:
        there = next(hook.period for hook in module._forward_pre_hooks.values() if isinstance(hook, Chooser))
    if chosen.dtype != torch.int64 or bool(((chosen < 0) | (chosen >= there)).any()):
        raise ValueError(f"the weights are damaged: {name!r} names some that are not there, of {there}")
