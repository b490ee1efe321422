"""Cuts out of a model what pruning emptied: the outputs stay, the zeros go."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy import surgery
from platon.deploy.storage import save_with_manifest
from platon.engine.family import Anatomy, Family, anatomy, attribute, heads, inputs_of, neurons, width_in
from platon.engine.topology import blocks, weights_of


def compact(model: nn.Module) -> nn.Module:
    """A smaller model with the same outputs, from the zeros in the model alone.

    A head or a neuron goes when nothing reads it, or when what it writes does not depend on the input; what it
    contributes all the same is added to the next bias. A linear of the blocks whose other columns are zero gathers the
    inputs that it still uses. Every layer keeps at least one head and one neuron, so that caches, masks and shapes are
    what they were. The given model is not touched; where there is nothing to remove, it is given back, with a warning.

    Args:
        model: of one of the architectures whose heads and neurons are known; others are refused by name.

    Raises:
        ValueError: the architecture is not known.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    model = _unwrapped(model)
    heads(model)  # refuses before anything is copied
    small = deepcopy(model)
    removed = sum(_cut(small, family, _idle_heads) for family in heads(small))
    removed += sum(_cut(small, family, _idle_neurons) for family in neurons(small))
    removed += sum(
        _gather(linear) for block in blocks(small).values() for linear in block.modules() if weights_of(linear)
    )
    if not removed:
        warnings.warn(
            f"{type(model).__name__} has nothing to remove: no head, no neuron and no input column of its blocks is "
            "zero as a whole; prune in groups, as with units 'heads+neurons'",
            stacklevel=2,
        )
        return model
    save_with_manifest(small)  # no configuration describes its shapes
    return small


def _unwrapped(model: Any) -> nn.Module:
    """The model without `torch.compile` and data-parallel wrappers."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def _cut(model: nn.Module, family: Family, idle: Callable[..., tuple[Tensor, Tensor]]) -> int:
    """Cut what is idle out of one family; how many groups that was."""
    module = model.get_submodule(family.name)
    plan = anatomy(module)
    reader = attribute(module, plan.reader)
    group = family.members[-1].group
    gone, constant = idle(module, plan, family, _weight_by_group(surgery.reads(reader).T, group, family.count) == 0)
    if bool(gone.all()):
        gone[0] = False
    if not bool(gone.any()):
        return 0
    columns = surgery.reads(reader)[:, gone[group]].double()
    share = columns @ constant[inputs_of(reader)[gone[group]]].to(columns)
    if bool(share.any()):
        surgery.add_to_bias(reader, share)
    for member, writer in zip(family.members, plan.writers, strict=False):
        surgery.cut_rows(attribute(module, writer.path), (~gone[member.group]).nonzero().view(-1))
    width = width_in(reader)
    features = torch.arange(width) * family.count // width
    surgery.cut_columns(reader, (~gone[features]).nonzero().view(-1), width)
    if plan.bias_by_head:
        surgery.choose_bias_heads(module.attn, (~gone).nonzero().view(-1))
    surgery.recount(module)
    return int(gone.sum())


def _idle_heads(module: nn.Module, plan: Anatomy, family: Family, unread: Tensor) -> tuple[Tensor, Tensor]:
    """Which heads can go, and what each feature that the output reads is then, whatever the input.

    A head whose value rows are zero gives its value bias, since attention weights sum to one. They do not where a
    position may attend to nothing, which happens under a causal mask with padding on the left: there a head must give
    zero to go. Elsewhere it takes a row that is nothing but padding, whose outputs mean nothing.
    """
    writer = next(writer for writer in plan.writers if "value" in writer.roles)
    value = attribute(module, writer.path)
    first = writer.roles.index("value") * (surgery.outputs(value) // len(writer.roles))
    rows = surgery.reads(value)[first : first + surgery.outputs(value) // len(writer.roles)]
    group = torch.arange(len(rows)) * family.count // len(rows)
    bias = torch.zeros(len(rows)) if value.bias is None else value.bias.detach()[first : first + len(rows)].cpu()
    constant = _weight_by_group(rows, group, family.count) == 0
    if any(getattr(part, "is_causal", False) for part in module.modules()):
        constant &= _weight_by_group(bias[:, None], group, family.count) == 0
    # Query heads that share a value have a copy of it each.
    copies = width_in(attribute(module, plan.reader)) // len(rows)
    given = bias.double().view(family.count, 1, -1).expand(-1, copies, -1).reshape(-1)
    return unread | constant, _only(given, constant & ~unread, family.count)


def _idle_neurons(module: nn.Module, plan: Anatomy, family: Family, unread: Tensor) -> tuple[Tensor, Tensor]:
    """Which neurons can go, and what each is then, whatever the input.

    With a gate, the product is constant when both factors are, or when one of them is zero.
    """
    activation = attribute(module, plan.activation or "")
    constants, values = [], []
    for writer in plan.writers:
        linear = attribute(module, writer.path)
        constants.append((surgery.reads(linear) == 0).all(1).cpu())
        bias = torch.zeros(family.count) if linear.bias is None else linear.bias.detach().cpu().double()
        with torch.no_grad():
            values.append(bias if "up" in writer.roles and len(plan.writers) > 1 else activation(bias))
    zero = torch.stack([constant & (value == 0) for constant, value in zip(constants, values, strict=True)]).any(0)
    constant = torch.stack(constants).all(0) | zero
    given = torch.stack([value.double() for value in values]).prod(0).masked_fill(zero, 0.0)
    return unread | constant, _only(given, constant & ~unread, family.count)


def _gather(linear: Any) -> int:
    """Let a linear read only the columns that are not zero; how many it no longer reads."""
    used = (surgery.reads(linear) != 0).any(0).cpu()
    if not bool(used.any()):
        used[0] = True
    if bool(used.all()):
        return 0
    surgery.gather(linear, used.nonzero().view(-1))
    return int((~used).sum())


def _weight_by_group(rows: Tensor, group: Tensor, count: int) -> Tensor:
    """How many weights that are not zero each group has, on the CPU."""
    alive = torch.zeros(count, dtype=torch.int64)
    return alive.index_add_(0, group, (rows != 0).sum(1).cpu())


def _only(given: Tensor, wanted: Tensor, count: int) -> Tensor:
    """The values of the wanted groups' features; zero elsewhere."""
    return torch.where(wanted[torch.arange(len(given)) * count // len(given)], given, 0.0)
