"""The sparse products as operators of PyTorch, which `torch.compile`, `torch.export` and `vmap` see as one node."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from platon.deploy import sparse_kernel, sparse_matrix
from platon.deploy.sparse_kernel import SparseKernel
from platon.deploy.sparse_matrix import SparseMatrix

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def kernel() -> SparseKernel:
    """The compiled kernel, which a model with sparse layers needs."""
    found = sparse_kernel.find()
    if isinstance(found, str):
        raise ValueError(f"this model needs the compiled kernel, and {found}; call sparsify on the dense model here")
    return found


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
    """activation(x Wᵀ + bias), with the arrays of a `SparseMatrix`."""
    matrix = SparseMatrix(values, columns, counts, starts, rows, x.shape[-1], width)
    refuse(sparse_matrix.layout_problem(matrix, bias))
    return kernel().linear(x, matrix, bias, activation)


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


@torch.library.custom_op("platon::csr_linear", mutates_args=())
def csr_linear(
    x: Tensor, starts: Tensor, columns: Tensor, values: Tensor, bias: Tensor | None, rows: int, activation: str
) -> Tensor:
    """activation(x Wᵀ + bias) by `torch.sparse`."""
    out = torch.mm(csr_matrix(starts, columns, values, rows, x.shape[-1]), x.reshape(-1, x.shape[-1]).t()).t()
    out = out.contiguous() if bias is None else out + bias
    return ACTIVATE[activation](out).reshape(*x.shape[:-1], rows).contiguous()


@csr_linear.register_fake
def _(
    x: Tensor, starts: Tensor, columns: Tensor, values: Tensor, bias: Tensor | None, rows: int, activation: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _register_vmap(operator: Any) -> None:
    """Under `torch.vmap` the mapped dimension of the tokens becomes one more batch dimension."""

    @operator.register_vmap
    def _(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:]):
            raise ValueError("vmap over the weights of a sparse layer is not possible; map over its inputs alone")
        return operator(x.movedim(in_dims[0] or 0, 0), *arguments), 0


for _operator in (sparse_linear, csr_linear):
    _register_vmap(_operator)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress PyTorch's warning, given once in a process, that CSR tensors are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        yield


def csr_matrix(starts: Tensor, columns: Tensor, values: Tensor, rows: int, columns_in: int) -> Tensor:
    """A CSR tensor of these arrays, which are not checked."""
    with quiet():
        return torch.sparse_csr_tensor(starts, columns, values, (rows, columns_in), check_invariants=False)


def refuse(problem: str | None) -> None:
    """Raise an error that says what is wrong with the buffers of a sparse layer, if anything is."""
    if problem:
        raise ValueError(
            f"a sparse layer cannot compute with its buffers: {problem}; "
            "load what sparsify made, or call sparsify on the dense model again"
        )
