"""The order of the training rows, which a resumed run repeats exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RowOrder(Sampler[int]):
    """The order of the rows in an epoch, a function of seed and epoch alone.

    With lengths, a batch holds rows of similar length: the rows are shuffled, cut into chunks of fifty batches, sorted
    inside each chunk, and the batches are shuffled again.

    Args:
        count: rows.
        batch: rows in a batch.
        seed: of the random order.
        lengths: tokens of each row.
    """

    def __init__(self, count: int, batch: int, seed: int, lengths: Sequence[int] | None = None) -> None:
        self.count, self.batch, self.seed = count, batch, seed
        self.lengths = None if lengths is None else np.asarray(lengths)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(self.count)
        if self.lengths is not None:
            size = 50 * self.batch
            chunks = np.split(order, range(size, self.count, size))
            order = np.concatenate([chunk[np.argsort(-self.lengths[chunk], kind="stable")] for chunk in chunks])
            batches = np.split(order, range(self.batch, self.count, self.batch))
            # The last batch may be smaller than the others, so it stays the last.
            shuffled = [batches[place] for place in random.permutation(len(batches) - 1)]
            order = np.concatenate([*shuffled, batches[-1]])
        return iter(order.tolist())


class NothingToTrain(Exception):  # noqa: N818  # not an error
    """The checkpoint that was resumed from is of the last step."""


class EpochCallback(TrainerCallback):
    """Tells the row order and the dataset which epoch begins, also where a resumed training begins inside one."""

    def __init__(self, order: RowOrder) -> None:
        self.order = order

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            raise NothingToTrain  # Trainer would take one more step
        epoch = math.floor((state.epoch or 0.0) + 1e-6)
        self.order.set_epoch(epoch)
        rows = kwargs["train_dataloader"].dataset  # accelerate does not set its epoch when it skips batches
        if hasattr(rows, "set_epoch"):
            rows.set_epoch(epoch)
