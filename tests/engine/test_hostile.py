"""Blocks written by hand: those whose units are separate are found, those that only look so are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import platon
from platon.engine.proof.discovery import heads, neurons, proved_groups, refusals

WIDTH, HEADS, HIDDEN = 24, 4, 40


class Attention(nn.Module):
    """Causal, with one packed matrix, as in small GPTs."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The heads' features, and the values."""
        rows, length, _ = x.shape
        size = self.c_proj.in_features // self.n_head
        q, k, v = (
            part.view(rows, length, self.n_head, size).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_head * size, 2)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True), v

    def forward(self, x: Tensor) -> Tensor:
        heads, _ = self.mix(x)
        return self.c_proj(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, attention: Callable[[], nn.Module], feed_forward: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList([Block(attention(), feed_forward()) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(attention: Callable[[], nn.Module] = Attention, feed_forward: Callable[[], nn.Module] = FeedForward) -> Model:
    torch.manual_seed(0)
    model = Model(attention, feed_forward).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def check_compaction(model: nn.Module) -> int:
    """Zero half of the units that are found: the outputs of the compact model stay; how many weights it has less."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in proved_groups(model):
            group = next(g for find in (heads, neurons) for g in found(find, model) if g.name == part.name)
            kept = torch.rand(group.count, generator=random) < 0.5
            kept[0] = True
            for matrix in group.slices:
                matrix.parameter.mul_(matrix.expand(kept.float()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = platon.compact(model)
    tokens = torch.randint(0, 50, (2, 13), generator=random)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), small(tokens), atol=1e-5, rtol=1e-5)
    return sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in small.parameters())


def found(find: Callable[[nn.Module], list[platon.engine.slices.Group]], model: nn.Module) -> list[object]:
    try:
        return list(find(model))
    except ValueError:
        return []


def test_a_small_gpt() -> None:
    model = build()
    assert [(group.name, group.count) for group in heads(model)] == [(f"blocks.{n}.attention", HEADS) for n in range(2)]
    assert [group.count for group in neurons(model)] == [HIDDEN, HIDDEN]
    assert refusals(model) == {}
    assert check_compaction(model) > 1000


class Gated(nn.Module):
    """Gate and values in one matrix, the halves one after the other or in turns."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.turns = turns
        self.both, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(x)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.turns else both.chunk(2, -1)
        return self.down(F.silu(gate) * up)


@pytest.mark.parametrize("turns", [False, True])
def test_packed_gate_and_up(turns: bool) -> None:
    model = build(feed_forward=lambda: Gated(turns))
    rows = neurons(model)[0].slices[0].rows
    assert rows is not None
    assert (rows.unit == 3).nonzero().view(-1).tolist() == ([6, 7] if turns else [3, HIDDEN + 3])
    assert check_compaction(model) > 1000


class Interleaved(Attention):
    """Query, key and value of one head lie together, and all heads share one more: multi-query."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, WIDTH + 2 * WIDTH // HEADS)

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, length, _ = x.shape
        size = WIDTH // HEADS
        q, k, v = self.c_attn(x).split([self.n_head * size, size, size], 2)
        q = q.view(rows, length, self.n_head, size).transpose(1, 2)
        k, v = k[:, None].expand(-1, self.n_head, -1, -1), v[:, None].expand(-1, self.n_head, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True), v


def test_multi_query_heads_share_keys_and_values() -> None:
    model = build(Interleaved)
    group = heads(model)[0]
    rows = group.slices[0].rows
    assert group.count == HEADS
    assert rows is not None
    assert (rows.unit < 0).nonzero().view(-1).tolist() == list(range(WIDTH, WIDTH + 2 * WIDTH // HEADS))
    assert check_compaction(model) > 1000


# --- refused ----------------------------------------------------------------------------------------------------------


class MixedHeads(Attention):
    """Talking heads: what one head gives reaches the others before the output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Parameter(torch.randn(HEADS, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        heads, _ = self.mix(x)
        return self.c_proj(torch.einsum("bhtd,hg->btgd", heads, self.talk).flatten(2))


class NormedHeads(Attention):
    """A norm over the concatenated heads."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.norm(self.mix(x)[0].transpose(1, 2).flatten(2)))


class ReadTwice(Attention):
    """The values are read by a second matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads, values = self.mix(x)
        return self.c_proj(heads.transpose(1, 2).flatten(2)) + self.side(values.transpose(1, 2).flatten(2))


class UsedTwice(Attention):
    """One matrix makes the heads of two attentions in a row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class SometimesMixed(Attention):
    """Adds the mean of all heads to each, for some inputs only."""

    def __init__(self, when: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        heads, _ = self.mix(x)
        if self.when(x):
            heads = heads + heads.mean(1, keepdim=True)
        return self.c_proj(heads.transpose(1, 2).flatten(2))


class Remembers(Attention):
    """Adds what it gave to the last batch of this shape."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        heads, _ = self.mix(x)
        if self.last is not None and self.last.shape == heads.shape:
            heads = heads + 0.1 * self.last.mean(1, keepdim=True)
        self.last = heads.detach()
        return self.c_proj(heads.transpose(1, 2).flatten(2))


class ExtraKeys(nn.Module):
    """Torch's attention with a key of its own beside those that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Leaky(Attention):
    """All that the packed matrix makes is averaged and added: a short way past the output matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.c_attn(x).mean(-1, keepdim=True)


HOSTILE_HEADS: dict[str, Callable[[], nn.Module]] = {
    "mixed afterwards": MixedHeads,
    "a layer norm over all heads": lambda: NormedHeads(nn.LayerNorm),
    "an RMS norm over all heads": lambda: NormedHeads(nn.RMSNorm),
    "read elsewhere": ReadTwice,
    "used twice": UsedTwice,
    "averaged": Leaky,
    "mixed in long inputs": lambda: SometimesMixed(lambda x: x.shape[1] > 16),
    "mixed for one token": lambda: SometimesMixed(lambda x: x.shape[1] == 1),
    "mixed for one row": lambda: SometimesMixed(lambda x: x.shape[0] == 1),
    "mixed where the mean is above 0": lambda: SometimesMixed(lambda x: bool(x.mean() > 0)),
}


@pytest.mark.parametrize("name", HOSTILE_HEADS)
def test_heads_that_are_not_separate_are_refused(name: str) -> None:
    model = build(HOSTILE_HEADS[name])
    with pytest.raises(ValueError, match=r"Model are not known: no heads could be proved \(blocks\.0\.attention"):
        heads(model)
    assert {"blocks.0.attention.c_attn.weight", "blocks.1.attention.c_proj.weight"} <= refusals(model).keys()
    assert len(neurons(model)) == 2
    check_compaction(model)


class Hostile(FeedForward):
    """A feed-forward whose hidden features are changed by a function of all of them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.change(F.gelu(self.up(x))))


class SharedFeedForward(FeedForward):
    """Applied twice in a row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + super().forward(x))


class ReturnedFeedForward(FeedForward):
    """The hidden features also reach the output without the second matrix."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden) + hidden[..., :WIDTH]


def strongest(hidden: Tensor) -> Tensor:
    return hidden * (hidden >= hidden.topk(8, -1).values[..., -1:])


HOSTILE_NEURONS: dict[str, Callable[[], nn.Module]] = {
    "softmax over the neurons": lambda: Hostile(lambda hidden: hidden.softmax(-1)),
    "only the strongest": lambda: Hostile(strongest),
    "rolled along": lambda: Hostile(lambda hidden: hidden + hidden.roll(1, -1)),
    "sorted": lambda: Hostile(lambda hidden: hidden.sort(-1).values),
    "random": lambda: Hostile(lambda hidden: F.dropout(hidden, 0.5, training=True)),
    "applied twice": SharedFeedForward,
    "read elsewhere": ReturnedFeedForward,
}


@pytest.mark.parametrize("name", HOSTILE_NEURONS)
def test_neurons_that_are_not_separate_are_refused(name: str) -> None:
    model = build(feed_forward=HOSTILE_NEURONS[name])
    with pytest.raises(ValueError, match="Model are not known: no neurons could be proved"):
        neurons(model)
    # Neighbours that depend on each other may be proved as one larger unit; compaction then has to be exact.
    larger = {f"{group.block}.{side.path}" for group in proved_groups(model) for side in group.pattern.matrices}
    judged = refusals(model).keys() | larger
    assert {"blocks.0.feed_forward.up.weight", "blocks.1.feed_forward.down.weight"} <= judged
    if name != "random":
        check_compaction(model)


def test_a_forward_of_the_instance_is_tried() -> None:
    """A block whose forward pass was replaced after it was built is judged by the new one.

    This one calls a method of the block that it was taken from, which a copy for a trial cannot follow.
    """
    model = build()
    for block in model.blocks:
        attention = block.attention
        plain = attention.forward
        attention.forward = lambda x, plain=plain: plain(x) / 2 + x.mean()  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no heads or neurons could be proved"):
        platon.compact(model)


class Nosy(Model):
    """Reads a matrix of its first block, and how many rows it has."""

    def forward(self, tokens: Tensor) -> Tensor:
        up = self.blocks[0].feed_forward.up
        return super().forward(tokens) + up.weight.mean() * up.out_features**2


def test_a_model_that_reads_the_insides_of_its_blocks_is_refused() -> None:
    """The proof is of blocks; what reads them from outside shows when the compact model is compared."""
    model = build()
    model.__class__ = Nosy
    with torch.no_grad():
        model.blocks[0].feed_forward.down.weight[:, :5] = 0
    with pytest.raises(ValueError, match="cutting Nosy would change its outputs"):
        platon.compact(model)


@pytest.mark.parametrize("kind", [Remembers, ExtraKeys])
def test_blocks_that_are_not_understood_are_refused(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"run again|does not use it"):
        heads(build(kind))


class Wrapper(nn.Module):
    """Around a model of transformers; what it computes from the model's outputs is its own affair."""

    def __init__(self, attentions: bool) -> None:
        super().__init__()
        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
        self.inner = transformers.BertModel(
            transformers.BertConfig(**small, vocab_size=50, attn_implementation="eager")
        )
        self.attentions = attentions

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out = self.inner(input_ids, attention_mask, output_attentions=True)
        states: Tensor = out.last_hidden_state
        return states + out.attentions[-1].mean(1).sum(1)[..., None] if self.attentions else states


def test_a_wrapper_that_reads_attention_maps_is_refused() -> None:
    """Its heads are proved, and it averages over them: seen when the compact model is compared."""
    torch.manual_seed(0)
    assert check_compaction(Wrapper(attentions=False).eval()) > 1000
    with pytest.raises(ValueError, match="cutting Wrapper would change its outputs"):
        check_compaction(Wrapper(attentions=True).eval())


def test_a_hook_that_mixes_heads_is_seen() -> None:
    model = build()
    model.blocks[0].attention.c_attn.register_forward_hook(lambda module, args, out: out + out.mean(-1, keepdim=True))
    with pytest.raises(ValueError, match="cutting Model would change its outputs"):
        check_compaction(model)
