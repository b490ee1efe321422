"""Documents for language models: texts from .txt, .raw, .json, .jsonl, .parquet or .csv files, or a folder of them.

A text file is one document, and so is a row of a table. Rows that all end in a line break, or are empty, are lines of
one text: so WikiText is the same document in the hub's layout and as `wiki.test.raw`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from platon.lab.errors import UserError
from platon.lab.tasks.corpus import only_text_column
from platon.lab.tasks.dataset import Split, subset
from platon.lab.tasks.path import existing_data, listing
from platon.lab.tasks.task import Request
from platon.lab.tasks.text_file import READERS, parsing, read_file

PLAIN = (".txt", ".raw")
# train.txt, validation.jsonl, wiki.test.raw, test-00000-of-00001.parquet
_NAMED = re.compile(r"(?:wiki\.)?(train|validation|valid|val|dev|test)(?:-\d+-of-\d+)?")
_SPLITS = {"valid": "validation", "val": "validation", "dev": "validation"}


@dataclass(frozen=True)
class Documents:
    """The different texts of a split, in their order, and where they come from, for error messages."""

    texts: list[str]
    where: str

    def without(self, others: Iterable[str]) -> Documents:
        """Those that are not among `others`."""
        known = set(others)
        return Documents([text for text in self.texts if text not in known], self.where).required()

    def required(self) -> Documents:
        """The documents, when there are any."""
        if not self.texts:
            raise UserError(f"{self.where} has no text to learn from or to measure on")
        return self


def read_documents(request: Request) -> dict[str, Documents]:
    """Training, validation and test documents: none of the training is among the others."""
    if request.data is None:
        raise UserError(
            "the task lm needs text; give a .txt, .jsonl or .parquet file, or a folder of them, with --data"
        )
    found = _splits(request.data, request)
    if request.test is not None:
        found["test"] = _read([Path(request.test)], request.test, request)
    if "validation" not in found and "train" in found:
        found |= hold_out(found["train"], request.holdout)
    if "validation" not in found:  # the only text is the test split
        found["validation"] = found.pop("test")
    if request.evaluation_only:
        found.pop("train", None)
    elif "train" not in found:
        raise UserError(f"{request.data} has no text to train on; name a file train.txt, train.jsonl or train.parquet")
    else:
        found["train"] = found["train"].without(text for name in found.keys() - {"train"} for text in found[name].texts)
    return {name: found[name] for name in ("train", "validation", "test") if name in found}


def _splits(data: Path, request: Request) -> dict[str, Documents]:
    """The documents of a file, or of a folder whose files are named by split; of any other folder, all of them."""
    existing_data(data)
    if data.is_file():
        return {"train": _read([data], str(data), request)}
    known = (*PLAIN, *READERS)
    files = [file for file in sorted(data.rglob("*")) if file.suffix.lower() in known and file.is_file()]
    if not files:
        raise UserError(f"{data} has no text file; expected one of {', '.join(known)}; it holds: {listing(data)}")
    named: dict[str, list[Path]] = {}
    for file in files:
        if match := _NAMED.fullmatch(file.stem):
            named.setdefault(_SPLITS.get(match[1], match[1]), []).append(file)
    if not named:
        return {"train": _read(files, str(data), request)}
    return {
        name: _read(own, str(own[0] if len(own) == 1 else data / f"{name}*"), request) for name, own in named.items()
    }


def _read(files: list[Path], where: str, request: Request) -> Documents:
    texts = [text for file in files for text in _texts(file, request)]
    return Documents(list(dict.fromkeys(text for text in texts if text.strip())), where).required()


def _texts(file: Path, request: Request) -> list[str]:
    existing_data(file)
    if file.suffix.lower() in PLAIN:
        with parsing(file):
            return [file.read_text(encoding="utf-8-sig")]
    split = Split(read_file(file), str(file)).require(())
    column = request.text_column
    if column is None:
        column = "text" if "text" in split.rows.column_names else only_text_column(split)
    split.require((column,)).require_text(column)
    rows: list[str] = split.rows[column][:]
    return ["".join(rows)] if all(text == "" or text.endswith("\n") for text in rows) else rows


def hold_out(documents: Documents, share: float) -> dict[str, Documents]:
    """A share of the documents for validation, or the end of the only one; a share of 1 is everything."""
    texts, where = documents.texts, documents.where
    if share == 1:
        return {"validation": documents}
    held = Documents([], f"the held-out part of {where}"), Documents([], f"the training part of {where}")
    if len(texts) == 1:
        kept, out = _cut(texts[0], share)
        chosen = [out], [kept]
    else:
        numbers = set(subset(len(texts), max(1, min(len(texts) - 1, round(share * len(texts))))).tolist())
        chosen = (
            [text for number, text in enumerate(texts) if number in numbers],
            [text for number, text in enumerate(texts) if number not in numbers],
        )
    validation, train = (Documents(own, one.where).required() for own, one in zip(chosen, held, strict=True))
    return {"train": train, "validation": validation}


def _cut(text: str, share: float) -> tuple[str, str]:
    """A text in two at the blank nearest to where the last `share` of it begins."""
    blanks = np.array([match.start() for match in re.finditer(r"\s", text)])
    if not len(blanks):
        raise UserError("the only document is a single word; none of it can be held out for validation")
    place = int(blanks[np.abs(blanks - round((1 - share) * len(text))).argmin()])
    return text[:place], text[place:]
