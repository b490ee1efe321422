"""Random numbers and hashes by position: the same for a unit wherever it lies, on however many ranks."""

import hashlib

import torch
from torch import Tensor

from platon.engine.ranking.bits import PIECE, unpack
from platon.engine.ranking.compiling import compiled


def draw(out: Tensor, seed: int, step: int, start: int = 0, fused: bool = False) -> None:
    """Fill `out` with logistic noise, ln u - ln(1-u), a function of seed, step and position alone."""
    # The generators of torch know no positions, so ranks and shards could not agree on each weight's number.
    begin = 0
    while begin < out.numel():
        place = (start + begin) & 0xFFFFFFFF
        keys = [_hash_number(seed, step, salt, (start + begin) >> 32) for salt in (1, 2)]
        length = min(out.numel() - begin, (1 << 32) - place)
        part = out[begin : begin + (length if fused else min(length, PIECE))]
        begin += part.numel()
        numbers = torch.tensor([place - (1 << 31), *keys], dtype=torch.int64, device=out.device).to(torch.int32)
        (compiled(_logistic) if fused else _logistic)(part, numbers)


def _logistic(out: Tensor, numbers: Tensor) -> None:
    """Noise for consecutive positions; `numbers`: the first position less 2³¹, and two hash keys."""
    first, *keys = numbers.unbind()
    # Positions are unsigned 32-bit numbers in int32, where sums wrap.
    bits = torch.arange(out.numel(), dtype=torch.int32, device=out.device) + (first ^ -(1 << 31))
    for key in keys:
        bits = _hash(bits ^ key)
    uniform = (((bits >> 8) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    out.copy_(torch.logit(uniform))


def digest(bits: Tensor, size: int, start: int) -> Tensor:
    """A hash of the positions that a mask keeps: a sum over them, so that the sums of shards add up to it."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, size, PIECE):
        kept = unpack(bits[begin // 8 : (begin + PIECE) // 8], min(PIECE, size - begin))
        place = kept.nonzero().view(-1) + (start + begin + 1)
        for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
            place = (place ^ ((place >> shift) & ((1 << (64 - shift)) - 1))) * factor  # wraps
        total += (place ^ ((place >> 31) & ((1 << 33) - 1))).sum()
    return total


def _hash(bits: Tensor) -> Tensor:
    """Mix 32-bit numbers so that each bit of the result depends on every bit of the input; products wrap."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        bits = (bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return bits ^ ((bits >> 16) & 0xFFFF)


def _hash_number(*numbers: int) -> int:
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little", signed=True)
