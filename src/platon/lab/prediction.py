"""The answers of a finished run's model to new rows, through the fastest form of the model that the run has."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from platon.lab import tasks
from platon.lab.arguments import evaluation_arguments
from platon.lab.claim import restore_settings
from platon.lab.errors import UserError
from platon.lab.folder import RunFolder
from platon.lab.record import read_record
from platon.lab.step_count import StepCounts
from platon.lab.tasks import Request
from platon.lab.tasks.answer import Answer
from platon.lab.tasks.task import NEW
from platon.lab.trainer import LabTrainer

FORMS = ("fast", "compact", "model")  #: folders of a run, the fastest first


@dataclass(frozen=True)
class Predictions:
    """What a model says about new rows.

    Args:
        rows: the rows as they were read, by column.
        answers: one for each row, in the same order.
        form: the folder of the model.
        seconds: of computing the answers, without loading the model and reading the rows.
    """

    rows: Any
    answers: list[Answer]
    form: Path
    seconds: float

    def nested(self) -> Iterator[dict[str, Any]]:
        """A row and its answer, for JSON lines."""
        for row, answer in zip(self.rows, self.answers, strict=True):
            yield {**row, **answer.nested()}

    def flat(self) -> Iterator[dict[str, Any]]:
        """A row and its answer, for a table."""
        for row, answer in zip(self.rows, self.answers, strict=True):
            yield {**row, **answer.flat()}


def predict(run: Path, data: Path, form: str | None = None, **columns: str | None) -> Predictions:
    """Answer every row of `data`.

    Args:
        run: the folder of a finished run.
        data: a file with the columns of the training data, without labels; for images, a file or a folder.
        form: "fast", "compact" or "model"; the first of them that the run has by default.
        columns: `text_column` and `second_column`, where `data` has other names than the training data.
    """
    folder, record = RunFolder(run), read_record(run)
    settings = restore_settings(record["settings"], folder.record).settings
    place = find_form(run, form)
    request = Request.from_settings(settings).for_prediction(place, data)
    changed: dict[str, Any] = {name: column for name, column in columns.items() if column is not None}
    request = replace(request, **changed)
    prepared = tasks.find(settings.task).prepare(request)
    assert prepared.answers is not None, "Task.predicts says so"
    no_training = StepCounts(1, 0, 0, 0, 1, 1, 1)
    with tempfile.TemporaryDirectory() as temporary:
        model = prepared.build()
        arguments = evaluation_arguments(settings, prepared, Path(temporary), model)
        trainer = LabTrainer(settings, no_training, prepared, model=model, args=arguments)
        began = time.monotonic()
        outputs, _ = trainer.outputs(NEW, prepared.evaluation[NEW])
    return Predictions(prepared.source, prepared.answers(outputs), place, time.monotonic() - began)


def find_form(run: Path, form: str | None = None) -> Path:
    """The folder of the model in this form, or in the fastest one that the run has."""
    there = [name for name in FORMS if (run / name).is_dir()]
    if form is not None and form not in there:
        raise UserError(f"the run {str(run)!r} has no {form}/; it has: {', '.join(there) or 'no model'}")
    if not there:
        raise UserError(f"the run {str(run)!r} has no model: {', '.join(FORMS)} are missing")
    return run / (form or there[0])
