"""Texts and pairs of texts with a target: the part that GLUE and the user's own texts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from platon.lab.errors import UserError
from platon.lab.percent import percent
from platon.lab.tasks import dataset
from platon.lab.tasks.dataset import Split
from platon.lab.tasks.model import Pretrained, quiet
from platon.lab.tasks.target import Target
from platon.lab.tasks.task import NEW, Prepared, Request, Rows, Task

#: The authors' length for GLUE. Batches are padded to their longest row only, so it costs nothing on short texts.
MAX_LENGTH = 512
TEST = "test"  #: the split that is measured once, at the end


def prepare(
    task: Task,
    request: Request,
    splits: Mapping[str, Split],
    texts: tuple[str, ...],
    label: str,
    target: Target,
) -> Prepared:
    """Check and tokenise these splits: "train", if any, those to evaluate, "test", if any; or `NEW` alone."""
    labels = (label,) if request.labelled else ()
    for split in splits.values():
        split.require((*texts, *labels))
        for column in texts:
            split.require_text(column)
        if request.labelled:
            target.require(split, label)
    pretrained = Pretrained(task, request, **target.config())
    tokenizer = pretrained.tokenizer()
    length = allowed_length(request.max_length, MAX_LENGTH, tokenizer, pretrained.config)

    used = {name: split.take(rows_of(request, name)) for name, split in splits.items()}
    fingerprint = dataset.digest(used, (*texts, *labels))
    encode = TextEncoder(tokenizer, texts, length, label if request.labelled else None)
    rows = {name: tokenise(split.rows, encode, f"{fingerprint[:16]}-{name}") for name, split in used.items()}
    evaluation: dict[str, Rows] = {name: one for name, one in rows.items() if name not in ("train", TEST)}
    measured = [name for name in rows if name != "train" and request.labelled]
    return Prepared(
        build=pretrained.build,
        train=rows.get("train", ()),
        evaluation=evaluation,
        test={name: rows[name] for name in rows if name == TEST},
        collate=DataCollatorWithPadding(tokenizer),
        score=target.score,
        chance={name: target.chance(rows[name]["labels"][:]) for name in measured},
        metrics=target.metrics,
        fingerprint=fingerprint,
        processor=tokenizer,
        lengths=lengths(rows),
        is_constant=target.is_constant,
        notes=pretrained.notes,
        about=[
            *(
                (name, f"{len(one):,} rows: {target.described(one['labels'][:])}")
                for name, one in rows.items()
                if labels
            ),
            ("texts", encode.described(sum(map(len, rows.values())))),
        ],
        warnings=encode.warnings(sum(map(len, rows.values()))),
        answers=target.answers,
        source=used[NEW].rows if NEW in used else None,
    )


def rows_of(request: Request, split: str) -> int | None:
    """How many rows of a split the user wants; `None`: all, as of the test split always."""
    return {"train": request.train_rows, TEST: None}.get(split, request.eval_rows)


def lengths(splits: Mapping[str, Dataset]) -> dict[str, list[int]]:
    """The token counts of the rows of each split."""
    return {name: pc.list_value_length(rows.data.column("input_ids")).to_pylist() for name, rows in splits.items()}


def allowed_length(asked: int | None, usual: int, tokenizer: PreTrainedTokenizerBase, config: Any) -> int:
    """The asked or usual length in tokens, at most the model's maximum."""
    limits = (tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
    limit = min(int(n) for n in (*limits, 2**31) if n is not None and n > 0)
    if asked is not None and asked > limit:
        raise UserError(f"max_length {asked} is more than the {limit} tokens that the model can take")
    return min(asked or usual, limit)


def tokenise(rows: Dataset, encode: Any, name: str, *, numbered: bool = False) -> Dataset:
    """The encoded rows, kept in memory: `datasets` writes no cache file and need not hash the tokenizer.

    `encode` takes a batch, and the rows' numbers as well when `numbered`.
    """
    with dataset.quiet():
        return rows.map(
            encode,
            batched=True,
            with_indices=numbered,
            remove_columns=rows.column_names,
            keep_in_memory=True,
            load_from_cache_file=False,
            new_fingerprint=name,
        )


@dataclass
class TextEncoder:
    """Tokenises batches of texts or pairs of texts, and notes how many are too long.

    Args:
        texts: the columns, one or two.
        length: of the longest row that is not cut, in tokens.
        label: the column of the labels, if there are any.
        cut, longest: rows that were cut so far, and the tokens of the longest row before that.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: tuple[str, ...]
    length: int
    label: str | None = None
    cut: int = field(default=0, init=False)
    longest: int = field(default=0, init=False)

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded = self.tokenizer(*(batch[column] for column in self.texts), truncation=True, max_length=self.length)
        over = [row for row, one in enumerate(encoded.encodings or ()) if one.overflowing]
        self.cut += len(over)
        self.longest = max(self.longest, *map(len, encoded["input_ids"]), *self._whole_lengths(batch, over))
        return dict(encoded) | ({} if self.label is None else {"labels": batch[self.label]})

    def _whole_lengths(self, batch: dict[str, list[Any]], rows: list[int]) -> list[int]:
        """The tokens of rows that were cut, before the cut."""
        if not rows:
            return []
        with quiet():  # the tokenizer warns of rows that are longer than the model takes
            whole = self.tokenizer(*([batch[column][row] for row in rows] for column in self.texts))
        return [len(ids) for ids in whole["input_ids"]]

    def described(self, rows: int) -> str:
        """The lengths in words."""
        if not self.cut:
            return f"longest {self.longest:,} tokens; none is cut ({self.length:,} fit)"
        share = f"{self.cut:,} of {rows:,} ({percent(self.cut / rows)})"
        return f"longest {self.longest:,} tokens; {share} are cut at {self.length:,}"

    def warnings(self, rows: int) -> list[str]:
        """A sentence where many rows lose their end."""
        if 10 * self.cut <= rows:
            return []
        lose = f"{percent(self.cut / rows, 0)} of the texts lose their end"
        return [f"{lose}; a larger --max-length keeps more, if the model allows"]
