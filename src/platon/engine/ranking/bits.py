"""Masks as bits: bit j of byte i belongs to unit 8 i + j."""

import functools

import torch
from torch import Tensor

PIECE = 1 << 17  # elements handled at a time, so that temporaries stay in the cache and small in memory
_GATHER = 0x0102040810204080  # multiplying moves the low bits of eight bytes into the top byte of the product
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


def pack(kept: Tensor, out: Tensor | None = None) -> Tensor:
    """One bit a unit. `kept` is flat, of bool or of bytes 0 and 1."""
    size = kept.numel()
    if not size:  # a rank's empty shard
        return kept.new_empty(0, dtype=torch.uint8)
    kept = kept.view(torch.uint8)
    if size % 8:
        kept = torch.nn.functional.pad(kept, (0, 8 - size % 8))
    bits = (kept.view(torch.int64) * _GATHER).view(torch.uint8).view(-1, 8)[:, 7]
    return bits.contiguous() if out is None else out.copy_(bits)


def unpack(bits: Tensor, size: int) -> Tensor:
    """The first `size` bits as a bool tensor."""
    return _table(bits.device, 1).index_select(0, bits.int()).view(torch.bool)[:size]


def zero_pruned(values: Tensor, bits: Tensor) -> None:
    """Set `values` (flat) to zero where `bits` says that the unit is pruned, whatever they are, NaN included."""
    # A bitwise "and" on the numbers' memory is several times faster than masked_fill_, which is not vectorised.
    memory = values.view(_INTEGER[values.element_size()])
    for start in range(0, memory.numel(), PIECE):
        part = memory[start : start + PIECE]
        ones = _table(bits.device, -1).index_select(0, bits[start // 8 : (start + PIECE) // 8].int())
        part.bitwise_and_(ones.view(torch.int8)[: part.numel()].to(part.dtype))


@functools.cache
def _table(device: torch.device, one: int) -> Tensor:
    """For each byte its eight bits, lowest first, as eight bytes of 0 or `one` in one int64."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (bits * one).to(torch.int8).view(torch.int64).view(-1).to(device)
