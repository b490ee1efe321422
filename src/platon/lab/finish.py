"""The end of a run: take the best model, measure it, save it, and write the record."""

from __future__ import annotations

import contextlib
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from platon.engine.methods import METHODS
from platon.engine.pruner import Pruner
from platon.engine.units import weights
from platon.lab import checkpoint, process_group
from platon.lab.arguments import evaluation_arguments
from platon.lab.best_model import save_model
from platon.lab.card import model_card
from platon.lab.convergence import why_not_converged
from platon.lab.file import remove, write_json, write_text
from platon.lab.folder import RunFolder
from platon.lab.measure import Measure
from platon.lab.record import FORMAT
from platon.lab.trainer import LabTrainer, Results
from platon.lab.training import Training

#: makes a smaller model of one that was pruned in groups: the model, inputs to check it on, the folder to save it in
#: and the processor to save beside it -> what the record says of it
Shrink = Callable[[Any, dict[str, Any], Path, Any], dict[str, Any]]


class Deploy(NamedTuple):
    """What makes models small and fast; `lab` itself does not know how.

    Args:
        shrink: makes a smaller model of one that was pruned in groups.
        ship: writes the model as it is deployed on a CPU and measures it: the folders of the pruned model, of the one
            to compare with and of the one to write, inputs, the processor, and a function that evaluates a model ->
            what the record says of it.
    """

    shrink: Shrink | None = None
    ship: Callable[..., dict[str, Any]] | None = None


def finish(training: Training, deploy: Deploy, dense: dict[str, Any] | None) -> dict[str, Any]:
    """Save the best model and the record, which is written last; `dense` is the twin's record."""
    process_group.wait_for_all()  # the first process may still be writing the best model
    training.checkpoints.detach()
    results = _measured(training) | training.trainer.measure(training.prepared.test)
    with process_group.first_process_only() as first:
        compact = _save(training, deploy.shrink) if first else None
        fast = _ship(training, deploy.ship, compact) if first else None
    record = _record(training, results, compact, dense) | {"fast": fast}
    with process_group.first_process_only() as first:
        if first:
            write_text(training.folder.model / "README.md", model_card(record))
            write_json(training.folder.record, record)
            remove_remains(training.folder, training.resolved.settings.keep_checkpoints)
    return record


def _measured(training: Training) -> Results:
    """Load the best model, if there is one, and give its results."""
    best, trainer = training.best.best, training.trainer
    if best is not None:
        checkpoint.load_weights(trainer.model, training.folder.best(best["step"]))
        if trainer.evaluated is not None and trainer.evaluated[0] == best["step"]:
            return trainer.evaluated[1]
    return trainer.measure()


def _save(training: Training, shrink: Shrink | None) -> dict[str, Any] | None:
    """Save the model, and a smaller one if it was pruned in groups; returns what the record says of the latter."""
    folder, prepared, pruner = training.folder, training.prepared, training.checkpoints.pruner
    model = training.trainer.model
    save_model(model, folder.model)
    if prepared.processor is not None:
        prepared.processor.save_pretrained(folder.model)
    if shrink is None or pruner is None or training.resolved.settings.units == "weights":
        return None
    try:
        return shrink(model, prepared.batch(), folder.compact, prepared.processor)
    except ValueError as error:  # the run is complete without it
        return {"error": str(error)}


def _ship(training: Training, ship: Callable[..., dict[str, Any]] | None, compact: Any) -> dict[str, Any] | None:
    """Write and measure the fast model, on a CPU and if anything was pruned.

    Not after a training with several processes: an evaluation gathers from all of them, and only the first is here.
    """
    folder, prepared, settings = training.folder, training.prepared, training.resolved.settings
    arguments = training.trainer.args
    alone_on_cpu = arguments.device.type == "cpu" and arguments.world_size == 1
    if ship is None or not (settings.fast and alone_on_cpu) or training.checkpoints.pruner is None:
        return None
    training.printer.line(f"writing the model as it is deployed to {folder.fast}, and measuring it")
    source = folder.compact if compact is not None and "error" not in compact else folder.model
    reference = folder.dense.model if folder.dense.is_finished else folder.model
    try:
        return ship(source, reference, folder.fast, prepared.batch(), prepared.processor, partial(_evaluate, training))
    except ValueError as error:  # the run is complete without it
        return {"error": str(error)}


def _evaluate(training: Training, model: Any) -> Results:
    """The task's results of another model."""
    settings, prepared = training.resolved.settings, training.prepared
    model = prepared.adapt(model)
    with tempfile.TemporaryDirectory() as place:
        arguments = evaluation_arguments(settings, prepared, Path(place), model)
        return LabTrainer(settings, training.steps, prepared, model=model, args=arguments).measure()


def _record(
    training: Training, results: Results, compact: dict[str, Any] | None, dense: dict[str, Any] | None
) -> dict[str, Any]:
    resolved, prepared, trainer = training.resolved, training.prepared, training.trainer
    pruner, best, method = training.checkpoints.pruner, training.best.best, METHODS[resolved.settings.method]
    split, metric = next(iter(results)), prepared.metrics[0]
    model: Any = trainer.model
    matrices = weights(model).matrices if pruner is None else pruner.units.matrices
    left = {name: int(matrix.count_nonzero()) for name, matrix in matrices.items()}
    prunable = sum(matrix.numel() for matrix in matrices.values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    not_converged = why_not_converged(
        training.checkpoints.extra.get("not_finite"),
        trainer.constant[split],
        Measure(metric),
        results[split][metric],
        prepared.chance[split][metric],
    )
    return {
        "format": FORMAT,
        "task": resolved.settings.task,
        "method": resolved.settings.method,
        "title": method.title,
        "method_settings": {} if pruner is None else asdict(pruner.score),
        "recipe": resolved.recipe,
        "settings": resolved.plain(),
        "plan": asdict(training.steps),
        "data": {"fingerprint": prepared.fingerprint, "train_rows": len(prepared.train)}
        | {f"{name}_rows": len(rows) for name, rows in (prepared.evaluation | prepared.test).items()}
        | prepared.details,
        "metrics": list(prepared.metrics),
        "lower_is_better": [name for name in prepared.metrics if Measure(name).lower_is_better],
        "chance": prepared.chance,
        "results": results,
        "not_converged": not_converged,
        "best": best,
        "kept": _kept(training, sum(left.values()) / prunable),
        "decided_by": _decided_by(pruner),
        "parameters": {"all": parameters, "prunable": prunable, "left": parameters - prunable + sum(left.values())},
        "layers": {name: left[name] / matrix.numel() for name, matrix in matrices.items()},
        "bytes": sum(path.stat().st_size for path in training.folder.model.glob("*.safetensors")),
        "compact": compact,
        "seconds": round(training.checkpoints.clock(), 1),
        "dense": None
        if dense is None
        else {name: dense[name] for name in ("results", "parameters", "bytes", "seconds")},
        "versions": {name: version(name) for name in ("platon", "torch", "transformers", "datasets", "accelerate")}
        | {"python": platform.python_version()},
    }


def _kept(training: Training, left: float) -> float:
    """The share of prunable weights that the best model keeps; `left` is the share that is not zero now."""
    if METHODS[training.resolved.settings.method].holds_zeros:
        return left
    best, pruner = training.best.best, training.checkpoints.pruner
    return float(best["kept"]) if best is not None else 1.0 if pruner is None else pruner.kept()


def _decided_by(pruner: Pruner | None) -> str | None:
    """What decides the share kept: the setting "keep", or a fixed "penalty"; `None` for a dense training."""
    if pruner is None:
        return None
    return "keep" if pruner.score.meets_share else "penalty"


def remove_remains(folder: RunFolder, keep_checkpoints: bool) -> None:
    """Once there is a record, best models and checkpoints are not needed. Foreign files among them stay."""
    for path in folder.best_models():
        remove(path)
    if not keep_checkpoints:
        checkpoint.discard(checkpoint.steps(folder.checkpoints).values())
        with contextlib.suppress(OSError):  # it is not there, or something else is in it
            folder.checkpoints.rmdir()
