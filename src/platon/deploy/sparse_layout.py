"""The sparse layers of a sparsified model: described when it is saved, put in place when it is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy import sparse_kernel, sparse_matrix
from platon.deploy.layer import CsrLinear, SparseLinear
from platon.deploy.sparse_operator import ACTIVATE
from platon.engine.topology import is_conv1d

Shapes = Mapping[str, tuple[int, ...]]


def describe(model: nn.Module) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """The sizes, panel width and activation of each sparse layer, and the arrays of all of them by name."""
    layers: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear | CsrLinear):
            # Always stored in the format of the compiled kernel, which another machine may have.
            matrix = module.matrix if isinstance(module, SparseLinear) else sparse_matrix.from_dense(module.weight)
            problem = sparse_matrix.problem(matrix, module.bias)
            if problem:
                raise ValueError(f"the sparse layer {name!r} cannot be saved: {problem}")
            sizes = {"rows": matrix.rows, "columns": matrix.columns_in, "width": matrix.width}
            layers[name] = {**sizes, "activation": module.activation}
            arrays |= {f"{name}.{array}": getattr(matrix, array) for array in SparseLinear.arrays}
            arrays |= {} if module.bias is None else {f"{name}.bias": module.bias}
    return layers, arrays


def merged_activations(model: nn.Module, dense: nn.Module) -> list[str]:
    """Where a sparsified model has nothing and the dense one an activation: it became part of the layer before it."""
    original = dict(dense.named_modules())
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Identity and type(original.get(name)) is not nn.Identity
    ]


def dense_shapes(model: nn.Module, layers: Mapping[str, Mapping[str, Any]], shapes: Shapes) -> Shapes:
    """The shapes of the model's tensors with a dense matrix in place of the arrays of each sparse layer."""
    dense = dict(shapes)
    for name, layer in layers.items():
        for array in SparseLinear.arrays:
            dense.pop(f"{name}.{array}", None)
        rows, columns = _size(layer, "rows"), _size(layer, "columns")
        dense[f"{name}.weight"] = (columns, rows) if is_conv1d(_submodule(model, name)) else (rows, columns)
    return dense


def install(model: nn.Module, layers: Mapping[str, Mapping[str, Any]], merged: Iterable[str], shapes: Shapes) -> None:
    """Replace linear layers by sparse ones without contents, and merged activations by nothing."""
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        rows, columns, width = (_size(layer, key) for key in ("rows", "columns", "width"))
        activation, count = layer.get("activation"), shapes.get(f"{name}.values", ())
        if activation not in ACTIVATE or not 1 <= width <= sparse_matrix.WIDEST or len(count) != 1:
            raise ValueError(f"the manifest is damaged: the sparse layer {name!r} cannot be built from {dict(layer)}")
        matrix = sparse_matrix.unfilled(rows, columns, width, count[0])
        bias = torch.empty(rows, device="meta") if f"{name}.bias" in shapes else None
        new[_submodule(model, name)] = SparseLinear.of(matrix, bias, activation)
    for name in merged:
        new[_submodule(model, name)] = nn.Identity()
    _replace(model, new)
    skip_fast_paths(model)


def skip_fast_paths(model: nn.Module) -> None:
    """Turn off the fast path of `nn.TransformerEncoderLayer`, which reads the dense weights of its layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0


def finish(model: nn.Module) -> None:
    """Check the contents of all sparse layers; without the compiled kernel they become `torch.sparse` ones."""
    found = sparse_kernel.find()
    new: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear):
            problem = module.problem()
            if problem:
                raise ValueError(f"the weights are damaged: in the sparse layer {name!r}, {problem}")
            if isinstance(found, str):
                new[module] = CsrLinear.of(module.matrix, module.bias, module.activation)
    _replace(model, new)
    if new:
        warnings.warn(f"no compiled sparse kernel: {found}; torch.sparse takes its place and gains less", stacklevel=3)


def _replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child is not None and child in new:
                module._modules[key] = new[child]


def _size(layer: Mapping[str, Any], key: str) -> int:
    size = layer.get(key)
    if type(size) is not int or not 0 <= size < 1 << 32:
        raise ValueError(f"the manifest is damaged: a sparse layer has {size!r} {key}")
    return size


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the manifest does not fit: the model has no layer {name!r}") from None
