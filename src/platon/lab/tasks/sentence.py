"""Rows of words and tags in the user's own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import ClassLabel

from platon.lab.errors import UserError
from platon.lab.tasks import conll, dataset
from platon.lab.tasks.dataset import Split, is_text
from platon.lab.tasks.sequence import TEST
from platon.lab.tasks.task import Request
from platon.lab.tasks.text_file import READERS, read_file, read_new, read_splits

_READERS = {suffix: reader for suffix, reader in READERS.items() if suffix not in (".csv", ".tsv")}
_READERS |= dict.fromkeys(conll.SUFFIXES, conll.read_conll)
_WORDS, _TAGS = ("words", "tokens", "text"), ("tags", "ner_tags", "pos_tags", "labels", "label", "ner")


def read_labelled(request: Request) -> dict[str, Split]:
    assert request.data is not None
    splits = read_splits(request.data, training=not request.evaluation_only, readers=_READERS)
    if request.test is not None:
        splits[TEST] = Split(read_file(Path(request.test), _READERS), request.test)
    return splits


def read_unlabelled(request: Request) -> Split:
    """New sentences. A .txt file has plain texts here, a sentence in each line."""
    data = request.data
    assert data is not None
    is_conll = data.suffix.lower() in conll.SUFFIXES and data.suffix.lower() != ".txt"
    return Split(read_file(data, _READERS), str(data)) if is_conll else read_new(data)


@dataclass(frozen=True)
class Sentences:
    """A split, its words and, where they are known, its tags: a list of strings for each row."""

    split: Split
    words: Sequence[Sequence[str]]
    tags: Sequence[Sequence[str]]

    @classmethod
    def of(cls, split: Split, request: Request) -> Sentences:
        """Read and check the columns."""
        split.require(())
        column = _column(split, request.text_column, _WORDS, "words", "--text-column", request)
        words = _lists(split, column) if request.labelled else _lists_or_texts(split, column)
        tags: list[list[str]] = []
        if request.labelled:
            tags = _lists(split, _column(split, request.label_column, _TAGS, "tags", "--label-column", request))
        for row, (some, their) in enumerate(zip(words, tags or words, strict=True)):
            if not some:
                raise UserError(f"row {row} of {split.where} has no words; drop the row")
            if len(some) != len(their):
                raise UserError(f"row {row} of {split.where} has {len(some)} words and {len(their)} tags")
        return cls(split, words, tags)

    def require(self, names: Sequence[str], unknown: str) -> None:
        """Raise unless every tag is one of these."""
        known = set(names)
        for row, tags in enumerate(self.tags):
            wrong = next((tag for tag in tags if tag not in known), None)
            if wrong is not None:
                shown = ", ".join(map(repr, names[:8])) + (" …" if len(names) > 8 else "")
                raise UserError(f"row {row} of {self.split.where} has the tag {wrong!r}, which {unknown}: {shown}")

    def take(self, count: int | None) -> Sentences:
        """A random subset of so many rows in their order, the same every time."""
        if count is None or count >= len(self.words):
            return self
        rows = dataset.subset(len(self.words), count).tolist()
        tags = [self.tags[row] for row in rows] if self.tags else []
        return Sentences(self.split.take(count), [self.words[row] for row in rows], tags)


def _column(split: Split, asked: str | None, usual: Sequence[str], what: str, option: str, request: Request) -> str:
    """The column that is asked for, or the only one with a usual name."""
    columns = split.rows.column_names
    if asked is not None:
        split.require((asked,))
        return asked
    found = [name for name in columns if name.lower() in usual]
    if len(found) != 1:
        how = "name it as in the training data" if request.evaluation_only else f"give {option}"
        raise UserError(f"which column of {split.where} has the {what}? {how}; it has: {', '.join(columns)}")
    return found[0]


def _lists_or_texts(split: Split, column: str) -> list[list[str]]:
    """A list of words for each row; of a plain text, what blanks separate."""
    if not is_text(split.rows.data.column(column).type):
        return _lists(split, column)
    return [str(text or "").split() for text in split.rows[column]]


def _lists(split: Split, column: str) -> list[list[str]]:
    """A list of strings for each row; numbers of the hub's classes become their names."""
    kind = split.rows.data.column(column).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise UserError(f"column {column!r} of {split.where} must hold a list in each row, but holds {kind}")
    feature = getattr(split.rows.features[column], "feature", None)
    values: list[Any] = split.rows.data.column(column).to_pylist()
    for row, value in enumerate(values):
        if value is None or any(one is None or not isinstance(one, str | int) for one in value):
            raise UserError(f"row {row} of {split.where} needs a list of strings in column {column!r}, got {value!r}")
        values[row] = [feature.int2str(one) if isinstance(feature, ClassLabel) else str(one) for one in value]
    return values
