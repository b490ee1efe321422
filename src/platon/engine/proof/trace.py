"""Watches the matrices of a block while it runs: what each reads, in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SMALL_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
_TRANSPOSES = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t)  # type: ignore[attr-defined]
# Each product, the place and name of its matrix, and of what the matrix is multiplied with.
_PRODUCTS: dict[Any, tuple[tuple[int, str], tuple[int, str]]] = {
    F.linear: ((1, "weight"), (0, "input")),
    torch.addmm: ((2, "mat2"), (1, "mat1")),
    torch.matmul: ((1, "other"), (0, "input")),
    Tensor.matmul: ((1, "tensor2"), (0, "self")),
    Tensor.__matmul__: ((1, "other"), (0, "self")),
}
_BIASES: dict[Any, tuple[int, str]] = {F.linear: (2, "bias"), torch.addmm: (0, "input")}


@dataclass(frozen=True)
class Use:
    """One multiplication by a matrix: its name, and the features that it reads, last dimension of `x`."""

    name: str
    x: Tensor


class Watch(TorchFunctionMode):
    """While active, records every use of the given matrices and keeps all computation in float64.

    Args:
        matrices: by name; a use is seen where the parameter itself, or its transpose, is given to a product.
        change: applied to what a matrix reads before it is multiplied; `None` leaves it.
    """

    def __init__(self, matrices: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.names = {id(matrix): name for name, matrix in matrices.items()}
        self._transposes: list[Tensor] = []  # kept, so that no other tensor gets the id of one
        self.change = change
        self.uses: list[Use] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _CASTS:
            func = Tensor.double
        args = tuple(_wide(arg) for arg in args)
        kwargs = {key: _wide(value) for key, value in kwargs.items()}
        if func in _TRANSPOSES and id(args[0]) in self.names:
            turned: Tensor = func(*args, **kwargs)
            self._transposes.append(turned)
            self.names[id(turned)] = self.names[id(args[0])]
            return turned
        if func in _PRODUCTS:
            (place, key), (given, given_key) = _PRODUCTS[func]
            name = self.names.get(id(_argument(args, kwargs, place, key)))
            if name is not None:
                place, key = given, given_key
                x = _argument(args, kwargs, place, key)
                self.uses.append(Use(name, x))
                if self.change is not None:
                    x = self.change(name, x)
                    if len(args) > place:
                        args = (*args[:place], x, *args[place + 1 :])
                    else:
                        kwargs[key] = x
        return func(*args, **kwargs)


class Sketch(Watch):
    """While active, a product with a parameter gathers: the matrix counts as one with a single one in every row.

    For a pass that only has to reach every block of a model: what its blocks are called with does not depend on which
    numbers the matrices hold, and the products are nearly all that a pass through a large model costs.
    """

    def __init__(self) -> None:
        super().__init__({})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _BIASES:
            matrix, x, bias = (_argument(args, kwargs or {}, *one) for one in (*_PRODUCTS[func], _BIASES[func]))
            outputs = 1 if func is torch.addmm else 0
            if isinstance(matrix, nn.Parameter) and x.shape[-1] == matrix.shape[1 - outputs]:
                places = torch.arange(matrix.shape[outputs]) * 31 % x.shape[-1]
                made = x.index_select(-1, places)
                return made if bias is None else made + bias
        return super().__torch_function__(func, types, args, kwargs)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, key: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(key)


def _wide(value: Any) -> Any:
    """Float64 in place of a smaller float type; anything else as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value in _SMALL_FLOATS else value


@contextmanager
def steady() -> Iterator[None]:
    """Float64 by default, torch's own attention code, gradients as the caller wants, and no change of random states."""
    before, fast = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    torch.set_default_dtype(torch.float64)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.device("cpu"),
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(before)
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def frozen_norms(module: nn.Module) -> Iterator[None]:
    """Let norms pass gradients feature by feature, as if their statistics were constants.

    A norm over all heads makes each feature depend on every other one. That would hide how the heads lie; whether they
    can be cut in spite of it is for the trial to say.
    """

    def freeze(norm: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or x.shape != output.shape:
            return None
        gain = torch.where(x == 0, 0.0, output / x).detach()
        found = x * gain + (output - x * gain).detach()
        for parameter in norm.parameters(recurse=False):
            if parameter.ndim == 1 and parameter.shape[0] == x.shape[-1]:
                found = found + (parameter - parameter.detach())
        return found

    handles = [norm.register_forward_hook(freeze) for norm in module.modules() if is_norm(norm)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_norm(module: nn.Module) -> bool:
    """A leaf with vectors for parameters and nothing else: a norm, or a scale of each feature."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    own = list(module.parameters())
    return bool(own) and not list(module.children()) and all(parameter.ndim == 1 for parameter in own)
