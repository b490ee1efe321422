"""What sparse.c takes: structures of pointers and numbers, valid as long as the tensors live where they are."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from platon.deploy.sparse_matrix import SparseMatrix

ACTIVATIONS = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}  # as in sparse.c
MASKS = {torch.bool: 1, torch.float32: 2}  # as in sparse.c


class Layer(ctypes.Structure):
    """A sparse matrix, its bias and its activation as sparse.c takes them: pointers, each with its size in bytes."""

    _fields_ = (
        *(
            (f"{name}{part}", kind)
            for name in ("values", "columns", "counts", "starts", "bias")
            for part, kind in (("", ctypes.c_void_p), ("_bytes", ctypes.c_int64))
        ),
        *((name, ctypes.c_int64) for name in ("rows", "columns_in", "width", "activation")),
    )

    @classmethod
    def of(cls, matrix: SparseMatrix, bias: Tensor | None, activation: str) -> Layer:
        """Valid as long as the tensors live and stay where they are."""
        arrays = (matrix.values, matrix.columns, matrix.counts, matrix.starts)
        pointers = [number for array in arrays for number in (array.data_ptr(), array.nbytes)]
        pointers += (0, -1) if bias is None else (bias.data_ptr(), bias.nbytes)
        return cls(*pointers, matrix.rows, matrix.columns_in, matrix.width, ACTIVATIONS[activation])


class Heads(ctypes.Structure):
    """Queries, keys or values as sparse.c takes them: where the first is, and how far it is to the next ones."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token")))

    @classmethod
    def of(cls, tensor: Tensor) -> Heads:
        return cls(tensor.data_ptr(), *tensor.stride()[:3])


class Attention(ctypes.Structure):
    """The inputs and the output of attention as sparse.c takes them."""

    _fields_ = (
        *((name, Heads) for name in ("q", "k", "v")),
        ("mask", ctypes.c_void_p),
        *((f"mask_{name}", ctypes.c_int64) for name in ("kind", "row", "head", "query", "key")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "queries", "keys", "features", "value_features")),
        ("out", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )
