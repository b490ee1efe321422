"""Attentions as people write them: their heads are found, and cut exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import platon
from platon.engine.proof.discovery import heads, proved_groups

from .test_hostile import HEADS, HIDDEN, WIDTH, FeedForward, build, check_compaction

SIZE = WIDTH // HEADS


class Packed(nn.Module):
    """Query, key and value from one matrix; a subclass says how they lie in it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(x))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        rows, length, _ = packed.shape
        return packed.view(rows, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)


class ByHead(Packed):
    """The three of one head lie together, as in GPT-NeoX."""

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        rows, length, _ = packed.shape
        return packed.view(rows, length, self.num_heads, 3 * self.head_dim).transpose(1, 2).chunk(3, -1)


class SizeFromWidth(Packed):
    """The size of a head is the width of the input by the number of heads, as in minGPT and nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        size = width // self.num_heads
        q, k, v = (p.view(rows, length, self.num_heads, size).transpose(1, 2) for p in self.qkv(x).split(width, 2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(size)
        scores = scores.masked_fill(self.seen[:, :, :length, :length] == 0, float("-inf")).softmax(-1)
        return self.proj((scores @ v).transpose(1, 2).contiguous().view(rows, length, width))


class Slopes(SizeFromWidth):
    """ALiBi with slopes that depend on how many heads there are."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.split(self.qkv(x))
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.num_heads + 1) / self.num_heads)
        apart = torch.arange(length)[None] - torch.arange(length)[:, None]
        scores = (q @ k.transpose(-2, -1) + (slopes.view(-1, 1, 1) * apart).to(x.dtype)).softmax(-1)
        return self.proj((scores @ v).transpose(1, 2).reshape(rows, length, -1))


class Separate(nn.Module):
    """Query, key and value apart, with much of what newer models add: a norm, part of the features turned, sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim = HEADS, SIZE
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate = nn.Linear(WIDTH, HEADS)
        self.norm = nn.RMSNorm(SIZE)
        self.sinks, self.temperature = nn.Parameter(torch.randn(HEADS)), nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2])[:, None] / torch.tensor([1.0, 10.0])
        one, other, rest = x[..., :2], x[..., 2:4], x[..., 4:]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([one * cos - other * sin, one * sin + other * cos, rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            f(x).view(rows, length, self.n_heads, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scores = self.turned(self.norm(q)) @ self.turned(self.norm(k)).transpose(-1, -2) * self.temperature
        scores = 5 * torch.tanh(scores / 5) + torch.full((length, length), float("-inf")).triu(1).to(x.dtype)
        sinks = self.sinks.view(1, -1, 1, 1).expand(rows, -1, length, 1)
        mixed = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        mixed = mixed.transpose(1, 2) * self.gate(x).sigmoid()[..., None]
        return self.o(mixed.reshape(rows, length, -1))


class Product(nn.Linear):
    """Multiplies by the transpose itself, as Falcon does."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class ByProduct(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = Product(WIDTH, 3 * WIDTH), Product(WIDTH, WIDTH)


class Grouped(nn.Module):
    """Two query heads share a key and a value; keys and values come from one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = HEADS, HEADS // 2
        self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (self.n_heads, SIZE)).transpose(1, 2)
        k, v = (p.unflatten(-1, (self.n_kv_heads, SIZE)).transpose(1, 2) for p in self.to_kv(x).chunk(2, -1))
        k, v = (p.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for p in (k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return self.to_out(torch.einsum("bhij,bhjd->bhid", scores, v).transpose(1, 2).flatten(2))


class Counted(Packed):
    """Divides by the number of heads that it has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.num_heads


class SpecialHead(Packed):
    """The third head counts three times."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(x))
        mixed = F.scaled_dot_product_attention(q, k, v)
        mixed = torch.cat([mixed[:, :2], 3 * mixed[:, 2:3], mixed[:, 3:]], 1)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class NormedQueries(Separate):
    """A layer norm over the queries of all heads: pruning a head changes the others, cutting it out changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.all(self.q(x)), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for part in parts)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Kept(Packed):
    """Keeps its values from the last pass, which hold gradients."""

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        self.last = super().split(packed)[2]
        return super().split(packed)


# kind, heads, whether the module goes on with as many heads as before, some of them empty
IDIOMS: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    "packed, in blocks": (Packed, HEADS, False),
    "packed, by head": (ByHead, HEADS, False),
    "size from the width": (SizeFromWidth, HEADS, True),
    "slopes from the number": (Slopes, HEADS, True),
    "norms, rotary, sinks, gates": (Separate, HEADS, False),
    "linears of one's own": (ByProduct, HEADS, False),
    "grouped": (Grouped, HEADS // 2, False),
    "divided by their number": (Counted, HEADS, True),
    "one special head": (SpecialHead, HEADS, True),
    "a norm over all queries": (NormedQueries, HEADS, True),
    "keeps an activation": (Kept, HEADS, False),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_heads_of_an_idiom_are_cut_exactly(name: str) -> None:
    kind, count, padded = IDIOMS[name]
    model = build(kind)
    if name == "keeps an activation":
        model(torch.zeros(2, 5, dtype=torch.int64))
    assert [group.count for group in heads(model)] == [count, count]
    assert {part.pattern.padded for part in proved_groups(model) if part.pattern.kind == "heads"} == {padded}
    assert check_compaction(model) > 2500


class PerNeuron(FeedForward):
    """An activation with a parameter for each neuron, whose class counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x).transpose(1, 2)).transpose(1, 2))


def test_a_feed_forward_whose_width_is_fixed() -> None:
    assert check_compaction(build(feed_forward=PerNeuron)) > 2500


def test_a_second_cut_of_a_padded_attention() -> None:
    """What is left after one compaction can be pruned and compacted again; inputs that nobody reads go, too."""
    model = build(SizeFromWidth)
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    sizes = []
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[:, 3] = 0.0
    for gone in (1, 0):
        group = heads(model)[0]
        with torch.no_grad():
            for part in group.slices:
                part.parameter.mul_(part.expand((torch.arange(group.count) != gone).float()))
        small = platon.compact(model)
        torch.testing.assert_close(small(tokens), model(tokens), atol=1e-5, rtol=1e-5)
        sizes.append(sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in small.parameters()))
        model = small
    assert min(sizes) >= 4 * SIZE * (WIDTH - 1)
