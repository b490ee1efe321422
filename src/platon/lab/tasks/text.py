"""The task `text`: the user's own texts with labels.

The data is a file, of which a part is held out for validation, or a folder with train.* and validation.*. What the
labels are (classes, several in a row, or numbers) is decided in `label`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from platon.lab.errors import UserError
from platon.lab.tasks import sequence
from platon.lab.tasks.dataset import Split, is_text
from platon.lab.tasks.holdout import hold_out
from platon.lab.tasks.label import LABEL, read_labels
from platon.lab.tasks.model import Pretrained
from platon.lab.tasks.path import split_names
from platon.lab.tasks.target import Target, target_of
from platon.lab.tasks.task import NEW, Prepared, Request, Task
from platon.lab.tasks.text_file import read_file, read_new, read_splits

LABELS = ("label", "labels", "target", "class", "category")


def prepare(task: Task, request: Request) -> Prepared:
    """Read `request.data`; evaluation alone takes the classes and their order from the model."""
    if request.data is None:
        raise UserError(f"the task {task.name} needs your data; give a file or a folder with --data")
    known = target_of(Pretrained(task, request)) if request.evaluation_only else None
    if not request.labelled:
        assert known is not None
        return _prepare_new(task, request, known)
    splits = read_all(request)
    texts, labels = choose_columns(next(iter(splits.values())).require(()), request)
    # Checked before a part is held out, so that a wrong row is named by its number in the file.
    for split in splits.values():
        split.require((*texts, *labels))
        for column in texts:
            require_words(split, column)
    splits, target, reason = read_labels(splits, labels, request.labels, known)
    if "validation" not in splits:
        values = splits["train"].rows[LABEL][:]
        held = hold_out(splits.pop("train"), request.holdout, target.strata(values) if request.stratify else None)
        splits = held | splits
    if request.evaluation_only:
        splits.pop("train", None)
    prepared = sequence.prepare(task, request, splits, texts, LABEL, target)
    told = f"{request.data}: {' and '.join(texts)} → {', '.join(labels)}"
    prepared.about[0:0] = [("data", told), ("labels", f"{target.title()}: {reason}")]
    return prepared


def _prepare_new(task: Task, request: Request, target: Target) -> Prepared:
    """New rows without labels."""
    assert request.data is not None
    split = read_new(request.data).require(())
    if split.rows.num_columns == 1:  # a text in each line
        texts: tuple[str, ...] = (split.rows.column_names[0],)
    else:
        texts = choose_texts(split, request, tuple(c for c in split.rows.column_names if c.lower() in LABELS))
    for column in texts:
        split.require((column,))
        require_words(split, column)
    return sequence.prepare(task, request, {NEW: split}, texts, LABEL, target)


def read_all(request: Request) -> dict[str, Split]:
    """Training, validation and test rows, as far as there are files for them."""
    assert request.data is not None
    splits = read_splits(request.data, training=not request.evaluation_only)
    if request.test is not None:
        splits[sequence.TEST] = Split(read_file(Path(request.test)), request.test)
    return splits


def choose_columns(split: Split, request: Request) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The text columns and the label columns: as asked, or the only ones that they can be."""
    columns = split.rows.column_names
    strings = _strings(split)
    labels = split_names(request.label_column, columns)
    if not labels:
        usual = [c for c in columns if c.lower() in LABELS and c not in (request.text_column, request.second_column)]
        other = [c for c in columns if c not in (request.text_column, request.second_column)]
        if len(usual) == 1:
            labels = (usual[0],)
        elif len(columns) == 2 and len(strings) == 1:
            labels = tuple(c for c in columns if c not in strings)
        elif request.text_column and len(other) == 1:
            labels = (other[0],)
        else:
            raise UserError(_question(split, "label", "--label-column", request))
    return choose_texts(split, request, labels), labels


def choose_texts(split: Split, request: Request, labels: tuple[str, ...]) -> tuple[str, ...]:
    """The text columns: as asked, or the only one that it can be."""
    first = request.text_column
    if first is None:
        left = [c for c in _strings(split) if c not in (*labels, request.label_column, request.second_column)]
        if len(left) != 1:
            raise UserError(_question(split, "text", "--text-column", request))
        first = left[0]
    return (first, request.second_column) if request.second_column else (first,)


def _strings(split: Split) -> list[str]:
    return [c for c in split.rows.column_names if is_text(split.rows.data.column(c).type)]


def _question(split: Split, what: str, option: str, request: Request) -> str:
    how = "name it as in the training data" if request.evaluation_only else f"give {option}"
    return f"which column of {split.where} is the {what}? {how}; it has: {', '.join(split.rows.column_names)}"


def require_words(split: Split, column: str) -> None:
    """Raise unless every row has a text that is more than blanks: a missing JSON value and an empty cell are alike."""
    split.require_text(column)
    empty = pc.equal(pc.utf8_trim_whitespace(split.rows.data.column(column)), "").to_numpy()
    if empty.any():
        row = int(np.argmax(empty))
        raise UserError(f"row {row} of {split.where} has no text in column {column!r}; fill it in or drop the row")
