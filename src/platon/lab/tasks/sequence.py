"""Classification and regression of texts and pairs of texts: the part that GLUE and the user's own texts share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from platon.lab.errors import UserError
from platon.lab.tasks import dataset
from platon.lab.tasks.dataset import Split
from platon.lab.tasks.metrics import chance, score
from platon.lab.tasks.model import Pretrained, name_labels
from platon.lab.tasks.task import Prepared, Request, Rows, Task

#: The authors' length for GLUE. Batches are padded to their longest row only, so it costs nothing on short texts.
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
    """Check and tokenise these splits ("train", if any, and those to evaluate); names None is regression."""
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
    fingerprint = dataset.digest(used, (*texts, label))
    encode = partial(_encode, tokenizer=tokenizer, texts=texts, label=label, length=length, regression=names is None)
    rows = {name: tokenise(split.rows, encode, f"{fingerprint[:16]}-{name}") for name, split in used.items()}
    evaluation: dict[str, Rows] = {name: one for name, one in rows.items() if name != "train"}
    return Prepared(
        build=pretrained.build,
        train=rows.get("train", ()),
        evaluation=evaluation,
        collate=DataCollatorWithPadding(tokenizer),
        score=partial(score, metrics=metrics, regression=names is None),
        chance={name: chance(rows[name]["labels"][:], metrics, regression=names is None) for name in evaluation},
        metrics=metrics,
        fingerprint=fingerprint,
        processor=tokenizer,
        lengths=lengths(rows),
        notes=pretrained.notes,
    )


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
