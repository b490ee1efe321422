"""Sparse linear layers: one on the compiled kernel, one on `torch.sparse`. For inference, float32, on a CPU."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from platon.deploy import sparse_kernel, sparse_matrix
from platon.deploy.packed import Description, Packed, Shapes, size
from platon.deploy.sparse_matrix import SparseMatrix
from platon.deploy.sparse_operator import ACTIVATE, csr_linear, csr_matrix, product, quiet, refuse, sparse_linear

_version = operator.attrgetter("_version")


class _SparseLayer(Packed):
    """Checks the inputs at each call, and the buffers whenever they have changed since the last one."""

    values: Tensor
    bias: Tensor | None

    def __init__(self, rows: int, columns: int, bias: Tensor | None, activation: str) -> None:
        super().__init__()
        self.out_features, self.in_features = rows, columns
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self.activation = activation
        # Of the last check: the tensors (kept, so that their ids stay theirs), their versions, and all ids and sizes.
        self._checked: tuple[list[Tensor], list[int], list[int]] | None = None
        self.eval()

    def check(self, x: Tensor) -> None:
        """Refuse tokens or buffers that the product cannot be computed with."""
        if self.training or (x.requires_grad and torch.is_grad_enabled()) or _has_tangent(x):
            raise ValueError(
                "a sparse layer is for inference and was asked to train; call .eval() and use torch.no_grad(), "
                "or train the dense one"
            )
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"a sparse layer takes float32 on the CPU with {self.in_features} features last, got {x.dtype} of "
                f"shape {tuple(x.shape)} on {x.device}; convert the input, and leave the model in float32"
            )

    def check_buffers(self) -> None:
        """Check the arrays of the matrix once, and again when one was replaced or written to.

        PyTorch counts the in-place changes of a tensor in `_version`; tensors made in inference mode have no such
        count, so a change to one of them goes unnoticed here (the kernel stays inside its arrays all the same).
        """
        held = self._buffers
        if self._checked is not None:
            tensors, versions, identity = self._checked
            if [*map(_version, tensors)] == versions and [*map(id, held.values()), *self._sizes()] == identity:
                return
        refuse(self.problem())
        tensors = [tensor for tensor in held.values() if tensor is not None and not tensor.is_inference()]
        identity = [*map(id, held.values()), *self._sizes()]
        self._checked = (tensors, [*map(_version, tensors)], identity)

    def _sizes(self) -> tuple[int, ...]:
        return (self.out_features, self.in_features)

    def extra_repr(self) -> str:
        kept = self.values.numel() / max(1, self.in_features * self.out_features)
        return f"{self.in_features}, {self.out_features}, kept={kept:.3f}, activation={self.activation}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._checked = None  # frees the buffers that are converted now
        return super()._apply(fn, recurse)


class SparseLinear(_SparseLayer):
    """activation(x Wᵀ + bias) by the compiled kernel; the zeros of W are neither stored nor multiplied."""

    kind, rounded = "linear", ("values",)
    arrays = ("values", "columns", "counts", "starts")  # the buffers that hold the matrix
    columns: Tensor
    counts: Tensor
    starts: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> None:
        self._set(sparse_matrix.from_dense(weight), bias, activation)

    def _set(self, matrix: SparseMatrix, bias: Tensor | None, activation: str) -> None:
        super().__init__(matrix.rows, matrix.columns_in, bias, activation)
        for name in self.arrays:
            self.register_buffer(name, getattr(matrix, name))
        self.width = matrix.width

    @classmethod
    def of(cls, matrix: SparseMatrix, bias: Tensor | None, activation: str) -> SparseLinear:
        """A layer with this matrix, which is not copied."""
        layer = cls.__new__(cls)
        layer._set(matrix, bias, activation)
        return layer

    def description(self) -> dict[str, int | str]:
        sizes = {"rows": self.out_features, "columns": self.in_features, "width": self.width}
        return {**sizes, "activation": self.activation}

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
        """W as a dense matrix: a new tensor at every call."""
        return sparse_matrix.to_dense(self.matrix)

    def problem(self) -> str | None:
        return sparse_matrix.problem(self.matrix, self.bias)

    def _sizes(self) -> tuple[int, ...]:
        return (self.out_features, self.in_features, self.width)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if type(x) is Tensor and not _traced():
            self.check_buffers()
            # Without PyTorch's dispatcher, which takes longer than a small layer.
            return product(x, self.matrix, self._buffers["bias"], self.activation)
        sizes = (self.out_features, self.width)
        return sparse_linear(x, self.values, self.columns, self.counts, self.starts, self.bias, *sizes, self.activation)


class CsrLinear(_SparseLayer):
    """activation(x Wᵀ + bias) by `torch.sparse`, where there is no compiled kernel."""

    starts: Tensor
    columns: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> None:
        with quiet():
            self._set(weight.detach().float().to_sparse_csr(), bias, activation)

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

    def portable(self) -> SparseLinear:
        return SparseLinear(self.weight, self.bias, self.activation)

    @property
    def weight(self) -> Tensor:
        """W as a dense matrix: a new tensor at every call."""
        return csr_matrix(self.starts, self.columns, self.values, self.out_features, self.in_features).to_dense()

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
        if not _traced():
            self.check_buffers()
        return csr_linear(x, self.starts, self.columns, self.values, self.bias, self.out_features, self.activation)


def _traced() -> bool:
    """Whether the call is recorded or transformed (compile, export, trace, make_fx, vmap)."""
    if torch.compiler.is_compiling():
        return True
    modes: int = torch._C._len_torch_dispatch_stack()
    return modes > 0 or torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing()


def _has_tangent(x: Tensor) -> bool:
    """Whether `x` carries a derivative of forward-mode automatic differentiation."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None
