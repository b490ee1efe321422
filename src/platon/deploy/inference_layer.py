"""What the sparse layers have in common: they check their inputs and buffers, and refuse to train."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from platon.deploy.packed import Packed
from platon.deploy.sparse_operator import refuse

_version = operator.attrgetter("_version")
_address = operator.methodcaller("data_ptr")

# Of the last check: the tensors (kept, so that their ids stay theirs), those of them that count their changes, and what
# says that they are unchanged.
_Checked = tuple[list[Tensor], list[Tensor], list[int]]


class InferenceLayer(Packed):
    """Checks the inputs at each call, and the buffers whenever they have changed since the last one."""

    values: Tensor
    bias: Tensor | None

    def __init__(self, rows: int, columns: int, bias: Tensor | None, activation: str) -> None:
        super().__init__()
        self.out_features, self.in_features = rows, columns
        self.register_buffer("bias", bias)
        self.activation = activation
        self._checked: _Checked | None = None
        self.training = False

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
        if self._checked is not None and self._identity(*self._checked[:2]) == self._checked[2]:
            return
        refuse(self.checked())

    def checked(self) -> str | None:
        """What is wrong with the buffers; if nothing is, they are not checked again until they change."""
        problem = self.problem()
        if problem is None:
            tensors = [tensor for tensor in self._buffers.values() if tensor is not None]
            counted = [tensor for tensor in tensors if not tensor.is_inference()]
            self._checked = (tensors, counted, self._identity(tensors, counted))
        return problem

    def _identity(self, tensors: list[Tensor], counted: list[Tensor]) -> list[int]:
        """Numbers that differ once a buffer is another one, was written to or lies elsewhere."""
        held = map(id, self._buffers.values())
        return [*map(_version, counted), *map(_address, tensors), *held, *self._sizes()]

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


def _has_tangent(x: Tensor) -> bool:
    """Whether `x` carries a derivative of forward-mode automatic differentiation."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def has_sparse_layers(model: nn.Module) -> bool:
    """Whether a model has layers that skip zeros, which compute in float32 alone."""
    return any(isinstance(module, InferenceLayer) for module in model.modules())
