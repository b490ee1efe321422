"""The labels in a user's own table: what they are (classes, several in a row, numbers), and their numbers.

Labels with fractions are numbers, lists are several labels, everything else is classes: a spreadsheet that writes 5.0
and 1.0 for two grades means classes. Where it is not clear the user is asked; `--labels` decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import ClassLabel

from platon.lab.errors import UserError
from platon.lab.tasks.dataset import Split, is_text
from platon.lab.tasks.target import Classes, Numbers, Several, Target

MANY = 20  #: different whole numbers that may still be classes, whatever the number of rows
SEPARATORS = ("|", ";", ",")  #: of several labels in one cell


class Labelled(NamedTuple):
    """Splits whose column `LABEL` holds what the loss takes.

    Args:
        splits: by name.
        target: what the labels are.
        reason: why, in words.
    """

    splits: dict[str, Split]
    target: Target
    reason: str


LABEL = "platon_label"  #: the column that is added; no column of a user's has this name


def read_labels(
    splits: Mapping[str, Split], columns: tuple[str, ...], asked: str | None, known: Target | None
) -> Labelled:
    """Decide what the labels of these columns are, by the training rows or, where it is given, by a model's target."""
    if len(columns) > 1:
        return _from_columns(splits, columns, asked, known)
    column = columns[0]
    kind, reason = _kind(splits, column, asked) if known is None else (_KINDS[type(known)], "as the model says")
    labels, target = _READERS[kind](splits, column, known)
    return Labelled(_with(splits, labels), known or target, reason)


Found = tuple[dict[str, list[Any]], Target]  # split -> what the loss takes, and what it is


def _read_numbers(splits: Mapping[str, Split], column: str, known: Target | None) -> Found:
    for split in splits.values():
        split.require_numbers(column)
    values = {key: split.rows.data.column(column).to_pylist() for key, split in splits.items()}
    return {key: [float(value) for value in found] for key, found in values.items()}, Numbers()


def _read_several(splits: Mapping[str, Split], column: str, known: Target | None) -> Found:
    lists = {key: _lists_of(split, column) for key, split in splits.items()}
    names = _names(known) or tuple(sorted({one for row in lists["train"] for one in row}))
    if not names:
        raise UserError(f"column {column!r} of {splits['train'].where} has no label in any row; one is needed")
    found = {}
    for key, rows in lists.items():
        number = _Numbering(names, splits[key], known)
        found[key] = [number.ones(row, labels) for row, labels in enumerate(rows)]
    return found, Several(names)


def _read_classes(splits: Mapping[str, Split], column: str, known: Target | None) -> Found:
    values = {key: _classes_of(split, column) for key, split in splits.items()}
    if known is None:
        kinds = [split.rows.data.column(column).type for split in splits.values()]
        names = _class_names(values["train"], kinds, column, splits["train"].where)
    else:
        assert isinstance(known, Classes)
        names = known.names
    found = {}
    for key, rows in values.items():
        number = _Numbering(names, splits[key], known)
        found[key] = [number(row, value) for row, value in enumerate(rows)]
    return found, Classes(names)


_READERS = {"numbers": _read_numbers, "several": _read_several, "classes": _read_classes}
_KINDS: dict[type, str] = {Classes: "classes", Several: "several", Numbers: "numbers"}


def _names(known: Target | None) -> tuple[str, ...] | None:
    return getattr(known, "names", None)


def _kind(splits: Mapping[str, Split], column: str, asked: str | None) -> tuple[str, str]:
    """What the labels are, and why."""
    kinds = [split.rows.data.column(column).type for split in splits.values()]
    if asked is not None:
        return asked, "as --labels says"
    if any(pa.types.is_list(kind) or pa.types.is_large_list(kind) for kind in kinds):
        return "several", "each row has a list of labels"
    if not all(pa.types.is_floating(kind) or pa.types.is_integer(kind) for kind in kinds):
        return "classes", "each row has one word"
    values = np.array([one for split in splits.values() for one in split.rows.data.column(column).to_pylist()], float)
    different = np.unique(values[np.isfinite(values)])
    if (different != np.round(different)).any():
        return "numbers", "labels have fractions; --labels classes makes each different number a class"
    if len(different) > MANY and 5 * len(different) > len(values):
        raise UserError(
            f"column {column!r} of {splits['train'].where} has {len(different)} different whole numbers in "
            f"{len(values)} rows; say what they are: --labels numbers (regression) or --labels classes"
        )
    return "classes", "labels are whole numbers; --labels numbers makes it a regression"


def _classes_of(split: Split, column: str) -> list[str | int]:
    """The classes of a split's rows; a UserError for a row without one. 5.0 is the class 5."""
    kind = split.rows.data.column(column).type
    values: list[Any] = split.rows.data.column(column).to_pylist()
    for row, value in enumerate(values):
        if value is None or value == "" or value != value:
            raise UserError(f"row {row} of {split.where} has no label in column {column!r}; fill it in or drop the row")
        if isinstance(value, float):
            values[row] = int(value) if value.is_integer() else str(value)
        elif not isinstance(value, str | int):
            raise UserError(f"column {column!r} of {split.where} must hold labels, but holds {kind}")
    return values


def _class_names(values: Sequence[Any], kinds: Sequence[Any], column: str, where: str) -> tuple[str, ...]:
    # A CSV file whose labels happen to be all numbers may come with one that has words: then all are words.
    words = any(map(is_text, kinds)) or any(isinstance(value, str) for value in values)
    classes: set[Any] = set(map(str, values)) if words else set(values)
    if len(classes) < 2:
        raise UserError(f"column {column!r} of {where} has the label {next(iter(classes))!r} only; two are needed")
    return tuple(map(str, sorted(classes)))


class _Numbering:
    """The numbers of a split's labels; a UserError for one that is not among `names`.

    A model without names of its own calls its classes LABEL_0, …: then the label 0 is the first, too.
    """

    def __init__(self, names: Sequence[str], split: Split, known: Target | None) -> None:
        self.names, self.split = names, split
        self.unknown = "training does not have" if known is None else "the model does not know"
        self.numbers = {name: number for number, name in enumerate(names)}
        if all(name == f"LABEL_{number}" for name, number in self.numbers.items()):
            self.numbers |= {str(number): number for number in range(len(names))}

    def __call__(self, row: int, label: Any) -> int:
        found = self.numbers.get(str(label))
        if found is None:
            shown = ", ".join(map(repr, self.names[:8])) + (" …" if len(self.names) > 8 else "")
            raise UserError(f"row {row} of {self.split.where} has the label {label!r}, which {self.unknown}: {shown}")
        return found

    def ones(self, row: int, labels: Sequence[Any]) -> list[float]:
        """1 for each of these labels, 0 for the others."""
        ones = [0.0] * len(self.names)
        for label in labels:
            ones[self(row, label)] = 1.0
        return ones


def _lists_of(split: Split, column: str) -> list[list[str]]:
    """Several labels of each row: from lists, from cells with JSON lists, or from words with a sign between them."""
    values: list[Any] = split.rows.data.column(column).to_pylist()
    if is_text(split.rows.data.column(column).type):
        cells = [value or "" for value in values]
        if all(cell.startswith("[") for cell in cells):
            try:
                values = [json.loads(cell) for cell in cells]
            except ValueError:
                raise UserError(f"column {column!r} of {split.where} has a cell that is no JSON list") from None
        else:
            sign = next((sign for sign in SEPARATORS if any(sign in cell for cell in cells)), SEPARATORS[0])
            values = [[one.strip() for one in cell.split(sign) if one.strip()] for cell in cells]
    feature = getattr(split.rows.features[column], "feature", None)
    for row, value in enumerate(values):
        if not isinstance(value, list) or not all(isinstance(one, str | int) for one in value):
            raise UserError(f"row {row} of {split.where} needs a list of labels in column {column!r}, got {value!r}")
        values[row] = [feature.int2str(one) if isinstance(feature, ClassLabel) else str(one) for one in value]
    return values


def _from_columns(
    splits: Mapping[str, Split], columns: tuple[str, ...], asked: str | None, known: Target | None
) -> Labelled:
    """Several columns with 0 or 1 each."""
    if asked not in (None, "several"):
        raise UserError(f"--label-column names {len(columns)} columns, so a row has several labels, not {asked}")
    if known is not None and (not isinstance(known, Several) or set(known.names) != set(columns)):
        raise UserError(f"the model does not know these labels: {', '.join(columns)}; it has: {_names(known)}")
    names = columns if known is None else known.names
    found = {}
    for key, split in splits.items():
        values = [split.rows.data.column(name).to_pylist() for name in names]
        for name, column in zip(names, values, strict=True):
            wrong = next((row for row, value in enumerate(column) if value not in (0, 1)), None)
            if wrong is not None:
                raise UserError(f"row {wrong} of {split.where} needs 0 or 1 in column {name!r}, got {column[wrong]!r}")
        found[key] = [[float(one) for one in row] for row in zip(*values, strict=True)]
    return Labelled(_with(splits, found), known or Several(names), "one column for each label")


def _with(splits: Mapping[str, Split], labels: Mapping[str, list[Any]]) -> dict[str, Split]:
    """The splits with these labels in the column `LABEL`."""
    return {name: Split(split.rows.add_column(LABEL, labels[name]), split.where) for name, split in splits.items()}
