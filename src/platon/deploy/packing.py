"""A sparse matrix in the order in which the kernel reads it: a float and a byte a non-zero."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_BLOCK = 64  # as in sparse.c
WIDEST = 256  # a column inside a part is one byte
_WANTED = 192


class Packed(NamedTuple):
    """Blocks of 64 rows, each in parts of `width` columns; inside a part the non-zeros row by row."""

    values: Tensor  # float32 [non-zeros]
    columns: Tensor  # uint8 [non-zeros], counted from the first column of the part
    counts: Tensor  # int16 [row blocks · parts · 64]: 64 · non-zeros + row, for the rows of a part, most first
    starts: Tensor  # int64 [row blocks + 1]: where a block's values begin
    rows: int
    columns_in: int
    width: int

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.values, self.columns, self.counts, self.starts))


def pack(weight: Tensor, width: int | None = None) -> Packed:
    """The non-zeros of a matrix [rows, columns]."""
    rows, columns = weight.shape
    width = width or part_width(columns)
    blocks, parts = -(-rows // ROW_BLOCK), max(1, -(-columns // width))
    padded = F.pad(weight.detach().float(), (0, parts * width - columns, 0, blocks * ROW_BLOCK - rows))
    ordered = padded.view(blocks, ROW_BLOCK, parts, width).transpose(1, 2)
    # Rows with equally many non-zeros follow each other: then the processor guesses right where a row ends.
    order = (ordered != 0).sum(-1).argsort(dim=-1, descending=True, stable=True)
    ordered = ordered.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, width))
    kept = ordered != 0
    counts = kept.sum(-1)
    starts = torch.zeros(blocks + 1, dtype=torch.int64)
    torch.cumsum(counts.sum((1, 2)), 0, out=starts[1:])
    column = torch.arange(width, dtype=torch.uint8).expand(kept.shape)
    return Packed(
        ordered[kept],
        column[kept],
        (counts * ROW_BLOCK + order).to(torch.int16).flatten(),
        starts,
        rows,
        columns,
        width,
    )


def unpack(packed: Packed) -> Tensor:
    """The dense matrix again."""
    blocks, parts = packed.starts.numel() - 1, max(1, -(-packed.columns_in // packed.width))
    counts = packed.counts.to(torch.int64)
    place = torch.arange(counts.numel()) // ROW_BLOCK * ROW_BLOCK + counts % ROW_BLOCK  # in [block, part, row]
    row = torch.repeat_interleave(place, counts // ROW_BLOCK)
    dense = torch.zeros(blocks * parts * ROW_BLOCK, packed.width)
    dense[row, packed.columns.long()] = packed.values
    whole = dense.view(blocks, parts, ROW_BLOCK, packed.width).transpose(1, 2)
    return whole.reshape(blocks * ROW_BLOCK, parts * packed.width)[: packed.rows, : packed.columns_in].contiguous()


def part_width(columns: int) -> int:
    """How many columns make a part: equal parts of at most 192, few for the caches, many because a row's sums cost."""
    parts = max(1, -(-columns // _WANTED))
    return max(1, -(-columns // parts))
