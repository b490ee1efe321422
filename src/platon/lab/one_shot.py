"""A run of no steps: the model is pruned at once, and measured. Some methods look at calibration rows first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from platon.engine.methods import METHODS
from platon.engine.one_shot import prune_once
from platon.lab.errors import UserError
from platon.lab.settings import Settings
from platon.lab.tasks.dataset import subset
from platon.lab.training import Training, checked, units_of

CALIBRATION = 128  #: rows that a method sees, as in Wanda's paper; --train-rows gives another number


def check_untrained(settings: Settings) -> None:
    """Refuse a method that cannot prune without training."""
    score = checked(METHODS[settings.method].build, asdict(settings))
    if settings.steps == 0 and score is not None and not score.works_untrained:
        able = [name for name, one in METHODS.items() if one.score is not None and one.score().works_untrained]
        raise UserError(
            f"the method {settings.method} learns from gradients, so it cannot prune in 0 steps; "
            f"choose one of {', '.join(able)}, or give --steps"
        )


def prune_at_once(training: Training) -> None:
    """Prune the model of a training without steps; a method without a score leaves it as it is."""
    settings = training.resolved.settings
    score = METHODS[settings.method].build(asdict(settings))
    if score is None:
        return
    model: Any = training.trainer.model
    batches = _batches(training) if score.reads == "inputs" else iter(())
    with training.trainer.accelerator.autocast():
        training.checkpoints.pruner = checked(
            lambda: prune_once(model, settings.keep, score=score, batches=batches, units=units_of(settings)(model))
        )


def _batches(training: Training) -> Iterator[dict[str, Any]]:
    """Calibration rows as inputs of the model: those that the user asked for, or a fixed random subset."""
    settings, prepared = training.resolved.settings, training.prepared
    count = len(prepared.train)
    rows = range(count) if settings.train_rows is not None else subset(count, min(count, CALIBRATION)).tolist()
    device = training.trainer.args.device
    for start in range(0, len(rows), settings.eval_batch):
        made = prepared.collate([prepared.train[number] for number in rows[start : start + settings.eval_batch]])
        yield {name: tensor.to(device) for name, tensor in made.items() if name not in prepared.label_names}
