"""The CRC-32 of a file, as zlib computes it, at the speed of memory where the compiled kernel is there."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from platon.deploy import sparse_kernel
from platon.deploy.sparse_kernel import SparseKernel

_PIECE = 1 << 24  # bytes that zlib gets at a time; many, because other threads hold Python's lock between two pieces
_STEP = 64  # the kernel takes a multiple of so many bytes
_NOTHING = 0xFFFFFFFF  # the CRC-32 that stands for a register of zeros, since zlib inverts it


def crc32(path: Path) -> int:
    """Of a file, of which a piece is in memory at a time."""
    kernel = sparse_kernel.installed()
    with path.open("rb") as file:
        even = os.fstat(file.fileno()).st_size // _STEP * _STEP
        folded = kernel.fold(file.fileno(), even) if isinstance(kernel, SparseKernel) and even else None
        found = 0
        if folded is not None:
            found = zlib.crc32(folded, _NOTHING)
            file.seek(even)
        while piece := file.read(_PIECE):
            found = zlib.crc32(piece, found)
    return found
