"""Tensors with zeros as bits and values: docs/storage.md is the format."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from platon.engine.kernels import pack, unpack

BITS, VALUES = "bits/", "values/"

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def squeeze(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor as it is, or as bits and values where that takes fewer bytes."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith((BITS, VALUES)):
            raise ValueError(f"a tensor is called {name!r}, which the sparse format uses itself; rename it")
        # By the bits of the number and not by its value: -0.0 is stored.
        flat = tensor.contiguous().view(-1)
        filled = flat.view(_WORDS[flat.element_size()]) != 0
        if _fewer(filled, flat.element_size()):
            stored[BITS + name], stored[VALUES + name] = pack(filled), flat[filled]
        else:
            stored[name] = tensor.contiguous()
    return stored


def unsqueeze(stored: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors again, bit for bit.

    Args:
        stored: what `squeeze` gave.
        shapes: the shape of every tensor.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.startswith(VALUES):
            continue
        if not name.startswith(BITS):
            tensors[name] = tensor
            continue
        whole = name.removeprefix(BITS)
        values = stored.get(VALUES + whole)
        shape = shapes.get(whole)
        if values is None or shape is None or tensor.dtype != torch.uint8:
            raise ValueError(f"the bits of {whole!r} come without their values or their shape")
        tensors[whole] = _filled(whole, tensor, values, shape)
    alone = [name for name in stored if name.startswith(VALUES) and BITS + name.removeprefix(VALUES) not in stored]
    if alone:
        raise ValueError(f"{alone[0]!r} comes without its bits")
    return tensors


def _fewer(filled: Tensor, size: int) -> bool:
    return -(-filled.numel() // 8) + int(filled.sum()) * size < filled.numel() * size


def _filled(name: str, bits: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    if bits.ndim != 1 or values.ndim != 1 or bits.numel() != -(-count // 8):
        raise ValueError(f"the bits of {name!r} are {tuple(bits.shape)}, which does not fit its shape {list(shape)}")
    flags = unpack(bits, 8 * bits.numel())
    if bool(flags[count:].any()) or int(flags.sum()) != values.numel():
        raise ValueError(f"the bits of {name!r} count {int(flags.sum())} values, but there are {values.numel()}")
    flat = torch.zeros(count, dtype=values.dtype)
    flat[flags[:count]] = values
    return flat.view(shape)
