"""Assembling a training: model, pruning callback, Trainer and the other callbacks, from the settings of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from platon.engine.methods import METHODS
from platon.engine.schedule import Cubic
from platon.engine.units import Units, blocks, columns, heads, neurons, weights
from platon.lab.arguments import training_arguments
from platon.lab.attachment import Attach
from platon.lab.best_model import BestModelCallback
from platon.lab.callback import PruningCallback
from platon.lab.checkpoint_callback import CheckpointCallback
from platon.lab.errors import UserError
from platon.lab.folder import RunFolder
from platon.lab.history import HistoryCallback
from platon.lab.hold_callback import HoldCallback
from platon.lab.measure import Measure
from platon.lab.order import EpochCallback
from platon.lab.printer import Printer
from platon.lab.probe import Probe
from platon.lab.progress import ProgressCallback
from platon.lab.settings import ResolvedSettings, Settings
from platon.lab.step_count import StepCounts
from platon.lab.stop import StopCallback
from platon.lab.tasks import Prepared
from platon.lab.trainer import LabTrainer


@dataclass(frozen=True)
class Training:
    """A training that is ready to start.

    Args:
        resolved: the settings, and who chose each of them.
        folder: where the run writes.
        steps: the lengths of the training and its phases.
        prepared: its task.
        trainer: trains and measures.
        checkpoints: holds the pruner, the attachments and what checkpoints carry.
        best: knows the best model so far.
        stop: knows whether a signal has arrived.
        progress: shows the progress.
        printer: prints progress.
    """

    resolved: ResolvedSettings
    folder: RunFolder
    steps: StepCounts
    prepared: Prepared
    trainer: LabTrainer
    checkpoints: CheckpointCallback
    best: BestModelCallback
    stop: StopCallback
    progress: ProgressCallback
    printer: Printer


def assemble(
    resolved: ResolvedSettings,
    folder: RunFolder,
    steps: StepCounts,
    prepared: Prepared,
    printer: Printer,
    attach: Attach | None = None,
) -> Training:
    """Build the model, and everything that takes part in training it."""
    settings = resolved.settings
    trainer, checkpoints = make_trainer(settings, steps, prepared, folder.checkpoints, attach)
    checkpoints.extra["settings"] = asdict(settings)
    headline = f"eval_{next(iter(prepared.evaluation))}_{prepared.metrics[0]}"
    best = BestModelCallback(folder, steps.total - steps.cooldown, headline, Measure(prepared.metrics[0]), checkpoints)
    stop = StopCallback()
    progress = ProgressCallback(steps.total, headline, checkpoints, printer, METHODS[settings.method].verb)
    # Before Trainer's own callbacks, so that every logger sees the pruner's numbers; and the probe before the pruner,
    # so that its hook sees the weights before they are masked.
    trainer.callback_handler.callbacks[0:0] = [
        Probe(folder, steps.total, checkpoints),
        checkpoints,
        EpochCallback(trainer.order),
        stop,
        HistoryCallback(folder, checkpoints),
        progress,
        best,
    ]
    return Training(resolved, folder, steps, prepared, trainer, checkpoints, best, stop, progress, printer)


def make_trainer(
    settings: Settings,
    steps: StepCounts,
    prepared: Prepared,
    folder: Path,
    attach: Attach | None = None,
) -> tuple[LabTrainer, CheckpointCallback]:
    """A Trainer with a new model, and the callback that prunes it, which is not yet added."""
    disable_progress_bar()  # of saving and loading files
    arguments = training_arguments(settings, steps, prepared, folder)
    set_seed(settings.seed)
    model = prepared.build()
    checkpoints = make_callback(settings, steps, model)
    if attach is not None:
        checkpoints.attached.update(attach(settings, model, prepared))
    trainer = LabTrainer(settings, steps, prepared, model=model, args=arguments)
    trainer.remove_callback(PrinterCallback)  # it prints every logged line if there is no progress bar
    return trainer, checkpoints


def make_callback(settings: Settings, steps: StepCounts, model: nn.Module) -> CheckpointCallback:
    """The callback that prunes by the settings' method; one that only completes checkpoints for a dense training.

    The method "hold" keeps the zeros that the model has now, before a checkpoint is loaded.
    """
    method = METHODS[settings.method]
    score = checked(method.build, asdict(settings))
    if score is None or not steps.total:
        return HoldCallback(model) if method.holds_zeros else CheckpointCallback()
    schedule = checked(Cubic, settings.keep, steps.total, steps.warmup, steps.cooldown, settings.every)
    return PruningCallback(settings.keep, score=score, schedule=schedule, units=units_of(settings))


def units_of(settings: Settings) -> Callable[[nn.Module], Units]:
    """What the settings prune, as a function of the model."""
    kinds: dict[str, Callable[[nn.Module], Units]] = {
        "weights": weights,
        "columns": columns,
        "blocks": lambda model: blocks(model, (settings.block_rows, settings.block_columns)),
        "neurons": neurons,
        "heads": heads,
        "heads+neurons": lambda model: heads(model) + neurons(model),
    }
    return lambda model: checked(kinds[settings.units], model)


def checked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the engine; its `ValueError` about a value is a `UserError` here."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise UserError(str(error)) from None
