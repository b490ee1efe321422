"""Blocks of tokens for language models: documents cut into training blocks, and into windows to measure on.

A block never holds tokens of two documents, so no token is predicted from another document, whatever the model does
with attention masks and positions. Short blocks are padded in a batch; batches of similar length have little padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100  # the label of a token that does not count, as torch's cross entropy has it
_CHUNK = 2**22  # logits that are converted to float32 at a time

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Block:
    """Tokens of one document. The first `context` of them are only read; those after it are predicted."""

    tokens: Tokens
    context: int

    @property
    def labels(self) -> NDArray[np.int64]:
        found = self.tokens.astype(np.int64)
        found[: self.context] = IGNORED
        return found


def blocks(document: Tokens, length: int) -> Iterator[Block]:
    """The document in pieces of `length` tokens, the last one shorter; a piece of one token has nothing to predict."""
    for start in range(0, len(document), length):
        piece = document[start : start + length]
        if len(piece) > 1:
            yield Block(piece, 1)


def windows(document: Tokens, length: int, stride: int) -> Iterator[Block]:
    """Windows of `length` tokens, each `stride` further on, that predict every token once.

    A token is predicted in the first window that holds it. The first token of a window has no context there: with a
    stride of `length` one token in `length` is not predicted, with a shorter one the document's first alone.
    """
    start = seen = 0
    while seen < len(document):
        end = min(start + length, len(document))
        context = max(seen - start, 1)
        if end - start > context:
            yield Block(document[start:end], context)
        seen, start = end, start + stride


class BlockRows:
    """Blocks as the rows of a dataset."""

    def __init__(self, found: Sequence[Block]) -> None:
        self.blocks = found

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Block:
        return self.blocks[index]

    @property
    def lengths(self) -> list[int]:
        return [len(block.tokens) for block in self.blocks]

    @property
    def predicted(self) -> int:
        """Tokens that are predicted."""
        return sum(len(block.tokens) - block.context for block in self.blocks)


@dataclass(frozen=True)
class BlockCollator:
    """A batch of blocks, filled up on the right with `padding`."""

    padding: int

    def __call__(self, rows: list[Block]) -> dict[str, Any]:
        shape = len(rows), max(len(row.tokens) for row in rows)
        ids = np.full(shape, self.padding, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        for number, row in enumerate(rows):
            own = slice(len(row.tokens))
            ids[number, own], labels[number, own], mask[number, own] = row.tokens, row.labels, 1
        arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def row_losses(logits: Any, labels: Tensor) -> Tensor:
    """For each row -Σ ln p over the tokens that count, and how many these are: all that perplexity needs of logits.

    Logits are as many as tokens × vocabulary: they are read in chunks, and not kept.
    """
    answers: Tensor = logits[0] if isinstance(logits, tuple) else logits
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()  # the logits of a token are for the one after it
    flat = answers.reshape(-1, answers.shape[-1])
    step = max(1, _CHUNK // flat.shape[1])
    parts = [
        F.cross_entropy(flat[i : i + step].float(), targets[i : i + step], reduction="none", ignore_index=IGNORED)
        for i in range(0, len(flat), step)
    ]
    losses = torch.cat(parts).view(labels.shape).sum(1)
    return torch.stack([losses, (targets.view(labels.shape) != IGNORED).sum(1).float()], 1)


def perplexity(losses: Any) -> float:
    """Exp of the mean loss over all tokens, from what `row_losses` gives. A diverged model has 10¹⁰⁰, never NaN."""
    total, count = np.asarray(losses, dtype=np.float64).sum(0)
    mean = total / count
    return float(np.exp(min(mean, 100 * np.log(10)))) if np.isfinite(mean) else 1e100


def constant_perplexity(rows: BlockRows) -> float:
    """The perplexity of the best constant answer: the shares of the predicted tokens, whatever came before them."""
    predicted = np.concatenate([block.tokens[block.context :] for block in rows.blocks])
    shares = np.unique(predicted, return_counts=True)[1] / len(predicted)
    return float(np.exp(-(shares * np.log(shares)).sum()))
