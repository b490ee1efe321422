"""Finished runs opened again, to measure or export their models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from platon.lab import tasks
from platon.lab.arguments import evaluation_arguments
from platon.lab.claim import restore_settings
from platon.lab.folder import RunFolder
from platon.lab.record import read_record
from platon.lab.step_count import StepCounts
from platon.lab.tasks import Prepared, Request
from platon.lab.trainer import LabTrainer, Results


class FinishedRun(NamedTuple):
    """A finished run and its task.

    Args:
        record: what the run left.
        prepared: its task, with the run's own model and without training rows.
        measure: evaluates a model on the task.
    """

    record: dict[str, Any]
    prepared: Prepared
    measure: Callable[[Any], Results]


def evaluate_run(folder: Path, data: Path | None = None) -> tuple[dict[str, Any], Results]:
    """Measure the model of a finished run again, on its own data or on `data`; returns record and new results."""
    record, prepared, measure = reopen(folder, data)
    return record, measure(prepared.build())


def reopen(folder: Path, data: Path | None = None, eval_rows: int | None = None) -> FinishedRun:
    """Open a finished run.

    Args:
        folder: the run's.
        data: evaluate every row of this data instead, with the classes that the model knows.
        eval_rows: prepare so many rows of each evaluation split only.
    """
    run = RunFolder(folder)
    record = read_record(folder)
    settings = restore_settings(record["settings"], run.record).settings
    request = Request.from_settings(settings).for_evaluation(run.model, data)
    if eval_rows is not None:
        request = replace(request, eval_rows=eval_rows)
    prepared = tasks.find(settings.task).prepare(request)
    no_training = StepCounts(1, 0, 0, 0, 1, 1, 1)

    def measure(model: Any) -> Results:
        with tempfile.TemporaryDirectory() as place:
            arguments = evaluation_arguments(settings, prepared, Path(place))
            trainer = LabTrainer(settings, no_training, prepared, model=model, args=arguments)
            return trainer.measure(prepared.evaluation | prepared.test)

    return FinishedRun(record, prepared, measure)
