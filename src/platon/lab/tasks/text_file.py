"""Tables of texts in the user's own files: CSV, TSV, JSON, JSON lines or parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from platon.lab.errors import UserError
from platon.lab.tasks.dataset import Split, first_line, read_parquet
from platon.lab.tasks.path import existing_data, listing

VALIDATION = ("validation", "valid", "val", "dev", "test")


Readers = Mapping[str, Callable[[Path], Dataset]]  # suffix -> reader


def read_splits(data: Path, *, training: bool, readers: Readers | None = None) -> dict[str, Split]:
    """`data` is one file, called "train" here, or a folder with train.* and, if there is one, validation.*.

    Without `training`, a folder's train.* is read only where there is no validation.*.
    """
    readers = readers or READERS
    existing_data(data)
    if data.is_file():
        return {"train": Split(read_file(data, readers), str(data))}
    files = {"train": _file_of(data, ("train",), readers), "validation": _file_of(data, VALIDATION, readers)}
    if files["train"] is None and (training or files["validation"] is None):
        raise UserError(f"{data} has no train{'|'.join(readers)}; it holds: {listing(data)}")
    if not training and files["validation"] is not None:
        del files["train"]
    return {name: Split(read_file(file, readers), str(file)) for name, file in files.items() if file is not None}


def read_new(data: Path) -> Split:
    """The rows of a file that a model is to answer: a table, or a .txt file with a text in each line."""
    existing_data(data)
    if data.is_dir():
        raise UserError(f"{data} is a folder; give a file, one of .txt, {', '.join(READERS)}")
    reader = read_lines if data.suffix.lower() == ".txt" else read_file
    return Split(reader(data), str(data))


def read_lines(file: Path) -> Dataset:
    """The lines of a text file that are more than blanks, in the column "text"."""
    with parsing(file):
        text = file.read_text(encoding="utf-8-sig")
    # Not splitlines(): a text may hold characters that it splits at, such as U+2028.
    return Dataset.from_dict({"text": pa.array([line for line in text.split("\n") if line.strip()], pa.string())})


def _file_of(folder: Path, stems: tuple[str, ...], readers: Readers) -> Path | None:
    """The file of a split under the first of these names that there is."""
    files = [f for stem in stems for f in sorted(folder.glob(f"{stem}.*")) if f.suffix.lower() in readers]
    if len({f.stem for f in files}) < len(files):
        raise UserError(f"{folder} has {files[0].name} and {files[1].name}; keep one of them")
    return files[0] if files else None


def read_file(file: Path, readers: Readers | None = None) -> Dataset:
    """The rows of one file, by the reader of its suffix."""
    readers = readers or READERS
    existing_data(file)
    if file.suffix.lower() not in readers:
        raise UserError(f"{file} is of no known kind; give one of {', '.join(readers)}")
    with parsing(file):
        return readers[file.suffix.lower()](file)


@contextmanager
def parsing(file: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read into one sentence."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except UserError:
        raise
    except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}") from error


def _read_csv(file: Path) -> Dataset:
    """Cells are kept as they are written: "None" is a text. A column becomes numbers if all of its cells are."""
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
    """A list of rows, or one row in each line."""
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return _from_rows(json.loads(text), file)
    rows = []
    # Not splitlines(): it also splits at characters that JSON strings may hold as they are, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
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
