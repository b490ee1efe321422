"""The user's own texts with labels: CSV, TSV, JSON, JSON lines or parquet.

A file, of which a part is held out for validation, or a folder with train.* and validation.*. Labels are words or whole
numbers (classes), or numbers with a decimal point (regression).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from platon.lab.errors import UserError, nearest
from platon.lab.tasks import sequence
from platon.lab.tasks.source import Split, first_line, is_text, listing, read_parquet, subset
from platon.lab.tasks.task import Prepared, Request, Task

VALIDATION = ("validation", "valid", "val", "dev", "test")
LABELS = ("label", "labels", "target", "class", "category")


def prepare(task: Task, request: Request) -> Prepared:
    """The texts in `request.data`."""
    if request.data is None:
        raise UserError(f"the task {task.name} needs your data; give a file or a folder with --data")
    splits = _read(request.data)
    texts, label = choose_columns(splits["train"].require(()), request)
    # Checked before a part is held out, so that a wrong row is named by its number in the file.
    for split in splits.values():
        split.require((*texts, label))
        for column in texts:
            split.require_text(column)
    splits, names = _labelled(splits, label)
    if "validation" not in splits:
        splits = _held_out(splits["train"], request.holdout)
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
            raise UserError(f"{which} label? give --label-column; {has}")
    first = request.text_column
    if first is None:
        left = [c for c in strings if c not in (label, request.second_column)]
        if len(left) != 1:
            raise UserError(f"{which} text? give --text-column; {has}")
        first = left[0]
    return ((first, request.second_column) if request.second_column else (first,)), label


def _read(data: Path) -> dict[str, Split]:
    if data.is_file():
        return {"train": Split(_read_file(data), str(data))}
    if not data.is_dir():
        known = [p.name for p in data.parent.iterdir()] if data.parent.is_dir() else []
        raise UserError(f"{data} does not exist{nearest(data.name, known)}")
    found = {}
    for name, stems in {"train": ("train",), "validation": VALIDATION}.items():
        files = [f for stem in stems for f in sorted(data.glob(f"{stem}.*")) if f.suffix.lower() in READERS]
        if len({f.stem for f in files}) < len(files):
            raise UserError(f"{data} has {files[0].name} and {files[1].name}; keep one of them")
        if files:
            found[name] = Split(_read_file(files[0]), str(files[0]))
    if "train" not in found:
        raise UserError(f"{data} has no train{'|'.join(READERS)}; it holds: {listing(data)}")
    return found


def _read_file(file: Path) -> Dataset:
    if file.suffix.lower() not in READERS:
        raise UserError(f"{file} is of no known kind; give one of {', '.join(READERS)}")
    with _parsing(file):
        return READERS[file.suffix.lower()](file)


@contextmanager
def _parsing(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except UserError:
        raise
    except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}") from error


def _read_csv(file: Path) -> Dataset:
    """All cells as they are written: the word "None" is a text, not a gap. Columns of numbers become numbers."""
    csv.field_size_limit(2**31 - 1)  # the default refuses texts of more than 128 kB
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.reader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
        header = next(reader, None)
        if not header:
            raise UserError(f"{file} is empty; the first line must name the columns")
        rows = []
        for row in reader:
            if len(row) != len(header) and row:
                where = f"{file}, line {reader.line_num}"
                raise UserError(f"{where}, has {len(row)} cells, but the header has {len(header)}; quote the texts")
            if row:
                rows.append(row)
    return Dataset.from_dict({name: _numbers([row[i] for row in rows]) for i, name in enumerate(header)})


def _numbers(cells: list[str]) -> list[Any]:
    for kind in (int, float):
        try:
            return [kind(cell) for cell in cells]
        except ValueError:
            continue
    return cells


def _read_json(file: Path) -> Dataset:
    """A list of rows, or one row a line."""
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return _from_rows(json.loads(text), file)
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(f"{file}, line {number}, is not JSON: {error.msg}") from error
    return _from_rows(rows, file)


def _from_rows(rows: list[Any], file: Path) -> Dataset:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"row {number} of {file} is no object with columns, but {type(row).__name__}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})


READERS: dict[str, Callable[[Path], Dataset]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": lambda file: read_parquet([file]),
}


def _labelled(splits: dict[str, Split], label: str) -> tuple[dict[str, Split], tuple[str, ...] | None]:
    """Labels as class numbers, and the classes' names in order; for regression the splits as they are, and None."""
    kinds = [split.rows.data.column(label).type for split in splits.values()]
    if any(pa.types.is_floating(kind) for kind in kinds):
        for split in splits.values():
            split.require_numbers(label)
        return splits, None
    values = {name: split.rows.data.column(label).to_pylist() for name, split in splits.items()}
    for name, split in splits.items():
        for row, value in enumerate(values[name]):
            if value is None or value == "":
                raise UserError(
                    f"row {row} of {split.where} has no label in column {label!r}; fill it in or drop the row"
                )
            if not isinstance(value, str | int):
                raise UserError(f"column {label!r} of {split.where} must hold labels, but holds {kinds[0]}")
    if any(is_text(kind) for kind in kinds):  # a CSV file whose labels happen to be all numbers meets one with words
        values = {name: list(map(str, column)) for name, column in values.items()}
    known = sorted(set(values["train"]))
    if len(known) < 2:
        raise UserError(f"column {label!r} of {splits['train'].where} has the label {known[0]!r} only; two are needed")
    number = {value: index for index, value in enumerate(known)}
    for name, split in splits.items():
        for row, value in enumerate(values[name]):
            if value not in number:
                shown = ", ".join(map(repr, known[:8])) + (" …" if len(known) > 8 else "")
                raise UserError(
                    f"row {row} of {split.where} has the label {value!r}, which training does not have: {shown}"
                )
    numbered = {
        name: Split(
            split.rows.remove_columns(label).add_column(label, [number[v] for v in values[name]]),
            split.where,
        )
        for name, split in splits.items()
    }
    return numbered, tuple(map(str, known))


def _held_out(split: Split, share: float) -> dict[str, Split]:
    rows = len(split.rows)
    if rows < 2:
        raise UserError(f"{split.where} has one row; none can be held out for validation")
    out = subset(rows, max(1, min(rows - 1, round(share * rows))))
    kept = np.setdiff1d(np.arange(rows), out)
    table = split.rows.data.table
    return {
        "train": Split(Dataset(table.take(kept)), f"the training part of {split.where}"),
        "validation": Split(Dataset(table.take(out)), f"the held-out part of {split.where}"),
    }
