"""Torch's own attention with fewer heads than its width has room for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FewerHeads(nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose matrices make fewer features than the model's width.

    Torch's class checks that the heads fill the width. This one reads their number from `num_heads` and their size from
    `head_dim`; inputs and outputs are the same.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        elif self.batch_first:
            same = query is key and key is value
            query = query.transpose(0, 1)
            key = query if same else key.transpose(0, 1)
            value = query if same else value.transpose(0, 1)
        length, rows, _ = query.shape
        split = [self._heads(one) for one in self._project(query, key, value)]
        mask = _merged(attn_mask, key_padding_mask, rows, self.num_heads, split[0].dtype, batched)
        scores = split[0] @ split[1].transpose(-1, -2) / self.head_dim**0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, self.dropout, self.training)
        mixed = (weights @ split[2]).permute(2, 0, 1, 3).reshape(length, rows, -1)
        found = F.linear(mixed, self.out_proj.weight, self.out_proj.bias)
        if not batched:
            found = found.squeeze(1)
        elif self.batch_first:
            found = found.transpose(0, 1)
        if not need_weights:
            return found, None
        shown = weights.mean(1) if average_attn_weights else weights
        return found, shown if batched else shown.squeeze(0)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        packed = self.in_proj_weight
        if packed is not None and query is key and key is value:
            return F.linear(query, packed, self.in_proj_bias).chunk(3, -1)
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights: Any = apart if packed is None else packed.chunk(3)
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).permute(1, 2, 0, 3)


def _merged(
    mask: Tensor | None, padding: Tensor | None, rows: int, heads: int, dtype: torch.dtype, batched: bool
) -> Tensor | None:
    """Both masks as numbers that are added to the scores."""
    found: Tensor | None = None
    if mask is not None:
        found = _added(mask, dtype)
        if found.dim() == 3:  # rows × all heads that there were; a mask for each head cannot be cut
            if found.shape[0] != rows * heads:
                raise ValueError(
                    f"the attention has {heads} heads left; a mask for each head does not fit, give one for all"
                )
            found = found.view(rows, heads, *found.shape[1:])
    if padding is not None:
        ignored = _added(padding if batched else padding.unsqueeze(0), dtype)[:, None, None, :]
        found = ignored if found is None else found + ignored
    return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return (
        torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
        if mask.dtype == torch.bool
        else mask.to(dtype)
    )


def become_fewer(module: Any) -> None:
    """Change torch's attention, or torch's layer around it, to code that runs with any number of heads."""
    if isinstance(module, nn.MultiheadAttention) and not isinstance(module, FewerHeads) and _is_usual(module):
        module.__class__ = FewerHeads
        module._qkv_same_embed_dim = False  # torch's layers ask this before they skip the attention's code


def _is_usual(module: nn.MultiheadAttention) -> bool:
    """Whether it attends to what it is given and nothing else; its heads are not known otherwise."""
    return module.bias_k is None and module.bias_v is None and not module.add_zero_attn


def shrink_attention(module: Any, share: float) -> None:
    """Leave torch's attention this share of its heads; its matrices are cut elsewhere."""
    become_fewer(module)
    module.num_heads = round(module.num_heads * share)
