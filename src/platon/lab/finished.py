"""Trained models opened again, to measure or export them: those of finished runs, and any others."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from platon.lab import tasks
from platon.lab.arguments import evaluation_arguments
from platon.lab.claim import restore_settings
from platon.lab.errors import UserError
from platon.lab.file import read_json
from platon.lab.folder import RunFolder
from platon.lab.settings import Settings, resolve
from platon.lab.source import CONFIG, Source
from platon.lab.step_count import StepCounts
from platon.lab.tasks import Prepared, Request
from platon.lab.teacher import starts_at_random
from platon.lab.trainer import LabTrainer, Results


class Opened(NamedTuple):
    """A trained model and its task.

    Args:
        record: what its run left; None for a model that is no run's.
        prepared: its task, with the trained model and without training rows.
        measure: evaluates a model on the task.
    """

    record: dict[str, Any] | None
    prepared: Prepared
    measure: Callable[[Any], Results]


def evaluate_run(folder: Path, data: Path | None = None) -> tuple[dict[str, Any], Results]:
    """Measure the model of a finished run again, on its own data or on `data`; returns record and new results."""
    record, prepared, measure = reopen(folder, data)
    assert record is not None
    return record, measure(prepared.build())


def reopen(folder: Path, data: Path | None = None, eval_rows: int | None = None) -> Opened:
    """Open a finished run.

    Args:
        folder: the run's.
        data: evaluate every row of this data instead, with the classes that the model knows.
        eval_rows: prepare so many rows of each evaluation split only.
    """
    run = RunFolder(folder)
    return open_source(Source(str(folder), run.model, run), data=data, eval_rows=eval_rows)


def open_source(
    source: Source,
    task: str | None = None,
    data: Path | None = None,
    eval_rows: int | None = None,
    in_float32: bool = False,
    **columns: Any,
) -> Opened:
    """Open a model for a task.

    Args:
        source: the model.
        task: the task's name; a run knows its own.
        data: evaluate every row of this data; a run has its own, and some tasks are on the hub.
        eval_rows: prepare so many rows of each evaluation split only.
        in_float32: not in the precision that the run was trained in. Mixed precision changes the `forward` of the model
            that is evaluated, so this is for those who time or export the model next.
        columns: settings that name the columns of the data, such as `text_column`.
    """
    record = source.record if task is None else None
    if record is not None:
        assert source.run is not None
        settings = restore_settings(record["settings"], source.run.record).settings
    elif task is None:
        raise UserError(f"{source.name!r} is no run, so it does not say its task; give --task (`platon list tasks`)")
    else:
        settings = resolve(flags={"task": task, "model": str(source.folder)}).settings
    given = {name: value for name, value in columns.items() if value is not None}
    request = replace(Request.from_settings(settings), **given).for_evaluation(source.folder, data)
    if eval_rows is not None:
        request = replace(request, eval_rows=eval_rows, test=None)
    prepared = tasks.find(settings.task).prepare(request)
    if record is None:
        _check_fit(source, settings.task, prepared)
    if in_float32:
        settings = replace(settings, precision="float32")
    return Opened(record, prepared, _evaluation(settings, prepared))


def _evaluation(settings: Settings, prepared: Prepared) -> Callable[[Any], Results]:
    """A function that evaluates a model on the task."""
    no_training = StepCounts(1, 0, 0, 0, 1, 1, 1)

    def measure(model: Any) -> Results:
        model = prepared.adapt(model)
        with tempfile.TemporaryDirectory() as place:
            arguments = evaluation_arguments(settings, prepared, Path(place), model)
            trainer = LabTrainer(settings, no_training, prepared, model=model, args=arguments)
            return trainer.measure(prepared.evaluation | prepared.test)

    return measure


def _check_fit(source: Source, task: str, prepared: Prepared) -> None:
    """Refuse a model that nobody has trained for the task, or that numbers the task's classes in another order."""
    if starts_at_random(prepared):
        raise UserError(
            f"the model {source.name!r} is not trained for {task}: part of it starts from random values; train it "
            f"first: platon prune --task {task} --model {source.name}"
        )
    theirs = read_json(source.folder / CONFIG).get("id2label") or {}
    ours: dict[int, str] = getattr(prepared.build().config, "id2label", {})
    names = {int(number): str(name).lower() for number, name in theirs.items()}
    wanted = {number: name.lower() for number, name in ours.items()}
    if set(names.values()) == set(wanted.values()) and names != wanted:
        raise UserError(
            f"the model {source.name!r} numbers its classes {', '.join(names[n] for n in sorted(names))}, and {task} "
            f"{', '.join(wanted[n] for n in sorted(wanted))}; evaluate it with --task text and a file of your own"
        )
