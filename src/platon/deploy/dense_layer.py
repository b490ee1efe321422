"""The dense layers of a sparsified model, for few tokens, as when text is generated.

Each weight is needed once or a few times then, so that the speed of memory decides, and PyTorch reads at half of it or
less. In a decoder with a large vocabulary the output layer would otherwise take a third of the time of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from platon.deploy.inference_layer import has_tangent, is_eager
from platon.deploy.sparse_operator import kernel

_MOST_TOKENS = 8  # with more, PyTorch's products reuse what they read
_FEWEST_WEIGHTS = 1 << 15  # in smaller layers the call takes longer than the product


class DenseLinear(nn.Linear):
    """An `nn.Linear` whose product with few tokens is computed by the compiled kernel."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Linear calls it
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if weight is not None and self._is_readable(input, weight, bias):
            return kernel().dense(input, weight, bias)
        return super().forward(input)

    def _is_readable(self, x: Tensor, *held: Tensor | None) -> bool:
        """Whether the kernel computes the same: plain float32 numbers in memory, and nothing is derived from them."""
        if not is_eager(x) or not 0 < x.numel() <= _MOST_TOKENS * self.in_features or has_tangent(x):
            return False
        if torch.is_autocast_enabled("cpu") or x.shape[-1:] != (self.in_features,):
            return False
        tensors = [x, *(one for one in held if one is not None)]
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            return False
        if any(one.dtype != torch.float32 or one.device.type != "cpu" for one in tensors):
            return False
        return all(type(one) is nn.Parameter and one.is_contiguous() for one in tensors[1:])


def read_faster(model: nn.Module) -> None:
    """Let the kernel compute the products of a model's dense layers with few tokens."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= _FEWEST_WEIGHTS:
            module.__class__ = DenseLinear
