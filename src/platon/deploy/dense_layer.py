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
        if weight is not None and _is_readable(input, weight, bias):
            return kernel().dense(input, weight, bias)
        return super().forward(input)


def _is_readable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel computes the same: few tokens that fit, in plain float32, and nothing is derived from it."""
    if not is_eager(x) or has_tangent(x) or torch.is_autocast_enabled("cpu"):
        return False
    if x.shape[-1:] != weight.shape[1:] or not 0 < x.numel() <= _MOST_TOKENS * weight.shape[1]:
        return False
    held = [weight] if bias is None else [weight, bias]
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if torch.is_grad_enabled() and any(one.requires_grad for one in (x, *held)):
        return False
    if any(one.dtype != torch.float32 or one.device.type != "cpu" for one in (x, *held)):
        return False
    return all(type(one) is nn.Parameter and one.is_contiguous() for one in held)


def read_faster(model: nn.Module) -> None:
    """Let the kernel compute the products of a model's dense layers with few tokens."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= _FEWEST_WEIGHTS:
            module.__class__ = DenseLinear
