"""The sparse matrix format that the compiled kernel reads: a float and a byte for each non-zero.

A matrix is divided into blocks of 64 rows, and each row block into column panels of equal width, at most 256. Inside a
panel the non-zeros are stored row by row; a non-zero's column is counted from the panel's first column, so that it fits
in a byte.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_BLOCK = 64  # as in sparse.c
WIDEST = 256  # a column inside a panel is one byte
_WANTED = 192  # columns of a panel
_FEW = 0.08  # where fewer are kept, a row of a panel has so few non-zeros that what it costs itself counts

_DTYPES = {"values": torch.float32, "columns": torch.uint8, "counts": torch.int16, "starts": torch.int64}


# What can be wrong with the contents of the arrays, in the order of the numbers from 1 in sparse_check.h.
PROBLEMS = (
    "'counts' names a row of a panel twice",
    "'starts' and the numbers of non-zeros in 'counts' do not add up to the values",
    "'columns' names a column that is not there, of {0.columns_in}",
    "'counts' has non-zeros in a row that is not there, of {0.rows}",
)


class SparseMatrix(NamedTuple):
    """The arrays of one matrix [rows, columns_in], in panels of `width` columns."""

    values: Tensor  # float32 [non-zeros]
    columns: Tensor  # uint8 [non-zeros], counted from the first column of the panel
    counts: Tensor  # int16 [row blocks · panels · 64]: 64 · non-zeros + row; a panel's rows with most non-zeros first
    starts: Tensor  # int64 [row blocks + 1]: where a row block's values begin
    rows: int
    columns_in: int
    width: int

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.values, self.columns, self.counts, self.starts))

    @property
    def panels(self) -> int:
        return max(1, -(-self.columns_in // self.width))


def from_dense(weight: Tensor, width: int | None = None) -> SparseMatrix:
    """The non-zeros of a matrix [rows, columns]."""
    rows, columns = weight.shape
    width = width or panel_width(columns, int(weight.count_nonzero()) / max(1, weight.numel()))
    blocks, panels = -(-rows // ROW_BLOCK), max(1, -(-columns // width))
    padded = F.pad(weight.detach().float(), (0, panels * width - columns, 0, blocks * ROW_BLOCK - rows))
    ordered = padded.view(blocks, ROW_BLOCK, panels, width).transpose(1, 2)
    # Rows with equally many non-zeros follow each other, so that the processor predicts where a row ends.
    order = (ordered != 0).sum(-1).argsort(dim=-1, descending=True, stable=True)
    ordered = ordered.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, width))
    kept = ordered != 0
    counts = kept.sum(-1)
    starts = torch.zeros(blocks + 1, dtype=torch.int64)
    torch.cumsum(counts.sum((1, 2)), 0, out=starts[1:])
    column = torch.arange(width, dtype=torch.uint8).expand(kept.shape)
    return SparseMatrix(
        ordered[kept],
        column[kept],
        (counts * ROW_BLOCK + order).to(torch.int16).flatten(),
        starts,
        rows,
        columns,
        width,
    )


def unfilled(rows: int, columns: int, width: int, nonzeros: int) -> SparseMatrix:
    """A matrix whose arrays have shapes and types, but no memory."""
    blocks, panels = -(-rows // ROW_BLOCK), max(1, -(-columns // width))
    lengths = {"values": nonzeros, "columns": nonzeros, "counts": blocks * panels * ROW_BLOCK, "starts": blocks + 1}
    arrays = {name: torch.empty(length, dtype=_DTYPES[name], device="meta") for name, length in lengths.items()}
    return SparseMatrix(**arrays, rows=rows, columns_in=columns, width=width)


def to_dense(matrix: SparseMatrix) -> Tensor:
    """The dense matrix again."""
    blocks, panels = matrix.starts.numel() - 1, matrix.panels
    row = torch.repeat_interleave(_places(matrix), _lengths(matrix))
    dense = torch.zeros(blocks * panels * ROW_BLOCK, matrix.width)
    dense[row, matrix.columns.long()] = matrix.values
    ordered = dense.view(blocks, panels, ROW_BLOCK, matrix.width).transpose(1, 2)
    return ordered.reshape(blocks * ROW_BLOCK, panels * matrix.width)[: matrix.rows, : matrix.columns_in].contiguous()


def coordinates(matrix: SparseMatrix) -> tuple[Tensor, Tensor]:
    """Row and column of each non-zero."""
    panels, place = matrix.panels, torch.repeat_interleave(_places(matrix), _lengths(matrix))
    block, panel = place // ROW_BLOCK // panels, place // ROW_BLOCK % panels
    return block * ROW_BLOCK + place % ROW_BLOCK, panel * matrix.width + matrix.columns.long()


def panel_width(columns: int, kept: float) -> int:
    """Panels of equal width: narrow enough for the caches, wide because each costs a row's sums.

    Args:
        columns: of the matrix.
        kept: the share of its weights that are not 0.
    """
    panels = max(1, -(-columns // (WIDEST if kept < _FEW else _WANTED)))
    return max(1, -(-columns // panels))


def layout_problem(matrix: SparseMatrix, bias: Tensor | None) -> str | None:
    """What is wrong with the shapes, precisions and places of the arrays, without a look at what they contain."""
    rows, columns_in, width = matrix.rows, matrix.columns_in, matrix.width
    if not 1 <= width <= WIDEST or rows < 0 or columns_in < 0:
        return f"a matrix of {rows} × {columns_in} in panels of {width} columns cannot be; a panel has 1 to {WIDEST}"
    arrays = {name: getattr(matrix, name) for name in _DTYPES} | ({} if bias is None else {"bias": bias})
    for name, array in arrays.items():
        wanted = _DTYPES.get(name, torch.float32)
        if array.dtype != wanted or not array.is_cpu:
            return f"{name!r} is {array.dtype} on {array.device}, it has to be {wanted} on the CPU"
        if array.ndim != 1 or not array.is_contiguous():
            return f"{name!r} has the shape {tuple(array.shape)} and strides {array.stride()}, it has to be one row"
    blocks = -(-rows // ROW_BLOCK)
    lengths = {"columns": len(matrix.values), "counts": blocks * matrix.panels * ROW_BLOCK, "starts": blocks + 1}
    for name, length in (lengths | ({} if bias is None else {"bias": rows})).items():
        if len(arrays[name]) != length:
            return f"{name!r} has {len(arrays[name])} elements, {length} fit this matrix"
    return None


def content_problem(matrix: SparseMatrix) -> int:
    """What is wrong with the contents of arrays that fit each other: 0 for nothing, or a number of `PROBLEMS`, from 1.

    The compiled kernel checks the same, many times as fast; this is for machines without it.
    """
    blocks, panels, width = matrix.starts.numel() - 1, matrix.panels, matrix.width
    counts = (matrix.counts.to(torch.int64) & 0xFFFF).view(blocks, panels, ROW_BLOCK)
    lengths, rows = counts // ROW_BLOCK, counts % ROW_BLOCK
    if not bool((rows.sort(dim=-1).values == torch.arange(ROW_BLOCK)).all()):
        return 1
    starts = F.pad(lengths.sum((1, 2)).cumsum(0), (1, 0))
    if not torch.equal(starts, matrix.starts) or int(starts[-1]) != matrix.values.numel():
        return 2
    widths = (matrix.columns_in - torch.arange(panels) * width).clamp(max=width)
    limit = torch.repeat_interleave(widths.repeat(blocks), lengths.sum(2).view(-1))
    if bool((matrix.columns >= limit).any()):
        return 3
    last = matrix.rows - (blocks - 1) * ROW_BLOCK
    return 4 if blocks and bool((lengths[-1][rows[-1] >= last] > 0).any()) else 0


def _lengths(matrix: SparseMatrix) -> Tensor:
    """The number of non-zeros of each stored row of a panel; a count is an unsigned number in 16 bits."""
    return (matrix.counts.to(torch.int64) & 0xFFFF) // ROW_BLOCK


def _places(matrix: SparseMatrix) -> Tensor:
    """Where each stored row of a panel belongs, in [row block, panel, row]."""
    counts = matrix.counts.to(torch.int64) & 0xFFFF
    return torch.arange(counts.numel()) // ROW_BLOCK * ROW_BLOCK + counts % ROW_BLOCK
