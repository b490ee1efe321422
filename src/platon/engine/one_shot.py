"""Pruning once, without training: from the weights alone, or from what they multiply in a few calibration batches."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from platon.engine.pruner import Pruner
from platon.engine.schedule import Constant
from platon.engine.score import Score
from platon.engine.units import Units


def prune_once(
    model: nn.Module,
    keep: float,
    *,
    score: Score,
    batches: Iterable[Mapping[str, Any]] = (),
    units: Units | None = None,
) -> Pruner:
    """Prune a model now, to a share of `keep`. The pruner that is returned has stopped; it tells what was kept.

    Example:
        >>> platon.prune_once(model, 0.5, score=platon.Wanda(), batches=batches)

    Args:
        model: holds the weights. They are the pruned weights from now on.
        keep: the share of the prunable weights that is kept.
        score: a method that needs no training: `Magnitude`, `Wanda`.
        batches: inputs of the model by name, for a score that reads what the weights multiply.
        units: what is pruned; every weight of the transformer blocks by default.
    """
    if not score.works_untrained:
        raise ValueError(f"{type(score).__name__} needs gradients, so it cannot prune without training; use Wanda")
    # The pruner works in the hooks of an optimizer's step; this one changes nothing itself.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pruner = Pruner(model, optimizer, score=score, schedule=Constant(keep), units=units)
    was_training, gradients = model.training, {p: p.grad for p in model.parameters() if p.grad is not None}
    model.eval()
    try:
        with torch.no_grad(), pruner.calibrating():
            for batch in batches:
                model(**batch)
        for parameter in gradients:
            parameter.grad = None
        optimizer.step()
    finally:
        pruner.detach()
        model.train(was_training)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    return pruner
