"""Inputs for a model, to export or measure it with, where the user gives none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TEXTS = (
    "The committee met for two hours, and nobody could say afterwards what had been decided.",
    "She likes it.",
    "Where is the nearest station?",
    "Prices rose by 3.5 % in May, more than in any month since 2008, and fell again in June.",
)


def example_batch(model: nn.Module, processor: Any = None) -> dict[str, Tensor]:
    """A few sentences for a model with a tokenizer, random pixels for one of images, random tokens otherwise.

    Args:
        model: of transformers.
        processor: its tokenizer, if it has one.

    Raises:
        ValueError: the model takes neither texts nor images.
    """
    configured: Any = model.config
    kind = getattr(model, "main_input_name", None)
    if kind == "pixel_values":
        size = getattr(configured, "image_size", 224)
        high, wide = (size, size) if isinstance(size, int) else size
        random = torch.Generator().manual_seed(0)
        return {"pixel_values": torch.randn(4, getattr(configured, "num_channels", 3), high, wide, generator=random)}
    if kind != "input_ids":
        raise ValueError(f"no inputs are known for {type(model).__name__}, which takes {kind}; give a batch")
    if callable(processor) and getattr(processor, "pad_token", None) is not None:
        longest = getattr(configured, "max_position_embeddings", None) or 512
        return dict(processor(list(TEXTS), padding=True, truncation=True, max_length=longest, return_tensors="pt"))
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, configured.vocab_size, (4, 16), generator=random)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
