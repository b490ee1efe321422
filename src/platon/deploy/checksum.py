"""The CRC-32 of a file, as zlib computes it, at the speed of memory where the compiled kernel is there."""

from __future__ import annotations

import mmap
import os
import zlib
from pathlib import Path

from platon.deploy import sparse_kernel
from platon.deploy.sparse_kernel import SparseKernel

_PIECE = 1 << 26  # bytes that are mapped at a time; many, because other threads hold Python's lock between two pieces
_STEP = 64  # the kernel takes a multiple of so many bytes
_NOTHING = 0xFFFFFFFF  # the CRC-32 that stands for a register of zeros, since zlib inverts it


def crc32(path: Path) -> int:
    """Of a file, which is mapped in pieces that do not stay in memory."""
    found, kernel = 0, sparse_kernel.installed()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, _PIECE):
            length = min(_PIECE, size - start)
            # Copied where it is written to, which nobody does: ctypes takes the address of writable memory alone.
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start) as piece:
                found = _continued(found, piece, kernel)
    return found


def _continued(before: int, piece: mmap.mmap, kernel: SparseKernel | str | None) -> int:
    """The CRC-32 of what has the CRC-32 `before` with the piece after it."""
    even = len(piece) // _STEP * _STEP
    folded = kernel.fold(piece, even, before ^ _NOTHING) if isinstance(kernel, SparseKernel) and even else None
    if folded is None:
        return zlib.crc32(piece, before)
    return zlib.crc32(piece[even:], zlib.crc32(folded, _NOTHING))
