"""Texts without labels, and pairs of texts that people have scored, for embedding models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset

from platon.lab.errors import UserError
from platon.lab.tasks.dataset import HubDataset, Split, is_text, subset
from platon.lab.tasks.task import Request
from platon.lab.tasks.text_file import read_lines, read_new, read_splits

TEXT = "text"  #: the column of a split of texts
FEWEST = 3  #: texts held out: with fewer there is no order of similarities to compare


def read_texts(request: Request) -> dict[str, Split]:
    """Training and validation texts: each text once, and none of the training among the validation."""
    if request.data is None:
        raise UserError(
            "the task embed needs texts; give a .txt file with a text in each line, or a table, with --data"
        )
    found = {name: _texts_of(split, request) for name, split in _read(request.data, request).items()}
    if "validation" in found:
        seen = set(found["validation"].rows[TEXT])
        if "train" in found:
            rows = Dataset.from_dict({TEXT: [text for text in found["train"].rows[TEXT] if text not in seen]})
            found["train"] = Split(rows, found["train"].where).require((TEXT,))
    else:
        found = _held_out(found["train"], request.holdout)
    if request.evaluation_only:
        found = {"validation": found["validation"]}
    held = len(found["validation"].rows)
    if held < FEWEST:
        where = found["validation"].where
        raise UserError(f"{where} has too few different texts to compare embeddings: {held}, and {FEWEST} are needed")
    return found


def read_new_texts(request: Request) -> Split:
    """Texts to embed, each row of the data in its order."""
    assert request.data is not None
    split = read_new(request.data).require(())
    column = request.text_column or only_text_column(split)
    split.require((column,)).require_text(column)
    return split if column == TEXT else Split(split.rows.rename_column(column, TEXT), split.where)


def _read(data: Path, request: Request) -> dict[str, Split]:
    """The splits of a file or a folder; .txt files hold one text in each line."""
    plain = {"train": data} if data.suffix.lower() == ".txt" and data.is_file() else {}
    if data.is_dir():
        plain = {name: data / f"{name}.txt" for name in ("train", "validation") if (data / f"{name}.txt").is_file()}
    if "train" not in plain and not (request.evaluation_only and plain):
        return read_splits(data, training=not request.evaluation_only)
    return {name: Split(read_lines(file), str(file)) for name, file in plain.items()}


def _texts_of(split: Split, request: Request) -> Split:
    """The split's different texts, in their order, without blanks around them."""
    split.require(())
    column = request.text_column or only_text_column(split)
    split.require((column,)).require_text(column)
    texts = list(dict.fromkeys(text.strip() for text in split.rows[column] if text.strip()))
    if not texts:
        raise UserError(f"{split.where} has no text that is more than blanks")
    if len(texts) == 1:
        said = "one text only" if len(split.rows) == 1 else f"the same text in all of its {len(split.rows)} rows"
        raise UserError(f"{split.where} has {said}; an embedding model learns from texts that differ")
    return Split(Dataset.from_dict({TEXT: texts}), split.where)


def only_text_column(split: Split) -> str:
    """The column of a split that holds text; a `UserError` where there is none, or more than one."""
    found = _text_columns(split)
    if len(found) != 1:
        has = ", ".join(split.rows.column_names)
        raise UserError(f"which column of {split.where} is the text? give --text-column; it has: {has}")
    return found[0]


def _text_columns(split: Split) -> list[str]:
    return [name for name in split.rows.column_names if is_text(split.rows.data.column(name).type)]


def _held_out(split: Split, share: float) -> dict[str, Split]:
    """A share of the texts, at least the fewest that can be compared; a share of 1 is all of them."""
    count = len(split.rows)
    if share == 1:
        return {"validation": split}
    if count <= FEWEST:
        raise UserError(
            f"{split.where} has {count} different texts; at least {FEWEST + 1} are needed, {FEWEST} of them held out"
        )
    out = subset(count, max(FEWEST, min(count - 1, round(share * count))))
    return {
        "train": Split(split.rows.select(np.setdiff1d(np.arange(count), out)), f"the training part of {split.where}"),
        "validation": Split(split.rows.select(out), f"the held-out part of {split.where}"),
    }


class Pairs:
    """Pairs of texts with a score of how similar they are, as people say.

    texts: all first texts, then all second ones.
    scores: one for each pair.
    """

    def __init__(self, split: Split, first: str, second: str, score: str) -> None:
        split.require((first, second, score))
        split.require_text(first)
        split.require_text(second)
        split.require_numbers(score)
        self.texts = [*split.rows[first], *split.rows[second]]
        self.scores = np.asarray(split.rows[score], dtype=np.float64)
        if len(self.scores) < 2 or np.ptp(self.scores) == 0:
            raise UserError(f"{split.where} needs pairs with different scores; it has {len(self.scores)} pairs")


def read_pairs(place: Path, rows: int | None) -> Pairs:
    """A table with two columns of text and one of numbers, or a folder with STS-B in the hub's layout."""
    if place.is_dir():
        found: Mapping[str, Split] = HubDataset("nyu-mll/glue", "stsb", ("glue/stsb", "stsb", ".")).read(
            place, {"validation": True}
        )
        return Pairs(found["validation"].take(rows), "sentence1", "sentence2", "label")
    split = read_splits(place, training=True)["train"].require(())
    texts = _text_columns(split)
    kinds = {name: split.rows.data.column(name).type for name in split.rows.column_names if name not in texts}
    numbers = [name for name, kind in kinds.items() if pa.types.is_floating(kind) or pa.types.is_integer(kind)]
    numbers = [name for name in numbers if name not in ("idx", "id", "index")]
    if len(texts) != 2 or len(numbers) != 1:
        has = ", ".join(split.rows.column_names)
        raise UserError(f"{place} must have two columns of text and one of numbers, the score; it has: {has}")
    return Pairs(split.take(rows), *texts, *numbers)
