"""Encoder layers for tests of what is computed in one call: settings of small models, and a layer written by hand."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Rows and tokens: all at once, and in groups of rows that fill whole tiles, where all threads share the last ones.
BATCHES = [(3, 33), (40, 16)]
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
}
IDS = torch.randint(3, 99, (3, 21), generator=torch.Generator().manual_seed(0))


def prune(model: nn.Module) -> nn.Module:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight[torch.rand(weight.shape, generator=random) >= 0.3] = 0
    return model.eval()


def padding() -> Tensor:
    mask = torch.ones(3, 21, dtype=torch.int64)
    mask[1, 9:] = 0
    return mask


class Sum(nn.Module):
    """norm(layer(x) + added), with children of the same names as what takes their place speaks of."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(inputs, outputs), nn.LayerNorm(outputs)

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        return self.norm(self.layer(x) + added)


class Up(nn.Module):
    """gelu(layer(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(24, 40), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class Layer(nn.Module):
    """An encoder layer with one thing changed."""

    def __init__(self, change: str = "", heads: int = 4, made: int = 24) -> None:
        super().__init__()
        self.change, self.heads = change, heads
        self.names = ("value", "query", "key") if change == "order" else ("query", "key", "value")
        for name in self.names:
            self.add_module(name, nn.Linear(24, made))
        self.first, self.up, self.last = Sum(made, 24), Up(), Sum(40, 24)
        if change == "parameter":
            self.shift = nn.Parameter(torch.ones(24))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Any:
        x, change = hidden_states, self.change
        heads = 3 if change == "heads" else self.heads
        made = {name: getattr(self, name)(x).view(*x.shape[:2], heads, -1).transpose(1, 2) for name in self.names}
        q, k, v = made["query"], made["key"], made["value"]
        mask = None if change == "unmasked" else attention_mask
        if mask is not None and change == "inverted":
            mask = ~mask
        if change == "window":  # a token sees its neighbours alone
            place = torch.arange(x.shape[1])
            near = (place[:, None] - place).abs() < 8
            mask = near if mask is None else mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, -1e9)
        scale = 1.0 if change == "scale" else None
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, scale=scale, is_causal=change == "causal" and mask is None
        )
        attended = attended.transpose(1, 2).reshape(*x.shape[:2], -1)
        h = self.first(attended, 2 * x if change == "residual" else x)
        if change == "parameter":
            h = h * self.shift
        out = self.last(self.up(h), x if change == "other residual" else h)
        return (out,) if change == "tuple" else out
