"""The optimizer of a run."""

from __future__ import annotations

import torch
from torch import nn

from platon.engine.topology import blocks
from platon.lab.settings import Settings


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer that the settings name, with weight decay on matrices only; fused where torch has that."""
    if settings.freeze_embeddings:
        freeze_embeddings(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    rate = settings.learning_rate
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum, fused=True)
    if settings.optimizer == "adamax":
        return torch.optim.Adamax(groups, lr=rate)
    return torch.optim.AdamW(groups, lr=rate, fused=True)


def freeze_embeddings(model: nn.Module) -> None:
    """Stop training every embedding table outside the transformer blocks."""
    inside = {id(module) for block in blocks(model).values() for module in block.modules()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module) not in inside:
            module.weight.requires_grad_(False)
