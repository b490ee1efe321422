"""Datasets from the hub, or from local parquet files in the hub's layout: both give the same rows and columns.

Nothing is written beside the user's files: local parquet is read into memory. Only files too large for that go through
the cache of `datasets`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset
from huggingface_hub.utils import logging as hub_logging

from platon.lab.errors import UserError, first_line
from platon.lab.tasks.path import existing_folder, listing

IN_MEMORY = 2**30  # bytes of parquet; CIFAR-100 has 0.15 GB, ImageNet 150


@dataclass(frozen=True)
class Split:
    """The rows of a split, and where they come from, for error messages."""

    rows: Dataset
    where: str

    def require(self, columns: Iterable[str]) -> Split:
        """The split, when it has rows and these columns."""
        for column in columns:
            if column not in self.rows.column_names:
                found = ", ".join(self.rows.column_names)
                raise UserError(f"{self.where} has no column {column!r}; it has: {found}")
        if not len(self.rows):
            raise UserError(f"{self.where} is empty; at least one row is needed")
        return self

    def require_text(self, column: str) -> None:
        """Raise unless every row has a string there."""
        values = self.rows.data.column(column)
        if not is_text(values.type):
            raise UserError(f"column {column!r} of {self.where} must hold text, but holds {values.type}")
        if values.null_count:
            row = int(np.argmax(values.is_null().to_numpy()))
            raise UserError(f"row {row} of {self.where} has no text in column {column!r}; fill it in or drop the row")

    def require_labels(self, column: str, classes: int) -> None:
        """Raise unless every label is one of 0 … classes - 1."""
        values = self.rows.data.column(column)
        if not pa.types.is_integer(values.type):
            raise UserError(f"column {column!r} of {self.where} must hold whole numbers, but holds {values.type}")
        labels = values.cast(pa.int64()).fill_null(-1).to_numpy()
        wrong = np.flatnonzero((labels < 0) | (labels >= classes))
        if len(wrong):
            row = int(wrong[0])
            raise UserError(
                f"row {row} of {self.where} has the label {values[row]}, which is not in 0 to {classes - 1}; "
                "correct it or drop the row (the hub's test splits have no labels: -1)"
            )

    def require_numbers(self, column: str) -> None:
        """Raise unless every label is a finite number."""
        values = self.rows.data.column(column)
        if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type)):
            raise UserError(f"column {column!r} of {self.where} must hold numbers, but holds {values.type}")
        wrong = np.flatnonzero(~np.isfinite(values.cast(pa.float64()).fill_null(float("nan")).to_numpy()))
        if len(wrong):
            row = int(wrong[0])
            raise UserError(
                f"row {row} of {self.where} has the label {values[row]}, not a number; correct it or drop the row"
            )

    def take(self, count: int | None) -> Split:
        """A random subset of so many rows in their order, the same every time."""
        if count is None or count >= len(self.rows):
            return self
        return replace(self, rows=self.rows.select(subset(len(self.rows), count)))


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub, and the folders of a local copy that may hold its files: the first with any is read."""

    hub: str
    config: str | None
    folders: tuple[str, ...]

    def read(self, data: Path | None, wanted: Mapping[str, bool]) -> dict[str, Split]:
        """The wanted splits (name -> must it exist?), from `data` or from the hub."""
        return self._from_hub(wanted) if data is None else self._from_files(data, wanted)

    def _from_hub(self, wanted: Mapping[str, bool]) -> dict[str, Split]:
        name = f"{self.hub} ({self.config})" if self.config else self.hub
        with reaching_hub(self.hub):
            found = datasets.load_dataset(self.hub, self.config)
        missing = [split for split, needed in wanted.items() if needed and split not in found]
        if missing:
            raise UserError(f"{name} on the hub has no split {missing[0]!r}; it has: {', '.join(found)}")
        return {split: Split(found[split], f"split {split!r} of {name}") for split in wanted if split in found}

    def _from_files(self, data: Path, wanted: Mapping[str, bool]) -> dict[str, Split]:
        existing_folder(data)
        places = [data / folder for folder in self.folders]
        place = next((p for p in places if any(parquet_files(p, split) for split in wanted)), None)
        if place is None:
            first = next(iter(wanted))
            raise UserError(
                f"{data} has no data for this task: expected {places[0] / first}.parquet; {data} holds: {listing(data)}"
            )
        found = {}
        for split, needed in wanted.items():
            files = parquet_files(place, split)
            if files:
                where = str(files[0] if len(files) == 1 else place / f"{split}-*.parquet")
                found[split] = Split(read_parquet(files), where)
            elif needed:
                raise UserError(f"{place} has no {split}.parquet; it holds: {listing(place)}")
        return found


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def parquet_files(folder: Path, split: str) -> list[Path]:
    """`train.parquet`, or the hub's own shards, `train-00000-of-00002.parquet` …"""
    single = folder / f"{split}.parquet"
    return [single] if single.is_file() else sorted(folder.glob(f"{split}-*.parquet"))


def read_parquet(files: list[Path]) -> Dataset:
    """All rows of these files."""
    for file in files:
        with _reading(file):
            pyarrow.parquet.read_metadata(file)
    if sum(file.stat().st_size for file in files) > IN_MEMORY:
        with quiet():
            return Dataset.from_parquet([str(file) for file in files])
    tables = []
    for file in files:
        with _reading(file):
            tables.append(pyarrow.parquet.read_table(file))
    return Dataset(pa.concat_tables(tables))


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        said = first_line(error)
        raise UserError(f"{file} is not a complete parquet file; copy or download it again ({said})") from error


def subset(rows: int, count: int) -> np.ndarray:
    """`count` of `rows` indices, ascending: the same on every machine, for numpy never changes RandomState."""
    return np.sort(np.random.RandomState(0).permutation(rows)[:count])


def digest(splits: Mapping[str, Split], columns: Iterable[str]) -> str:
    """SHA-256 of these columns' values; the files' format and shards make no difference."""
    columns = list(columns)
    sha = hashlib.sha256()
    for name, split in splits.items():
        sha.update(f"{name} {len(split.rows)}\n".encode())
        for batch in split.rows.select_columns(columns).with_format("arrow").iter(4096):
            values = batch.to_pydict()
            sha.update(json.dumps([values[c] for c in columns]).encode())
    return sha.hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars of `datasets`; preparing takes seconds."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


@contextmanager
def silent_hub() -> Iterator[None]:
    """Hide the warnings of the hub's client about retries; a final failure becomes one sentence."""
    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)


@contextmanager
def reaching_hub(name: str) -> Iterator[None]:
    """Turn the errors of loading a dataset from the hub into one sentence."""
    fetch = f"`hf download {name} --repo-type dataset --local-dir DIR`"
    try:
        with silent_hub():
            yield
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError(
            f"the hub gives no access to the dataset {name} ({first_line(error)}); accept its terms there and run "
            "`hf auth login`, or give local files with --data DIR"
        ) from error
    except ConnectionError as error:
        raise UserError(
            f"the hub cannot be reached for the dataset {name}; give local files with --data DIR, "
            f"or fetch them where there is a network: {fetch}"
        ) from error
