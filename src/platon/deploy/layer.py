"""Sparse linear layers: one on the compiled kernel, one on `torch.sparse`. For inference, float32, on a CPU."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from platon.deploy import sparse_kernel, sparse_matrix
from platon.deploy.dense_view import DenseView
from platon.deploy.inference_layer import InferenceLayer, change_count, copied, is_eager
from platon.deploy.packed import Description, Shapes, size
from platon.deploy.sparse_matrix import PROBLEMS, SparseMatrix
from platon.deploy.sparse_operator import ACTIVATE, csr_linear, csr_matrix, kernel, quiet, sparse_linear
from platon.deploy.sparse_structure import ACTIVATIONS, Layer

_NOT_FETCHED = (torch.empty(0), None, torch.empty(0))


class SparseLinear(InferenceLayer):
    """activation(x Wᵀ + bias) by the compiled kernel; the zeros of W are neither stored nor multiplied."""

    kind, rounded = "linear", ("values",)
    arrays = ("values", "columns", "counts", "starts")  # the buffers that hold the matrix
    columns: Tensor
    counts: Tensor
    starts: Tensor
    is_deferred = False  # whether the next layer computes this product too; then this one passes its input on
    before: tuple[SparseLinear, ...] = ()  # such layers before this one, the first one first
    siblings: tuple[SparseLinear, ...] = ()  # layers that are given the same tokens after this one
    computes_together = True
    most_siblings = 7  # as in sparse.c, with the layer itself
    is_sibling = False  # whether it was, and nobody had changed the tokens in between
    _held: tuple[Tensor, int | None, Tensor] | None = None  # tokens, their changes, and the product that a sibling made
    _layer: Layer | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> None:
        self._set(sparse_matrix.from_dense(weight), copied(bias), activation)

    def _set(self, matrix: SparseMatrix, bias: Tensor | None, activation: str) -> None:
        super().__init__(matrix.rows, matrix.columns_in, bias, activation)
        for name in self.arrays:
            self.register_buffer(name, getattr(matrix, name))
        self.width = matrix.width

    @classmethod
    def of(cls, matrix: SparseMatrix, bias: Tensor | None, activation: str) -> SparseLinear:
        """A layer with this matrix and bias, which are not copied."""
        layer = cls.__new__(cls)
        layer._set(matrix, bias, activation)
        return layer

    def description(self) -> dict[str, int | str]:
        sizes = {"rows": self.out_features, "columns": self.in_features, "width": self.width}
        return {**sizes, "activation": self.activation}

    def outline(self) -> Hashable:
        return super().outline(), self.is_deferred, len(self.before)

    @classmethod
    def unfilled(cls, description: Description, shapes: Shapes) -> SparseLinear:
        rows, columns = size(description, "rows"), size(description, "columns")
        width = size(description, "width", 1, sparse_matrix.WIDEST)
        activation, count = description.get("activation"), shapes.get("values", ())
        if not isinstance(activation, str) or activation not in ACTIVATE or len(count) != 1:
            raise ValueError(f"the manifest is damaged: no sparse layer can be built from {dict(description)}")
        bias = torch.empty(rows, device="meta") if "bias" in shapes else None
        return cls.of(sparse_matrix.unfilled(rows, columns, width, count[0]), bias, activation)

    @classmethod
    def replaced(cls, description: Description, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        rows, columns = size(description, "rows"), size(description, "columns")
        return {"weight": (rows, columns)} | ({"bias": (rows,)} if "bias" in shapes else {})

    def runnable(self) -> SparseLinear | CsrLinear:
        if isinstance(sparse_kernel.find(), str):
            return CsrLinear.of(self.matrix, self.bias, self.activation)
        return self

    @property
    def matrix(self) -> SparseMatrix:
        """The arrays as the kernel takes them."""
        held: Any = self._buffers  # read directly, because nn.Module's attribute lookup is slow
        arrays = (held["values"], held["columns"], held["counts"], held["starts"])
        return SparseMatrix(*arrays, self.out_features, self.in_features, self.width)

    @property
    def weight(self) -> Tensor:
        """W as a dense matrix: a new tensor at every call, which is made once something is computed with it."""
        matrix = self.matrix
        return DenseView.of(self.values, (matrix.rows, matrix.columns_in), lambda: sparse_matrix.to_dense(matrix))

    def problem(self) -> str | None:
        matrix, found = self.matrix, sparse_kernel.find()
        problem = sparse_matrix.layout_problem(matrix, self.bias)
        if problem:
            return problem
        number = sparse_matrix.content_problem(matrix) if isinstance(found, str) else found.content_problem(matrix)
        return PROBLEMS[number - 1].format(matrix) if number else None

    def _sizes(self) -> tuple[int, ...]:
        return (self.out_features, self.in_features, self.width, ACTIVATIONS[self.activation])

    def packed(self) -> Layer:
        """What the kernel takes; the buffers are checked if they have changed."""
        before = self._checked
        self.check_buffers()
        if self._checked is not before or self._layer is None:
            self._layer = Layer.of(self.matrix, self._buffers["bias"], self.activation)
        return self._layer

    def forward(self, x: Tensor) -> Tensor:
        if self.is_deferred:
            return x
        if self.before:
            return self.chain(x)
        self.check(x)
        if not is_eager(x):
            return self.traced(x)
        # Without PyTorch's dispatcher, which takes longer than a small layer.
        held = self._held
        if held is not None and held[0] is x and held[1] == change_count(x):
            self.__dict__["_held"] = None
            self.__dict__["is_sibling"] = self.is_sibling or held[1] is not None
            return held[2]
        if held is not None:
            self.__dict__["_held"] = _NOT_FETCHED
        return self._with_siblings(x) if self.siblings else kernel().linears(x, [self.packed()])[0]

    def chain(self, x: Tensor, added: Tensor | None = None, norm: nn.LayerNorm | None = None) -> Tensor:
        """norm(product(x) + added), with the products of the layers before this one first."""
        layers = (*self.before, self)
        layers[0].check(x)
        if is_eager(x) and (norm is None or (is_readable(norm) and not is_trained(norm))):
            numbers = None if norm is None else (norm._parameters["weight"], norm._parameters["bias"], norm.eps)
            return kernel().chain(x, [layer.packed() for layer in layers], added, numbers)
        for layer in layers:
            x = layer.traced(x)
        x = x if added is None else x + added
        return x if norm is None else F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    def traced(self, x: Tensor) -> Tensor:
        """The product as an operator of PyTorch."""
        sizes = (self.out_features, self.width)
        return sparse_linear(x, self.values, self.columns, self.counts, self.starts, self.bias, *sizes, self.activation)

    def _with_siblings(self, x: Tensor) -> Tensor:
        """The product, and those of the siblings, which fetch theirs when they are given the same tokens."""
        strangers = [one for one in self.siblings if one._held is not None]
        if strangers:  # they did not fetch what was computed last time: they are given other tokens
            self.siblings = tuple(one for one in self.siblings if one not in strangers)
            strangers[0].siblings = tuple(strangers[1:])
            for one in strangers:
                one._held = None
        count = change_count(x)
        # Tensors of inference mode do not count their changes, so it must have been seen that there are none.
        found = self.siblings if count is not None or all(one.is_sibling for one in self.siblings) else ()
        own, *others = kernel().linears(x, [self.packed(), *(one.packed() for one in found)])
        for one, out in zip(found, others, strict=True):
            one.__dict__["_held"] = (x, count, out)
        return own

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_layer": None, "_held": None}


class CsrLinear(InferenceLayer):
    """activation(x Wᵀ + bias) by `torch.sparse`, where there is no compiled kernel."""

    starts: Tensor
    columns: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> None:
        with quiet():
            self._set(weight.detach().float().to_sparse_csr(), copied(bias), activation)

    @classmethod
    def of(cls, matrix: SparseMatrix, bias: Tensor | None, activation: str) -> CsrLinear:
        """A layer with the same matrix as a `SparseLinear`; no dense matrix is made on the way."""
        layer, size = cls.__new__(cls), (matrix.rows, matrix.columns_in)
        indices = torch.stack(sparse_matrix.coordinates(matrix))
        with quiet():
            layer._set(
                torch.sparse_coo_tensor(indices, matrix.values, size, check_invariants=True).to_sparse_csr(),
                bias,
                activation,
            )
        return layer

    def _set(self, matrix: Tensor, bias: Tensor | None, activation: str) -> None:
        rows, columns = matrix.shape
        super().__init__(rows, columns, bias, activation)
        # Plain tensors: views of a sparse tensor can be neither copied nor traced with their module.
        self.register_buffer("starts", matrix.crow_indices().clone())
        self.register_buffer("columns", matrix.col_indices().clone())
        self.register_buffer("values", matrix.values().clone())

    def outline(self) -> Hashable:
        return type(self), self.in_features, self.out_features, self.activation, self.bias is None

    def portable(self) -> SparseLinear:
        return SparseLinear(self.weight, self.bias, self.activation)

    @property
    def weight(self) -> Tensor:
        """W as a dense matrix: a new tensor at every call, which is made once something is computed with it."""
        arrays, rows, columns = (self.starts, self.columns, self.values), self.out_features, self.in_features
        return DenseView.of(self.values, (rows, columns), lambda: csr_matrix(*arrays, rows, columns).to_dense())

    def problem(self) -> str | None:
        bias = () if self.bias is None else (self.bias,)
        for tensor in (self.values, *bias):
            if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                return f"its numbers are {tensor.dtype} on {tensor.device}, they have to be torch.float32 on the CPU"
        if self.bias is not None and self.bias.shape != (self.out_features,):
            return f"'bias' has the shape {tuple(self.bias.shape)}, {(self.out_features,)} fits this matrix"
        try:
            size = (self.out_features, self.in_features)
            with quiet():
                torch.sparse_csr_tensor(self.starts, self.columns, self.values, size, check_invariants=True)
        except RuntimeError as error:
            return f"torch.sparse refuses its arrays: {' '.join(str(error).split())}"
        return None

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if is_eager(x):
            self.check_buffers()
        return csr_linear(x, self.starts, self.columns, self.values, self.bias, self.out_features, self.activation)


def is_trained(norm: nn.LayerNorm) -> bool:
    """Whether a gradient is asked for, which the kernel does not compute."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in norm._parameters.values())


def is_readable(norm: nn.LayerNorm) -> bool:
    """Whether the kernel can read the numbers of a norm; otherwise PyTorch computes it, or says why it cannot."""
    held = [tensor for tensor in norm._parameters.values() if tensor is not None]
    return all(one.dtype == torch.float32 and one.device.type == "cpu" and one.is_contiguous() for one in held)
