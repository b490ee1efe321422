"""One run: settings -> task and model -> training -> a run folder with model, record and history."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from platon.engine.hooks import NotFinite
from platon.engine.methods import METHODS
from platon.engine.scope import check_share
from platon.lab import checkpoint, process_group, tasks
from platon.lab.attachment import Attach, Attachment
from platon.lab.claim import claimed, explaining_write_errors
from platon.lab.errors import UserError, nearest
from platon.lab.finish import Deploy, Shrink, finish, remove_remains
from platon.lab.folder import RunFolder
from platon.lab.one_shot import check_untrained, prune_at_once
from platon.lab.order import NothingToTrain
from platon.lab.overview import introduce
from platon.lab.percent import percent
from platon.lab.printer import Printer
from platon.lab.record import read_record, rewind_history
from platon.lab.settings import ResolvedSettings, Settings
from platon.lab.step_count import count_steps
from platon.lab.stop import Interrupted
from platon.lab.tasks import Prepared, Request
from platon.lab.teacher import attach_teacher, check_teacher
from platon.lab.training import Training, assemble, checked


def prune(
    resolved: ResolvedSettings,
    folder: Path,
    resume: bool = False,
    printer: Printer | None = None,
    shrink: Shrink | None = None,
    attach: Attach | None = None,
    ship: Callable[..., dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run to the end, with the dense twin where the settings ask for it; returns the record.

    Args:
        resolved: the settings.
        folder: the run folder; it must be new unless `resume`.
        resume: go on with the run in `folder`, if there is one.
        printer: prints progress, in the first process; nothing by default.
        shrink: makes a smaller model of one that was pruned in groups.
        attach: builds objects that take part in the training of the pruned model, beside the settings' teacher.
        ship: writes the model as it is deployed on a CPU, and measures it.
    """
    process_group.join()
    printer = printer if printer is not None and process_group.is_first() else Printer()
    settings, run, deploy = resolved.settings, RunFolder(folder), Deploy(shrink, ship)
    _check_method(settings)  # before the twin is trained, not after
    check_teacher(settings)
    with claimed(folder, resolved, resume):
        if METHODS[settings.method].score is None or settings.dense == "none":
            return _run(resolved, run, printer, deploy, attach=_all(attach, attach_teacher))
        twin = replace(resolved, settings=replace(settings, method="dense", dense="none", teacher="none"))
        printer.line(f"training the dense twin in {run.dense.path}")
        with claimed(run.dense.path, twin, resume or run.dense.path.exists()):
            try:
                dense = _run(twin, run.dense, printer)
            except Interrupted as stopped:  # what is resumed is the run, which then goes on with its twin
                raise Interrupted(stopped.number, folder) from None
        aim = f"to {percent(settings.keep, None)}" if settings.penalty is None else f"with penalty {settings.penalty:g}"
        printer.line(f"pruning {aim} while fine-tuning")
        start = str(run.dense.model) if settings.dense == "first" else None
        teacher = partial(attach_teacher, twin=run.dense.model)
        return _run(resolved, run, printer, deploy, start, dense, _all(attach, teacher))


def _all(*attachers: Attach | None) -> Attach:
    """Attaches what each of these attaches."""

    def attach(settings: Settings, model: Any, prepared: Prepared) -> dict[str, Attachment]:
        found: dict[str, Attachment] = {}
        for one in attachers:
            found |= {} if one is None else one(settings, model, prepared)
        return found

    return attach


def _check_method(settings: Settings) -> None:
    if settings.method not in METHODS:
        raise UserError(f"no method is called {settings.method!r}{nearest(settings.method, METHODS)}")
    score = checked(METHODS[settings.method].build, asdict(settings))
    if score is not None and settings.units != "weights":
        checked(score.check_groups)
    checked(check_share, settings.scope or "global", settings.keep)
    check_untrained(settings)


def _run(
    resolved: ResolvedSettings,
    run: RunFolder,
    printer: Printer,
    deploy: Deploy = Deploy(),  # noqa: B008  # it holds nothing that changes
    start: str | None = None,
    dense: dict[str, Any] | None = None,
    attach: Attach | None = None,
) -> dict[str, Any]:
    """One training in a claimed folder, from the model `start` or the settings' one; `dense` is the twin's record."""
    if process_group.highest(process_group.is_first() and run.is_finished):
        printer.line(f"{run.path} is finished")
        if process_group.is_first():
            remove_remains(run, resolved.settings.keep_checkpoints)
        process_group.wait_for_all()
        return read_record(run.path)
    began = time.monotonic()
    settings = resolved.settings
    prepared = _prepare(settings, start)
    steps = count_steps(resolved, len(prepared.train))
    last = _last_checkpoint(run, settings, printer)
    earlier = 0.0
    if last is not None:
        printer.line(f"resuming at step {last.name.removeprefix('checkpoint-')} of {steps.total}")
        earlier = float(checkpoint.read_numbers(last)["extra"].get("seconds", 0.0))
    training = assemble(resolved, run, steps, prepared, printer, attach if steps.total else None)
    if last is None:
        name = start or settings.model or tasks.find(settings.task).model or "built from its configuration"
        introduce(printer, training, name, data=dense is None)
    training.checkpoints.clock = lambda: earlier + time.monotonic() - began
    with explaining_write_errors(run.path):
        _train(training, last)
        return finish(training, deploy, dense)


def _prepare(settings: Settings, start: str | None) -> Prepared:
    task, request = tasks.find(settings.task), Request.from_settings(settings, start)
    with process_group.first_process_only() as first:  # its files in the datasets' cache are there for the others
        prepared = task.prepare(request) if first else None
    return prepared or task.prepare(request)


def _last_checkpoint(run: RunFolder, settings: Settings, printer: Printer) -> Path | None:
    """The checkpoint to resume from, if there is one. What was written after it is removed."""
    done = 0
    with process_group.first_process_only() as first:
        if first:
            last, problems = checkpoint.last_complete(run.checkpoints, asdict(settings))
            for text in problems:
                printer.line(f"passing over a checkpoint: {text}")
            done = 0 if last is None else int(last.name.removeprefix("checkpoint-"))
            checkpoint.discard(path for step, path in checkpoint.steps(run.checkpoints).items() if step > done)
            rewind_history(run.path, done)
    done = process_group.highest(done)
    return run.checkpoint(done) if done else None


def _train(training: Training, last: Path | None) -> None:
    """Train to the end, or until a gradient is not finite: that is a result too. `Interrupted` if a signal arrives."""
    trainer, stop = training.trainer, training.stop
    if not training.steps.total:
        prune_at_once(training)
        return
    with stop.handling_signals(), contextlib.closing(training.progress), contextlib.suppress(NothingToTrain):
        try:
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
        except NotFinite as error:
            what = str(error).split(";")[0]
            training.checkpoints.extra["not_finite"] = f"{what} at step {trainer.state.global_step + 1}"
            return
    if stop.signal is not None and trainer.state.global_step < training.steps.total:
        raise Interrupted(stop.signal, training.folder.path)
