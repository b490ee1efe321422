"""Sparse linear layers: one on the compiled kernel, one on `torch.sparse`. For inference, float32, on a CPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from platon.deploy import kernel
from platon.deploy.packing import Packed, pack, unpack

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def _product(x: Tensor, packed: Packed, bias: Tensor | None, activation: str) -> Tensor:
    found = kernel.find()
    if isinstance(found, str):
        raise ValueError(f"this model needs the compiled kernel, and {found}; call sparsify on the dense model here")
    return found.linear(x, packed, bias, activation)


@torch.library.custom_op("platon::sparse_linear", mutates_args=())
def sparse_linear(
    x: Tensor,
    values: Tensor,
    columns: Tensor,
    counts: Tensor,
    starts: Tensor,
    bias: Tensor | None,
    rows: int,
    width: int,
    activation: str,
) -> Tensor:
    """activation(x Wᵀ + bias), with W as `packing.Packed` holds it: what `torch.compile` and `torch.export` see."""
    return _product(x, Packed(values, columns, counts, starts, rows, x.shape[-1], width), bias, activation)


@sparse_linear.register_fake
def _(
    x: Tensor,
    values: Tensor,
    columns: Tensor,
    counts: Tensor,
    starts: Tensor,
    bias: Tensor | None,
    rows: int,
    width: int,
    activation: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch says once a process that CSR tensors are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        yield


def _csr(starts: Tensor, columns: Tensor, values: Tensor, rows: int, columns_in: int) -> Tensor:
    with _quiet():
        return torch.sparse_csr_tensor(starts, columns, values, (rows, columns_in), check_invariants=False)


@torch.library.custom_op("platon::csr_linear", mutates_args=())
def csr_linear(
    x: Tensor, starts: Tensor, columns: Tensor, values: Tensor, bias: Tensor | None, rows: int, activation: str
) -> Tensor:
    """activation(x Wᵀ + bias) by `torch.sparse`."""
    out = torch.mm(_csr(starts, columns, values, rows, x.shape[-1]), x.reshape(-1, x.shape[-1]).t()).t()
    out = out.contiguous() if bias is None else out + bias
    return ACTIVATE[activation](out).reshape(*x.shape[:-1], rows).contiguous()


@csr_linear.register_fake
def _(
    x: Tensor, starts: Tensor, columns: Tensor, values: Tensor, bias: Tensor | None, rows: int, activation: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _check(layer: nn.Module, x: Tensor, columns: int) -> None:
    if layer.training or (x.requires_grad and torch.is_grad_enabled()):
        raise ValueError(
            "a sparse layer is for inference and was asked to train; call .eval() and use torch.no_grad(), "
            "or train the dense one"
        )
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[-1] != columns:
        raise ValueError(
            f"a sparse layer takes float32 on the CPU with {columns} features last, got {x.dtype} of shape "
            f"{tuple(x.shape)} on {x.device}; convert the input, and leave the model in float32"
        )


def _watched() -> bool:
    """Whether somebody records what is computed (compile, export, trace, make_fx), and has to see an operator."""
    if torch.compiler.is_compiling():
        return True
    modes: int = torch._C._len_torch_dispatch_stack()
    return modes > 0 or torch.jit.is_tracing()


class SparseLinear(nn.Module):
    """activation(x Wᵀ + bias) by the compiled kernel; the zeros of W are neither stored nor multiplied."""

    values: Tensor
    columns: Tensor
    counts: Tensor
    starts: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> None:
        super().__init__()
        packed = pack(weight)
        for name in ("values", "columns", "counts", "starts"):
            self.register_buffer(name, getattr(packed, name))
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self.out_features, self.in_features, self.width = packed.rows, packed.columns_in, packed.width
        self.activation = activation
        self.eval()

    @property
    def packed(self) -> Packed:
        held: Any = self._buffers  # by itself, because a module's attributes are slow to get
        parts = (held["values"], held["columns"], held["counts"], held["starts"])
        return Packed(*parts, self.out_features, self.in_features, self.width)

    @property
    def weight(self) -> Tensor:
        """W, dense again: a new tensor at every call."""
        return unpack(self.packed)

    def forward(self, x: Tensor) -> Tensor:
        _check(self, x, self.in_features)
        if type(x) is Tensor and not _watched():
            # Past the dispatcher, which takes longer than a small layer.
            return _product(x, self.packed, self._buffers["bias"], self.activation)
        sizes = (self.out_features, self.width)
        parts = (self.values, self.columns, self.counts, self.starts)
        return sparse_linear(x, *parts, self.bias, *sizes, self.activation)

    def extra_repr(self) -> str:
        return _shown(self)


class CsrLinear(nn.Module):
    """The same by `torch.sparse`, where there is no compiled kernel."""

    starts: Tensor
    columns: Tensor
    values: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        with _quiet():
            matrix = weight.detach().float().to_sparse_csr()
        # Plain tensors that are no views of a sparse one, which could be neither copied nor traced with its module.
        self.register_buffer("starts", matrix.crow_indices().clone())
        self.register_buffer("columns", matrix.col_indices().clone())
        self.register_buffer("values", matrix.values().clone())
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self.activation = activation
        self.eval()

    @property
    def weight(self) -> Tensor:
        """W, dense again: a new tensor at every call."""
        return _csr(self.starts, self.columns, self.values, self.out_features, self.in_features).to_dense()

    def forward(self, x: Tensor) -> Tensor:
        _check(self, x, self.in_features)
        return csr_linear(x, self.starts, self.columns, self.values, self.bias, self.out_features, self.activation)

    def extra_repr(self) -> str:
        return _shown(self)


def _shown(layer: SparseLinear | CsrLinear) -> str:
    kept = layer.values.numel() / max(1, layer.in_features * layer.out_features)
    return f"{layer.in_features}, {layer.out_features}, kept={kept:.3f}, activation={layer.activation}"
