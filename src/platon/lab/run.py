"""One run: settings -> data and model -> training -> a run folder with model, record and history."""

from __future__ import annotations

import contextlib
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from platon.engine.hooks import NotFinite
from platon.engine.methods import METHODS
from platon.engine.schedule import Cubic, checked_keep
from platon.engine.units import Units, blocks, columns, heads, neurons, weights
from platon.lab import checkpoint, job, tasks
from platon.lab.card import model_card
from platon.lab.convergence import why_not
from platon.lab.errors import UserError, nearest
from platon.lab.folder import claimed, writing
from platon.lab.probe import Probe
from platon.lab.record import FORMAT, RECORD, read_json, read_record, rewind_history, write_json, write_text
from platon.lab.settings import Plan, Settings, Sourced, plan
from platon.lab.tasks import Prepared, Request
from platon.lab.trainer import PruningCallback, SealedCheckpoints
from platon.lab.training import Clock, LabTrainer, Trained, Watch, save_whole


class Interrupted(Exception):  # noqa: N818  # it is no error
    """A signal stopped the run after a checkpoint; the run can be resumed."""

    def __init__(self, number: int, folder: Path) -> None:
        """Which signal, and where to go on."""
        self.number, self.folder = number, folder
        super().__init__(f"stopped by {signal.Signals(number).name}")


@dataclass(frozen=True)
class Say:
    """Where a run tells the user what it does; silent by default."""

    line: Any = lambda text: None
    progress: bool = False


#: cuts a model to what a structured run left of it: the model, inputs to check it on, the folder to save it in and the
#: processor to save beside it -> what the record says of it
Shrink = Callable[[Any, dict[str, Any], Path, Any], dict[str, Any]]


def prune(
    sourced: Sourced, folder: Path, resume: bool = False, say: Say | None = None, shrink: Shrink | None = None
) -> dict[str, Any]:
    """Run to the end, with the dense twin where the settings ask for it; returns the record."""
    job.join()
    say = say if say is not None and job.is_first() else Say()
    settings = sourced.settings
    if settings.method not in METHODS:
        raise UserError(f"no method is called {settings.method!r}{nearest(settings.method, METHODS)}")
    _checked(checked_keep, settings.keep)
    _checked(METHODS[settings.method].build, asdict(settings))  # before the twin is trained, not after
    with claimed(folder, sourced, resume):
        if settings.method == "dense" or settings.dense == "none":
            return _run(sourced, folder, say, shrink)
        dense = folder / "dense"
        twin = replace(sourced, settings=replace(settings, method="dense", dense="none"))
        say.line(f"training the dense twin in {dense}")
        with claimed(dense, twin, resume or dense.exists()):
            try:
                before = _run(twin, dense, say)
            except Interrupted as stopped:  # it is the whole run that is to be resumed, not the twin by itself
                raise Interrupted(stopped.number, folder) from None
        aim = f"to {settings.keep:.0%}" if settings.penalty is None else f"with penalty {settings.penalty:g}"
        say.line(f"pruning {aim} while fine-tuning")
        start = str(dense / "model") if settings.dense == "first" else None
        return _run(sourced, folder, say, shrink, start=start, dense=before)


def _run(
    sourced: Sourced,
    folder: Path,
    say: Say,
    shrink: Shrink | None = None,
    start: str | None = None,
    dense: dict[str, Any] | None = None,
) -> dict[str, Any]:
    if job.most(job.is_first() and (folder / RECORD).exists()):
        say.line(f"{folder} is finished")
        if job.is_first():
            _tidy(folder)
        job.wait()
        return read_record(folder)
    began = time.monotonic()
    settings = sourced.settings
    task, request = tasks.find(settings.task), _request(settings, start)
    with job.first_alone() as first:  # so that what it prepares on disk is there for the others
        prepared = task.prepare(request) if first else None
    prepared = prepared or task.prepare(request)
    steps = plan(sourced, len(prepared.train))
    checkpoints = folder / "checkpoints"
    last = _rewound(folder, settings, say)
    if last is not None:
        say.line(f"resuming at step {last.name.removeprefix('checkpoint-')} of {steps.total}")
    earlier = read_json(last / checkpoint.NUMBERS)["extra"].get("seconds", 0.0) if last is not None else 0.0

    disable_progress_bar()  # of saving and loading; training has its own
    set_seed(settings.seed)
    model = prepared.build()
    sealed = _callback(settings, steps)
    sealed.extra["settings"] = asdict(settings)
    trainer = LabTrainer(
        settings,
        steps,
        prepared,
        model=model,
        args=_arguments(settings, steps, prepared, checkpoints, say.progress),
    )
    trainer.remove_callback(PrinterCallback)  # it prints a line a log where there is no progress bar
    split = next(iter(prepared.evaluation))
    watch = Watch(
        folder,
        steps,
        f"eval_{split}_{prepared.metrics[0]}",
        trainer.order,
        sealed,
        tell=(lambda text: None) if say.progress else say.line,
    )
    # First in line, so that every logger after them sees the pruner's numbers; the probe sees weights before masks.
    trainer.callback_handler.callbacks[0:0] = [Probe(folder, steps.total, sealed), sealed, watch]
    sealed.clock = lambda: earlier + time.monotonic() - began
    with writing(folder):
        with _signals(watch), contextlib.suppress(Trained):
            try:
                trainer.train(resume_from_checkpoint=None if last is None else str(last))
            except NotFinite as error:  # this run has a result, and the result is that it has none
                sealed.extra["not_finite"] = f"{str(error).split(';')[0]} at step {trainer.state.global_step + 1}"
                return _finish(sourced, folder, steps, prepared, trainer, sealed, watch, shrink, dense)
        if watch.stop_signal is not None and trainer.state.global_step < steps.total:
            raise Interrupted(watch.stop_signal, folder)
        return _finish(sourced, folder, steps, prepared, trainer, sealed, watch, shrink, dense)


def _rewound(folder: Path, settings: Settings, say: Say) -> Path | None:
    """The checkpoint of this run to go on from, if there is one; what was written after it is gone."""
    checkpoints, done = folder / "checkpoints", 0
    with job.first_alone() as first:
        if first:
            last, problems = checkpoint.last_complete(checkpoints, asdict(settings))
            for text in problems:
                say.line(f"passing over a checkpoint: {text}")
            done = 0 if last is None else int(last.name.removeprefix("checkpoint-"))
            checkpoint.discard(path for step, path in checkpoint.steps(checkpoints).items() if step > done)
            rewind_history(folder, done)
    done = job.most(done)
    return checkpoints / f"checkpoint-{done}" if done else None


def _request(settings: Settings, start: str | None) -> Request:
    wanted = {name: getattr(settings, name) for name in Request.__dataclass_fields__}
    data = None if settings.data is None else Path(settings.data)
    return Request(**{**wanted, "data": data, "model": start or settings.model})


def _callback(settings: Settings, steps: Plan) -> SealedCheckpoints:
    score = _checked(METHODS[settings.method].build, asdict(settings))
    if score is None:
        return SealedCheckpoints()
    schedule = _checked(Cubic, settings.keep, steps.total, steps.warmup, steps.cooldown, settings.every)
    return PruningCallback(settings.keep, score=score, schedule=schedule, units=_units(settings))


def _units(settings: Settings) -> Callable[[nn.Module], Units]:
    """What the settings' word for units means for a model."""
    kinds: dict[str, Callable[[nn.Module], Units]] = {
        "weights": weights,
        "columns": columns,
        "blocks": lambda model: blocks(model, (settings.block_rows, settings.block_columns)),
        "neurons": neurons,
        "heads": heads,
        "heads+neurons": lambda model: heads(model) + neurons(model),
    }
    return lambda model: _checked(kinds[settings.units], model)


def _checked(function: Any, *arguments: Any) -> Any:
    """The engine's sentences on bad values are for the user too."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise UserError(str(error)) from None


def _arguments(settings: Settings, steps: Plan, prepared: Prepared, folder: Path, progress: bool) -> TrainingArguments:
    parts = settings.accumulate * job.size()
    if settings.batch % parts:
        raise UserError(f"batch must be a multiple of accumulate × processes, {parts}, got {settings.batch}")
    on_cpu = not torch.accelerator.is_available()
    if on_cpu and settings.precision == "fp16":
        raise UserError("precision fp16 needs a GPU, and there is none; choose bf16 or float32")
    if settings.report_to != "none" and find_spec(settings.report_to) is None:
        raise UserError(f"report_to {settings.report_to} needs a package: pip install {settings.report_to}")
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps.total,
        per_device_train_batch_size=settings.batch // parts,
        per_device_eval_batch_size=settings.eval_batch,
        gradient_accumulation_steps=settings.accumulate,
        max_grad_norm=settings.clip,
        logging_steps=steps.log_every,
        logging_nan_inf_filter=False,  # a loss that is not finite is to be seen
        eval_strategy="steps",
        eval_steps=steps.eval_every,
        save_strategy="steps",
        save_steps=steps.checkpoint_every,
        save_total_limit=settings.checkpoints,
        use_cpu=on_cpu,  # or Trainer takes bf16 for a mistake
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        report_to=settings.report_to,
        label_names=list(prepared.label_names),
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=not progress,
        seed=settings.seed,
    )


@contextlib.contextmanager
def _signals(watch: Watch) -> Iterator[None]:
    """Ctrl-C and SIGTERM finish the step, save, and stop; a second Ctrl-C stops at once."""
    asked = 0.0

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        # A launcher hands on what the terminal has sent already: that is no second time.
        if watch.stop_signal is not None and (job.size() == 1 or time.monotonic() - asked > 5):
            raise KeyboardInterrupt
        watch.stop_signal, asked = number, time.monotonic()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(
    sourced: Sourced,
    folder: Path,
    steps: Plan,
    prepared: Prepared,
    trainer: LabTrainer,
    sealed: SealedCheckpoints,
    watch: Watch,
    shrink: Shrink | None,
    dense: dict[str, Any] | None,
) -> dict[str, Any]:
    """Take the best model, measure it, save it, cut it down if it was pruned in groups, and write the record last."""
    model: Any = trainer.model
    best = watch.best
    job.wait()  # for the best model to be written
    if sealed.pruner is not None:
        sealed.pruner.detach()
    if best is not None:
        checkpoint.load_weights(model, watch.best_folder(best["step"]))
    seen = trainer.evaluated
    results = seen[1] if best is not None and seen is not None and seen[0] == best["step"] else trainer.measure()
    split, metric = next(iter(results)), prepared.metrics[0]
    not_converged = why_not(
        sealed.extra.get("not_finite"),
        trainer.one_answer[split],
        metric,
        results[split][metric],
        prepared.chance[split][metric],
    )
    matrices = weights(model).matrices if sealed.pruner is None else sealed.pruner.units.matrices
    left = {name: int(matrix.count_nonzero()) for name, matrix in matrices.items()}
    prunable = sum(matrix.numel() for matrix in matrices.values())
    parameters = sum(p.numel() for p in model.parameters())
    in_groups = sealed.pruner is not None and sourced.settings.units != "weights"
    compact = None
    with job.first_alone() as first:
        if first:
            save_whole(model, folder / "model")
            if prepared.processor is not None:
                prepared.processor.save_pretrained(folder / "model")
            compact = _shrunk(shrink, model, prepared, folder) if shrink is not None and in_groups else None
    record = {
        "format": FORMAT,
        "task": sourced.settings.task,
        "method": sourced.settings.method,
        "recipe": sourced.recipe,
        "settings": sourced.plain(),
        "plan": asdict(steps),
        "data": {"fingerprint": prepared.fingerprint, "train_rows": len(prepared.train)}
        | {f"{split}_rows": len(rows) for split, rows in prepared.evaluation.items()},
        "metrics": list(prepared.metrics),
        "chance": prepared.chance,
        "results": results,
        "not_converged": not_converged,
        "best": best,
        "kept": best["kept"] if best is not None else 1.0 if sealed.pruner is None else sealed.pruner.kept(),
        "decided_by": _decided_by(sealed),
        "parameters": {"all": parameters, "prunable": prunable, "left": parameters - prunable + sum(left.values())},
        "layers": {name: left[name] / matrix.numel() for name, matrix in matrices.items()},
        "bytes": sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors")),
        "compact": compact,
        "seconds": round(sealed.clock(), 1),
        "dense": None
        if dense is None
        else {name: dense[name] for name in ("results", "parameters", "bytes", "seconds")},
        "versions": {name: version(name) for name in ("platon", "torch", "transformers", "datasets", "accelerate")}
        | {"python": platform.python_version()},
    }
    with job.first_alone() as first:
        if first:
            write_text(folder / "model" / "README.md", model_card(record))
            write_json(folder / RECORD, record)
            _tidy(folder)
    return record


def _tidy(folder: Path) -> None:
    """Best models are no longer needed once there is a record."""
    for path in folder.glob("best-*"):
        shutil.rmtree(path, ignore_errors=True)


def _decided_by(sealed: SealedCheckpoints) -> str | None:
    """What decided how much stays: the share that was asked for, or a penalty."""
    if sealed.pruner is None:
        return None
    return "keep" if getattr(sealed.pruner.score, "penalty", None) is None else "penalty"


def _shrunk(shrink: Shrink, model: Any, prepared: Prepared, folder: Path) -> dict[str, Any]:
    """What the record says of the compact model, or why there is none: the run itself is complete without it."""
    try:
        return shrink(model, prepared.batch(), folder / "compact", prepared.processor)
    except ValueError as error:
        return {"error": str(error)}


def trial(sourced: Sourced, tried: int = 4) -> tuple[int, float]:
    """The steps that a run will have, and the seconds that one of them takes here: the median of a few, after one."""
    settings = sourced.settings
    prepared = tasks.find(settings.task).prepare(_request(settings, None))
    steps = plan(sourced, len(prepared.train))
    disable_progress_bar()
    set_seed(settings.seed)
    with tempfile.TemporaryDirectory() as place:
        arguments = _arguments(settings, steps, prepared, Path(place), progress=False)
        arguments.max_steps, arguments.eval_strategy, arguments.save_strategy = tried, "no", "no"
        trainer = LabTrainer(settings, steps, prepared, model=prepared.build(), args=arguments)
        trainer.remove_callback(PrinterCallback)
        clock = Clock()
        trainer.callback_handler.callbacks[0:0] = [_callback(settings, steps), clock]
        trainer.train()
    return steps.total, clock.middle()


def evaluate_run(folder: Path, data: Path | None = None) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Measure the model of a finished run again; returns the record and the new results."""
    record, prepared, measure = reopen(folder, data)
    return record, measure(prepared.build())


def reopen(
    folder: Path, data: Path | None = None
) -> tuple[dict[str, Any], Prepared, Callable[[Any], dict[str, dict[str, float]]]]:
    """The record of a finished run, its task again, and a function that measures a model on it."""
    record = read_record(folder)
    settings = Settings(**{name: said["value"] for name, said in record["settings"].items()})
    if data is not None:
        settings = replace(settings, data=str(data))
    prepared = tasks.find(settings.task).prepare(_request(settings, str(folder / "model")))
    steps = Plan(1, 0, 0, 0, 1, 1, 1)

    def measure(model: Any) -> dict[str, dict[str, float]]:
        with tempfile.TemporaryDirectory() as place:
            arguments = _arguments(settings, steps, prepared, Path(place), progress=False)
            return LabTrainer(settings, steps, prepared, model=model, args=arguments).measure()

    return record, prepared, measure
