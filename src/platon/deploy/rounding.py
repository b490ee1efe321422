"""Half precision on disk: rounded when a model is saved, widened when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

PRECISIONS = ("float32", "float16")


def halve(tensors: Mapping[str, Tensor], also: frozenset[str] = frozenset()) -> dict[str, Tensor]:
    """Matrices, and the tensors with these names, in float16; biases, norms and integers as they are.

    Raises:
        ValueError: a number is too large for float16, or a tensor has another precision already.
    """
    made = dict(tensors)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        if tensor.dtype != torch.float32:
            raise ValueError(
                f"precision='float16' stores float32 numbers in half the bytes, and {name!r} is {tensor.dtype}; save "
                "the model without it, or call model.float() first"
            )
        if tensor.ndim > 1 or name in also:
            made[name] = tensor.half()
            if bool((made[name].isinf() & ~tensor.isinf()).any()):
                raise ValueError(f"{name!r} has numbers above 65504, which float16 cannot hold; save it in float32")
    return made


def widen(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All float16 tensors in float32."""
    return {name: tensor.float() if tensor.dtype == torch.float16 else tensor for name, tensor in tensors.items()}
