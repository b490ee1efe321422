"""What a run on a CPU ends with: the folder that is deployed, measured as it will be used."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from platon.deploy import memory
from platon.deploy.loading import opened
from platon.deploy.shrink import largest_difference
from platon.deploy.sparse import sparsify
from platon.deploy.speed import is_text, shaped, take_turns
from platon.deploy.storage import save, size_on_disk

ROWS, LENGTH, ROUNDS = 8, 128, 10
LIMIT = 1e-4  # of the largest output: sparse products add in another order, and rounding errors grow over the layers


def ship(
    source: Path,
    reference: Path,
    folder: Path,
    batch: Mapping[str, Tensor],
    processor: Any,
    evaluate: Callable[[Any], Any],
) -> dict[str, Any]:
    """Write a pruned model with layers that skip zeros, and measure it through the folder that was written.

    Args:
        source: the pruned model, compact or not.
        reference: the model to compare its time and memory with.
        folder: where the fast model goes; nothing is left there when it computes something else.
        batch: real inputs.
        processor: a tokenizer or image processor to save beside it.
        evaluate: measures a model on the task.

    Returns:
        Bytes on disk; the task's results; the milliseconds of a batch and the bytes of memory, of the reference and of
        the fast model; the largest difference of any output on the batch; and the seconds that all of it took.
    """
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without the compiled kernel it is slower, which the numbers say
        pruned = opened(source)
        made = sparsify(pruned, tokens=ROWS * LENGTH)
        difference = largest_difference(pruned, made, batch, LIMIT)
        save(made, folder, processor=processor)
        del made, pruned
        fast, dense = opened(folder), opened(reference)
    longest = min(LENGTH, getattr(fast.config, "max_position_embeddings", None) or LENGTH)
    length = longest if is_text(batch) else None
    inputs = shaped(batch, ROWS, length)
    seconds = take_turns({"dense": lambda batch: dense(**batch), "fast": lambda batch: fast(**batch)}, inputs, ROUNDS)
    return {
        "bytes": size_on_disk(folder),
        "results": evaluate(fast),
        "batch": [ROWS, length],  # rows, and tokens in each where it is text
        "threads": torch.get_num_threads(),
        "milliseconds": {name: round(1e3 * statistics.median(taken), 3) for name, taken in seconds.items()},
        "memory": _memory(reference, folder, inputs),
        "difference": difference,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _memory(reference: Path, folder: Path, inputs: Mapping[str, Tensor]) -> dict[str, int | None]:
    """The bytes that loading and running each model adds to a process; `None`: it could not be measured."""
    models = [("eager", place, place) for place in (reference, folder)]
    found = memory.measure(models, inputs, torch.get_num_threads())
    return {name: one.get("added_bytes") for name, one in zip(("dense", "fast"), found, strict=True)}
