"""What the sparse layers have in common: they check their inputs and buffers, and refuse to train."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from platon.deploy.packed import Packed
from platon.deploy.sparse_operator import refuse

_version = operator.attrgetter("_version")
_address = operator.methodcaller("data_ptr")


class Snapshot:
    """Remembers the tensors that modules hold, to tell whether one was replaced, written to or moved since.

    PyTorch counts the in-place changes of a tensor in `_version`; tensors made in inference mode have no such count, so
    that a change to one of them goes unnoticed.

    Args:
        holders: the `_parameters` or `_buffers` of modules.
    """

    def __init__(self, *holders: Mapping[str, Tensor | None]) -> None:
        self._holders = holders
        held = [tensor for holder in holders for tensor in holder.values() if tensor is not None]
        self._tensors = held  # kept, so that their ids stay theirs
        self._counted = [tensor for tensor in held if not tensor.is_inference()]
        self._numbers = self._read()

    def is_current(self) -> bool:
        return self._read() == self._numbers

    def _read(self) -> list[int]:
        held = itertools.chain.from_iterable([holder.values() for holder in self._holders])
        return [*map(id, held), *map(_address, self._tensors), *map(_version, self._counted)]


class InferenceLayer(Packed):
    """Checks the inputs at each call, and the buffers whenever they have changed since the last one."""

    values: Tensor
    bias: Tensor | None
    computes_together = False  #: whether the layers of a block take fewer calls than there are layers

    def __init__(self, rows: int, columns: int, bias: Tensor | None, activation: str) -> None:
        super().__init__()
        self.out_features, self.in_features = rows, columns
        self.register_buffer("bias", bias)
        self.activation = activation
        self._checked: tuple[Snapshot, tuple[int, ...]] | None = None  # the buffers and sizes that were checked last
        self.training = False

    def check(self, x: Tensor) -> None:
        """Refuse tokens or buffers that the product cannot be computed with."""
        if self.training or (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x):
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

        A change that a `Snapshot` does not notice is harmless: the kernel stays inside its arrays all the same.
        """
        if self._checked is None or not self._checked[0].is_current() or self._checked[1] != self._sizes():
            refuse(self.checked())

    def checked(self) -> str | None:
        """What is wrong with the buffers; if nothing is, they are not checked again until they change."""
        problem = self.problem()
        if problem is None:
            self._checked = Snapshot(self._buffers), self._sizes()
        return problem

    def _sizes(self) -> tuple[int, ...]:
        return (self.out_features, self.in_features)

    def extra_repr(self) -> str:
        kept = self.values.numel() / max(1, self.in_features * self.out_features)
        return f"{self.in_features}, {self.out_features}, kept={kept:.3f}, activation={self.activation}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._checked = None  # frees the buffers that are converted now
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checked": None}  # a copy has buffers of its own


def copied(bias: Tensor | None) -> Tensor | None:
    """The bias of a dense layer for one that stays as it is, whatever happens to the dense one."""
    return None if bias is None else bias.detach().float().clone()


def change_count(x: Tensor) -> int | None:
    """How often a tensor was changed in place; `None`: it is one of inference mode, which does not count."""
    return None if x.is_inference() else x._version


def is_eager(x: Tensor) -> bool:
    """Whether the call is neither recorded nor transformed (compile, export, trace, make_fx, vmap)."""
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    modes: int = torch._C._len_torch_dispatch_stack()
    return modes == 0 and torch._C._functorch.peek_interpreter_stack() is None and not torch.jit.is_tracing()


def has_tangent(x: Tensor) -> bool:
    """Whether `x` carries a derivative of forward-mode automatic differentiation."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def has_sparse_layers(model: nn.Module) -> bool:
    """Whether a model has layers that skip zeros, which compute in float32 alone."""
    return any(isinstance(module, InferenceLayer) for module in model.modules())
