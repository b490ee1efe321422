"""Attention by the compiled kernel, for the models of transformers whose layers are sparse.

Once the products are sparse, PyTorch's attention takes a third of the time, and two threads share it badly. Models of
transformers look their attention up by name at every call. So the function that they find under "sdpa" is replaced by
one that computes the same, for the modules of sparsified models; all others get the original one.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy.inference_layer import is_eager
from platon.deploy.sparse_operator import kernel
from platon.deploy.sparse_structure import MASKS

_NAME = "sdpa"
_MARK = "attends_by_kernel"  # an attribute of the modules that do
# Of these the function under "sdpa" reads the first three alone; a window is in the mask where it leaves out a key.
_KNOWN = {"scaling", "is_causal", "position_bias", "use_cache", "position_ids", "sliding_window"}
FEWEST_QUERIES = 6  # the kernel reorders the keys first, which does not pay off for fewer
MOST_KEYS = 1024  # those of one head then fit in the second-level cache


def use_kernel(model: nn.Module) -> None:
    """Let the attention of a sparsified model, if it is one of transformers, be computed by the kernel."""
    if "transformers" in sys.modules:
        _register()
        for module in model.modules():
            if module._modules:
                module.__dict__[_MARK] = True


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS[_NAME]

    @functools.wraps(original)
    def attention(module: nn.Module, *inputs: Any, **settings: Any) -> tuple[Tensor, None]:
        found = _attend(module, *inputs, **settings) if _MARK in module.__dict__ and len(inputs) == 4 else None
        if found is not None:
            return found, None
        result: tuple[Tensor, None] = original(module, *inputs, **settings)
        return result

    AttentionInterface.register(_NAME, attention)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    **settings: Any,
) -> Tensor | None:
    """What the kernel computes; `None`: more is asked for than softmax(scale · q kᵀ + mask) v, or it cannot be read."""
    if not is_eager(query) or not all(map(_is_readable, (query, key, value))):
        return None
    asked = {name for name, own in settings.items() if own is not None and own is not False}
    sharing = getattr(module, "num_key_value_groups", 1)  # heads that have the same keys and values
    if dropout or not asked <= _KNOWN or type(sharing) is not int or sharing < 1:
        return None
    rows, heads, queries, features = query.shape
    # Keys and values that PyTorch would broadcast over rows or heads lie closer together than the kernel reads.
    fit = key.shape[:2] == (rows, heads // sharing) and heads % sharing == 0 and key.shape[3] == features
    if not fit or value.shape[:3] != key.shape[:3] or queries < FEWEST_QUERIES or key.shape[2] > MOST_KEYS:
        return None
    is_causal = False
    if mask is None:  # transformers' rule: without a mask, a decoder's attention is causal
        asked_for = settings.get("is_causal")
        is_causal = bool(getattr(module, "is_causal", True) if asked_for is None else asked_for)
        if is_causal and queries != key.shape[2]:
            return None
    shape = rows, heads, queries, key.shape[2]
    if mask is not None and (mask := expanded(mask, shape)) is None:
        return None
    bias = settings.get("position_bias")
    if bias is not None:
        bias = expanded(bias, shape)
        if bias is None or bias.dtype != torch.float32:
            return None
        mask, is_causal = _biased(mask, bias, is_causal), False
    scale = settings.get("scaling")
    return kernel().attend(query, key, value, mask, features**-0.5 if scale is None else scale, is_causal=is_causal)


def _biased(mask: Tensor | None, bias: Tensor, is_causal: bool) -> Tensor:
    """What is added to the scores where a bias depends on positions, as in T5."""
    if mask is None and is_causal:
        mask = torch.ones(bias.shape[2:], dtype=torch.bool).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def expanded(mask: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The mask for each row, head, query and key; `None`: it is of another kind."""
    if type(mask) is not Tensor or mask.dtype not in MASKS or mask.device.type != "cpu" or mask.dim() != 4:
        return None
    fits = all(own in (1, wanted) for own, wanted in zip(mask.shape, shape, strict=True))
    return mask.detach().expand(shape) if fits else None


def _is_readable(tensor: Tensor) -> bool:
    """Whether the kernel can read it, and no gradient is asked for."""
    if type(tensor) is not Tensor or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        return False
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    return tensor.dim() == 4 and (tensor.stride(3) == 1 or tensor.shape[3] == 1)
