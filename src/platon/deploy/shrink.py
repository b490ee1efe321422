"""What a structured run ends with: the compact model, checked and saved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy.compact import compact
from platon.deploy.storage import save, size_on_disk

LIMIT = 1e-5  # of the largest output, in float32


def shrink(model: nn.Module, batch: Mapping[str, Tensor], folder: Path, processor: Any = None) -> dict[str, Any]:
    """Compact a model, check that it still gives what the model gives, and save it.

    Args:
        model: with zeros in it; it is not touched.
        batch: real inputs.
        folder: where the compact model goes; nothing is left there when it does not fit.
        processor: a tokenizer or image processor to save beside it.

    Returns:
        Parameters, bytes on disk, and the largest difference of any output on the batch.

    Raises:
        ValueError: there is nothing to remove, the architecture is not known, or the outputs differ.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = compact(model)
    if small is model:
        raise ValueError(f"{type(model).__name__} has nothing to remove: no head, neuron or column is zero as a whole")
    difference = largest_difference(model, small, batch)
    save(small, folder, processor=processor)
    return {
        "parameters": sum(parameter.numel() for parameter in small.parameters()),
        "bytes": size_on_disk(folder),
        "difference": difference,
    }


def largest_difference(model: nn.Module, small: nn.Module, batch: Mapping[str, Tensor], limit: float = LIMIT) -> float:
    """Of any output on the batch; refused when it is more than rounding: `limit`, relative to the largest output."""
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    training = model.training
    try:
        with torch.inference_mode():
            ours, theirs = model.eval()(**inputs), small.to(device).eval()(**inputs)
    finally:
        model.train(training)
    largest = 0.0
    for name, one in ours.items():
        if isinstance(one, Tensor):
            difference = float((one - theirs[name]).abs().max())
            if not difference <= limit * max(1.0, float(one.abs().max())):
                raise ValueError(f"the smaller model differs from the pruned one: {name} by {difference:.2g}")
            largest = max(largest, difference)
    return largest
