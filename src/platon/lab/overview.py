"""What a run says before it trains: data, model, steps, and when how much is pruned."""

from __future__ import annotations

from typing import Any

from platon.engine.methods import METHODS
from platon.engine.units import weights
from platon.lab.advice import before_training, schedule_of
from platon.lab.measure import Measure
from platon.lab.percent import percent
from platon.lab.printer import Printer
from platon.lab.settings import Settings
from platon.lab.step_count import StepCounts
from platon.lab.training import Training, checked

PRUNED = 0.99  # a model with fewer of its prunable weights left was pruned before


def introduce(printer: Printer, training: Training, name: str, data: bool) -> None:
    """Print what was read, what will be done, and what in it cannot work.

    Args:
        printer: where to print.
        training: ready to start.
        name: of the model.
        data: say what was read, too; the dense twin has said it already.
    """
    settings, steps, prepared = training.resolved.settings, training.steps, training.prepared
    model: Any = training.trainer.model
    for what, text in prepared.about if data else ():
        printer.row(what, text)
    matrices = checked(weights, model).matrices.values()
    prunable = sum(matrix.numel() for matrix in matrices)
    left = sum(int(matrix.count_nonzero()) for matrix in matrices) / prunable
    everything = sum(parameter.numel() for parameter in model.parameters())
    before = "" if left >= PRUNED else f"; pruned before, {percent(left)} of these are not zero"
    printer.row("model", f"{name}: {everything:,} parameters, {prunable:,} of them prunable{before}")
    printer.row("training", _training(settings, steps, len(prepared.train)))
    printer.row("pruning", _pruning(settings, steps))
    for note in prepared.notes:
        printer.row("note", note)
    rows = next(iter(prepared.counts.values())) if Measure(prepared.metrics[0]).is_percent else None
    warned = before_training(settings, steps, rows) + _about_zeros(settings, left)
    for text in [*(prepared.warnings if data else ()), *warned]:
        printer.warn(text)


def _about_zeros(settings: Settings, left: float) -> list[str]:
    method = METHODS[settings.method]
    if left < PRUNED and not method.holds_zeros:
        return [f"the {percent(1 - left)} that are zero will grow again in this training; --hold keeps them at zero"]
    if left >= PRUNED and method.holds_zeros:
        return ["there are no zeros to hold: the model is not pruned"]
    return []


def _training(settings: Settings, steps: StepCounts, rows: int) -> str:
    if not steps.total:
        return "none"
    epochs = steps.total * settings.batch / max(rows, 1)
    said = "1 epoch" if epochs == 1 else f"{epochs:.3g} epochs"
    return (
        f"{steps.total:,} steps of {settings.batch} rows ({said}), learning rate "
        f"{settings.learning_rate:g}, measured every {steps.eval_every:,} steps"
    )


def _pruning(settings: Settings, steps: StepCounts) -> str:
    method = METHODS[settings.method]
    if method.score is None:
        return "none" if settings.method == "dense" else "none; zeros stay zero"
    units = "" if settings.units == "weights" else f" of {settings.units.replace('+', ' and ')}"
    if not steps.total:
        return f"{method.title}{units}: {100 * settings.keep:.3g} % kept, at once"
    schedule = schedule_of(settings, steps)
    if schedule is None:
        return f"{method.title}{units}, penalty {settings.penalty:g}; the share kept is a result"
    keep = percent(settings.keep, None)
    return (
        f"{method.title}{units}: 100 % kept to step {schedule.start:,}, falling to {keep} by step {schedule.end:,} "
        f"(a mask every {settings.every}), held to step {schedule.total:,}"
    )
