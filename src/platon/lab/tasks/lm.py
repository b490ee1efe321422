"""The task `lm`: a causal language model goes on learning from text, measured by its perplexity on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from platon.lab.errors import UserError
from platon.lab.tasks import dataset
from platon.lab.tasks.block import (
    Block,
    BlockCollator,
    BlockRows,
    Tokens,
    blocks,
    constant_perplexity,
    perplexity,
    row_losses,
    windows,
)
from platon.lab.tasks.dataset import Split, subset
from platon.lab.tasks.document import Documents, read_documents
from platon.lab.tasks.model import Pretrained, quiet
from platon.lab.tasks.sequence import TEST, allowed_length, rows_of
from platon.lab.tasks.task import Prepared, Request, Task

MAX_LENGTH = 512  #: tokens of a block, and of the context that perplexity is measured with


def prepare(task: Task, request: Request) -> Prepared:
    """Documents in `request.data`, cut into blocks of `request.max_length` tokens, and the model in `request.model`."""
    documents = read_documents(request)
    pretrained = Pretrained(task, request)
    tokenizer = pretrained.tokenizer()
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {pretrained.name!r} has no end token, so a document cannot be ended; "
            'name one as "eos_token" in its tokenizer_config.json'
        )
    length = allowed_length(request.max_length, MAX_LENGTH, tokenizer, pretrained.config)
    stride = request.stride or length
    if length < 2 or stride > length:
        raise UserError(f"stride must be at most max_length, {length}, and that at least 2; got stride {stride}")

    def build() -> PreTrainedModel:
        model = pretrained.build()
        if model.generation_config is not None:  # or Trainer says that it sets it
            model.generation_config.pad_token_id = tokenizer.pad_token_id
        return model

    rows = {name: _rows(own, tokenizer, length, stride, name, request) for name, own in documents.items()}
    measured = {name: own for name, own in rows.items() if name != "train"}
    text = {name: Split(Dataset.from_dict({"text": own.texts}), own.where) for name, own in documents.items()}
    return Prepared(
        build=build,
        train=rows.get("train", ()),
        evaluation={name: own for name, own in measured.items() if name != TEST},
        test={name: own for name, own in measured.items() if name == TEST},
        collate=BlockCollator(tokenizer.pad_token_id),
        score=lambda split, predictions, labels: {"perplexity": perplexity(predictions)},
        chance={name: {"perplexity": constant_perplexity(own)} for name, own in measured.items()},
        metrics=task.metrics,
        fingerprint=dataset.digest(text, ("text",)),
        processor=tokenizer,
        lengths={name: own.lengths for name, own in rows.items()},
        is_constant=lambda predictions: False,
        condense=row_losses,
        details={"context_length": length, "stride": stride, **_token_counts(rows)},
        notes=pretrained.notes,
        about=[
            ("data", str(request.data)),
            *((name, _described(documents[name], own)) for name, own in rows.items()),
            ("blocks", f"at most {length:,} tokens of one document; perplexity in windows {stride:,} tokens apart"),
        ],
    )


def _rows(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, length: int, stride: int, name: str, request: Request
) -> BlockRows:
    """The blocks of a split: as many as the user wants, a fixed random subset."""
    cut: Callable[[Tokens], Any] = (
        (lambda one: blocks(one, length)) if name == "train" else (lambda one: windows(one, length, stride))
    )
    end = tokenizer.eos_token_id if name == "train" else None  # perplexity is that of the text itself
    found: list[Block] = [block for document in tokenised(documents.texts, tokenizer, end) for block in cut(document)]
    if not found:
        raise UserError(f"{documents.where} has no document of two tokens or more; there is nothing to predict")
    wanted = rows_of(request, name)
    if wanted is not None and wanted < len(found):
        found = [found[number] for number in subset(len(found), wanted)]
    return BlockRows(found)


def tokenised(texts: list[str], tokenizer: PreTrainedTokenizerBase, end: int | None) -> list[Tokens]:
    """The tokens of each text, as its tokenizer begins it; behind them `end`, unless it stands there already."""
    with quiet():  # the tokenizer warns of texts that are longer than the model takes
        encoded = tokenizer(texts, return_attention_mask=False)["input_ids"]
    found = []
    for ids in encoded:
        ended = ids if end is None or (ids and ids[-1] == end) else [*ids, end]
        found.append(np.asarray(ended, dtype=np.int32))
    return found


def _token_counts(rows: Mapping[str, BlockRows]) -> dict[str, int]:
    return {f"{name}_tokens": own.predicted for name, own in rows.items()}


def _described(documents: Documents, rows: BlockRows) -> str:
    many = "document" if len(documents.texts) == 1 else "documents"
    return f"{len(documents.texts):,} {many}; {len(rows):,} blocks with {rows.predicted:,} tokens to predict"
