"""Tensors with zeros stored as a bit mask and the non-zero values. docs/storage.md describes the format."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from platon.engine.ranking.bits import pack, unpack

BITS, VALUES = "bits/", "values/"  # prefixes of the two tensors that stand for one

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


def compress(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor as it is, or as bits and values where that takes fewer bytes."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith((BITS, VALUES)):
            raise ValueError(f"a tensor is called {name!r}, which the sparse format uses itself; rename it")
        flat = tensor.contiguous().view(-1)
        # An element is stored if any of its bits is set, so that -0.0 is stored too.
        nonzero = flat.view(_INTEGERS[flat.element_size()]) != 0
        if _is_smaller(nonzero, flat.element_size()):
            stored[BITS + name], stored[VALUES + name] = pack(nonzero), flat[nonzero]
        else:
            stored[name] = tensor.contiguous()
    return stored


def decompress(stored: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors again, bit for bit.

    Args:
        stored: the result of `compress`.
        shapes: the shape of every tensor.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.startswith(VALUES):
            continue
        if not name.startswith(BITS):
            tensors[name] = tensor
            continue
        original = name.removeprefix(BITS)
        if original in stored:
            raise ValueError(f"{original!r} is there twice, as a dense tensor and as bits and values")
        values, shape = stored.get(VALUES + original), shapes.get(original)
        if values is None or shape is None or tensor.dtype != torch.uint8:
            raise ValueError(f"the bits of {original!r} come without their values or their shape")
        tensors[original] = _dense(original, tensor, values, shape)
    alone = [name for name in stored if name.startswith(VALUES) and BITS + name.removeprefix(VALUES) not in stored]
    if alone:
        raise ValueError(f"{alone[0]!r} comes without its bits")
    return tensors


def _is_smaller(nonzero: Tensor, size: int) -> bool:
    """Whether bits and values take fewer bytes than all elements of `size` bytes."""
    return -(-nonzero.numel() // 8) + int(nonzero.sum()) * size < nonzero.numel() * size


def _dense(name: str, bits: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    if bits.ndim != 1 or values.ndim != 1 or bits.numel() != -(-count // 8):
        raise ValueError(f"the bits of {name!r} are {tuple(bits.shape)}, which does not fit its shape {list(shape)}")
    mask = unpack(bits, 8 * bits.numel())
    if bool(mask[count:].any()) or int(mask.sum()) != values.numel():
        raise ValueError(f"the bits of {name!r} count {int(mask.sum())} values, but there are {values.numel()}")
    flat = torch.zeros(count, dtype=values.dtype)
    flat[mask[:count]] = values
    return flat.view(shape)
