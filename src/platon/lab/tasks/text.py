"""The task `text`: the user's own texts with labels.

The data is a file, of which a part is held out for validation, or a folder with train.* and validation.*. Labels are
words or whole numbers (classes), or numbers with a decimal point (regression).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from platon.lab.errors import UserError
from platon.lab.tasks import sequence
from platon.lab.tasks.dataset import Split, is_text, subset
from platon.lab.tasks.model import Pretrained
from platon.lab.tasks.task import Prepared, Request, Task
from platon.lab.tasks.text_file import read_splits

LABELS = ("label", "labels", "target", "class", "category")
Label = str | int


def prepare(task: Task, request: Request) -> Prepared:
    """Read `request.data`; evaluation alone takes the classes and their order from the model."""
    if request.data is None:
        raise UserError(f"the task {task.name} needs your data; give a file or a folder with --data")
    splits = read_splits(request.data, training=not request.evaluation_only)
    texts, label = choose_columns(next(iter(splits.values())).require(()), request)
    # Checked before a part is held out, so that a wrong row is named by its number in the file.
    for split in splits.values():
        split.require((*texts, label))
        for column in texts:
            _require_words(split, column)
    if request.evaluation_only:
        names = Pretrained(task, request).labels()
        splits = splits if names is None else _number_labels(splits, label, names, "the model does not know")
    else:
        names = _class_names(splits, label)
        splits = splits if names is None else _number_labels(splits, label, names, "training does not have")
    if "validation" not in splits:
        splits = _held_out(splits["train"], request.holdout)
    if request.evaluation_only:
        splits = {"validation": splits["validation"]}
    metrics = task.metrics if names else ("pearson", "spearman")
    return sequence.prepare(task, request, splits, texts, label, names, metrics)


def choose_columns(split: Split, request: Request) -> tuple[tuple[str, ...], str]:
    """The text columns and the label column: as asked, or the only ones that they can be."""
    columns = split.rows.column_names
    strings = [c for c in columns if is_text(split.rows.data.column(c).type)]
    which, has = f"which column of {split.where} is the", f"it has: {', '.join(columns)}"
    label = request.label_column
    if label is None:
        usual = [c for c in columns if c.lower() in LABELS and c not in (request.text_column, request.second_column)]
        other = [c for c in columns if c not in (request.text_column, request.second_column)]
        if len(usual) == 1:
            label = usual[0]
        elif len(columns) == 2 and len(strings) == 1:
            label = next(c for c in columns if c not in strings)
        elif request.text_column and len(other) == 1:
            label = other[0]
        else:
            raise UserError(f"{which} label? {_how_to_name('--label-column', request)}; {has}")
    first = request.text_column
    if first is None:
        left = [c for c in strings if c not in (label, request.second_column)]
        if len(left) != 1:
            raise UserError(f"{which} text? {_how_to_name('--text-column', request)}; {has}")
        first = left[0]
    return ((first, request.second_column) if request.second_column else (first,)), label


def _how_to_name(option: str, request: Request) -> str:
    return "name it as in the training data" if request.evaluation_only else f"give {option}"


def _require_words(split: Split, column: str) -> None:
    """Raise unless every row has a text that is more than blanks: a missing JSON value and an empty cell are alike."""
    split.require_text(column)
    empty = pc.equal(pc.utf8_trim_whitespace(split.rows.data.column(column)), "").to_numpy()
    if empty.any():
        row = int(np.argmax(empty))
        raise UserError(f"row {row} of {split.where} has no text in column {column!r}; fill it in or drop the row")


def _class_names(splits: Mapping[str, Split], label: str) -> tuple[str, ...] | None:
    """The classes of the training rows in order; None where labels are numbers with a decimal point (regression)."""
    kinds = [split.rows.data.column(label).type for split in splits.values()]
    if any(pa.types.is_floating(kind) for kind in kinds):
        for split in splits.values():
            split.require_numbers(label)
        return None
    found = {name: _labels_of(split, label) for name, split in splits.items()}
    # A CSV file whose labels happen to be all numbers may come with one that has words: then all are words.
    classes: set[Any] = set(map(str, found["train"])) if any(map(is_text, kinds)) else set(found["train"])
    if len(classes) < 2:
        where = splits["train"].where
        raise UserError(f"column {label!r} of {where} has the label {next(iter(classes))!r} only; two are needed")
    return tuple(map(str, sorted(classes)))


def _labels_of(split: Split, column: str) -> list[Label]:
    """The labels of a split; a UserError for a row without one."""
    values: list[Any] = split.rows.data.column(column).to_pylist()
    for row, value in enumerate(values):
        if value is None or value == "":
            raise UserError(f"row {row} of {split.where} has no label in column {column!r}; fill it in or drop the row")
        if not isinstance(value, str | int):
            kind = split.rows.data.column(column).type
            raise UserError(f"column {column!r} of {split.where} must hold labels, but holds {kind}")
    return values


def _number_labels(splits: Mapping[str, Split], label: str, names: tuple[str, ...], unknown: str) -> dict[str, Split]:
    """The splits with class numbers for labels; a UserError for a label that is not in `names`."""
    number = {name: index for index, name in enumerate(names)}
    numbered = {}
    for key, split in splits.items():
        values = _labels_of(split, label)
        for row, value in enumerate(values):
            if str(value) not in number:
                shown = ", ".join(map(repr, names[:8])) + (" …" if len(names) > 8 else "")
                raise UserError(f"row {row} of {split.where} has the label {value!r}, which {unknown}: {shown}")
        column = [number[str(value)] for value in values]
        numbered[key] = Split(split.rows.remove_columns(label).add_column(label, column), split.where)
    return numbered


def _held_out(split: Split, share: float) -> dict[str, Split]:
    """Training and validation rows; a share of 1 is all rows for validation."""
    rows = len(split.rows)
    if share == 1:
        return {"validation": split}
    if rows < 2:
        raise UserError(f"{split.where} has one row; none can be held out for validation")
    out = subset(rows, max(1, min(rows - 1, round(share * rows))))
    kept = np.setdiff1d(np.arange(rows), out)
    table = split.rows.data.table
    return {
        "train": Split(Dataset(table.take(kept)), f"the training part of {split.where}"),
        "validation": Split(Dataset(table.take(out)), f"the held-out part of {split.where}"),
    }
