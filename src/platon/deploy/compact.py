"""Cuts out of a model what pruning emptied: the outputs stay, the zeros go."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy import surgery
from platon.deploy.constant import constants
from platon.deploy.equality import check_same
from platon.deploy.storage import save_with_manifest
from platon.engine.proof.cut import cut
from platon.engine.proof.discovery import Finding, proved, remember
from platon.engine.proof.linear import inputs_of
from platon.engine.proof.pattern import Pattern
from platon.engine.proof.replica import duplicate
from platon.engine.topology import weights_of


def compact(model: nn.Module) -> nn.Module:
    """A smaller model with the same outputs, from the zeros in the model alone.

    A head or a neuron goes when nothing reads it, or when what it writes does not depend on the input; what it
    contributes all the same is added to the next bias. A linear of the blocks whose other columns are zero gathers the
    inputs that it still uses. Every layer keeps at least one head and one neuron, so that caches, masks and shapes are
    what they were. The given model is not touched; where there is nothing to remove, it is given back, with a warning.

    Args:
        model: any whose heads or neurons can be proved (docs/architectures.md); others are refused with the reason.

    Raises:
        ValueError: neither heads nor neurons of the model are known, or the smaller model computes something else.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    model = _unwrapped(model)
    findings = proved(model)
    small = duplicate(model)
    removed = 0
    for name, finding in findings.items():
        block = small.get_submodule(name)
        left = []
        for pattern in finding.patterns:
            gone = _cut(block, pattern, finding)
            removed += int(gone.sum())
            left.append(pattern.cut(~gone))
        removed += sum(_gather(linear) for linear in block.modules() if _gathers(linear))
        remember(block, Finding(tuple(left), finding.refusals, finding.calls))
    if not removed:
        warnings.warn(
            f"{type(model).__name__} has nothing to remove: no head, no neuron and no input column of its blocks is "
            "zero as a whole; prune in groups, as with units 'heads+neurons'",
            stacklevel=2,
        )
        return model
    check_same(model, small)
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


def _cut(block: nn.Module, pattern: Pattern, finding: Finding) -> Tensor:
    """Cut what is idle out of one group; the mask of the units that went."""
    reader: Any = block.get_submodule(pattern.reader.module)
    features = inputs_of(reader)
    weight = surgery.reads(reader)
    read = torch.zeros(pattern.count, dtype=torch.int64)
    read.index_add_(0, pattern.reader.unit[features], (weight != 0).sum(0).cpu())
    unread = read == 0
    constant, value = constants(block, pattern, finding, ~unread)
    gone = unread | constant
    if bool(gone.all()):
        gone[0] = False
    if not bool(gone.any()):
        return gone
    columns = gone[pattern.reader.unit[features]]
    share = weight[:, columns].double() @ value[features[columns]].to(weight.device)
    if bool(share.any()):
        surgery.add_to_bias(reader, share)
    cut(block, pattern, ~gone)
    return gone


def _gathers(linear: nn.Module) -> bool:
    """Whether a linear may read fewer columns: torch's attention multiplies by its output's weight itself."""
    return bool(weights_of(linear)) and surgery.is_plain(linear)


def _gather(linear: Any) -> int:
    """Let a linear read only the columns that are not zero; how many it no longer reads."""
    used = (surgery.reads(linear) != 0).any(0).cpu()
    if not bool(used.any()):
        used[0] = True
    if bool(used.all()):
        return 0
    surgery.gather(linear, used.nonzero().view(-1))
    return int((~used).sum())
