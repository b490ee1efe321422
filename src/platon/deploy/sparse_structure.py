"""What sparse.c takes: structures of pointers and numbers, valid as long as the tensors live where they are."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from platon.deploy.sparse_matrix import SparseMatrix

ACTIVATIONS = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}  # as in sparse.c
MASKS = {torch.bool: 1, torch.float32: 2}  # as in sparse.c
_CAUSAL = 3


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
        ("sharing", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )

    def set_mask(self, mask: Tensor | None, *, is_causal: bool = False) -> None:
        """[rows, heads, queries, keys]: bool, or float32; without one, a query may see the keys up to its own place."""
        if mask is None:
            self.mask_kind = _CAUSAL if is_causal else 0
        else:
            self.mask, self.mask_kind = mask.data_ptr(), MASKS[mask.dtype]
            self.mask_row, self.mask_head, self.mask_query, self.mask_key = mask.stride()


class Affine(ctypes.Structure):
    """The numbers of a layer norm as sparse.c takes them."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("weight_bytes", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("bias_bytes", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    )

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> Affine:
        return cls(*sized(norm._parameters["weight"]), *sized(norm._parameters["bias"]), norm.eps)


class Encoder(ctypes.Structure):
    """An encoder layer as sparse.c takes it: its matrices and norms."""

    _fields_ = (
        ("inward", ctypes.POINTER(Layer) * 3),
        ("out", ctypes.POINTER(Layer)),
        ("forward", ctypes.POINTER(Layer) * 7),
        *((name, ctypes.c_int64) for name in ("forward_count", "heads")),
        *((name, Affine) for name in ("first", "last")),
    )


def sized(array: Tensor | None) -> tuple[int, int]:
    """The address of an array and its size in bytes."""
    return (0, 0) if array is None else (array.data_ptr(), array.nbytes)
