"""Sentences and pairs of sentences with a label: what GLUE and the user's own texts share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from platon.lab.errors import UserError
from platon.lab.tasks import source
from platon.lab.tasks.metrics import chance, score
from platon.lab.tasks.model import Pretrained, name_labels
from platon.lab.tasks.source import Split
from platon.lab.tasks.task import Prepared, Request, Task

#: The authors' length for GLUE; batches are padded to their longest row only, so it costs nothing on short texts.
MAX_LENGTH = 512


def prepare(
    task: Task,
    request: Request,
    splits: Mapping[str, Split],
    texts: tuple[str, ...],
    label: str,
    names: tuple[str, ...] | None,
    metrics: tuple[str, ...],
) -> Prepared:
    """Check, tokenise and score these splits ("train" and those to evaluate); names None is regression."""
    for split in splits.values():
        split.require((*texts, label))
        for column in texts:
            split.require_text(column)
        if names is None:
            split.require_numbers(label)
        else:
            split.require_labels(label, len(names))
    pretrained = Pretrained(task, request, **name_labels(names))
    tokenizer = pretrained.tokenizer()
    length = allowed_length(request.max_length, MAX_LENGTH, tokenizer, pretrained.config)

    used = {name: s.take(request.train_rows if name == "train" else request.eval_rows) for name, s in splits.items()}
    fingerprint = source.digest(used, (*texts, label))
    encode = partial(_encode, tokenizer=tokenizer, texts=texts, label=label, length=length, regression=names is None)
    rows = {name: tokenise(split.rows, encode, f"{fingerprint[:16]}-{name}") for name, split in used.items()}
    train = rows.pop("train")
    return Prepared(
        build=pretrained.build,
        train=train,
        evaluation=dict(rows),
        collate=DataCollatorWithPadding(tokenizer),
        score=partial(score, metrics=metrics, regression=names is None),
        chance={name: chance(r["labels"][:], metrics, regression=names is None) for name, r in rows.items()},
        metrics=metrics,
        fingerprint=fingerprint,
        processor=tokenizer,
        lengths=lengths(train=train, **rows),
    )


def lengths(**rows: Dataset) -> dict[str, list[int]]:
    """Tokens of each row."""
    return {name: pc.list_value_length(own.data.column("input_ids")).to_pylist() for name, own in rows.items()}


def allowed_length(asked: int | None, usual: int, tokenizer: PreTrainedTokenizerBase, config: Any) -> int:
    """The asked or usual length in tokens, within what the model can take."""
    limits = (tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
    limit = min(int(n) for n in (*limits, 2**31) if n is not None and n > 0)
    if asked is not None and asked > limit:
        raise UserError(f"max_length {asked} is more than the {limit} tokens that the model can take")
    return min(asked or usual, limit)


def tokenise(rows: Dataset, encode: Any, name: str, *, numbered: bool = False) -> Dataset:
    """The encoded rows, held in memory: nothing goes into a cache, so nothing needs a hash of the tokenizer.

    `encode` takes a batch, and the rows' numbers as well when `numbered`.
    """
    with source.quiet():
        return rows.map(
            encode,
            batched=True,
            with_indices=numbered,
            remove_columns=rows.column_names,
            keep_in_memory=True,
            load_from_cache_file=False,
            new_fingerprint=name,
        )


def _encode(
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    texts: tuple[str, ...],
    label: str,
    length: int,
    regression: bool,
) -> dict[str, list[Any]]:
    encoded = dict(tokenizer(*(batch[column] for column in texts), truncation=True, max_length=length))
    encoded["labels"] = [float(x) for x in batch[label]] if regression else batch[label]
    return encoded
