"""Ways past the usual one: weights that are changed or read while a block runs, and blocks that read one another.

Each is cut exactly or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from platon.engine.proof.discovery import heads, neurons

from .test_hostile import HEADS, HIDDEN, WIDTH, Block, FeedForward, Model, build, check_compaction


class Separate(nn.Module):
    """Attention with a matrix each for queries, keys, values and output."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.size = HEADS, WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        rows, length, _ = x.shape
        return tuple(f(x).view(rows, length, self.n_head, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def joined(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.joined(self.mixed(*self.parts(x))))


class ShuffledHeads(Separate):
    """Heads reach the output matrix in another order than they are made in."""

    def joined(self, heads: Tensor) -> Tensor:
        return super().joined(heads[:, [2, 0, 3, 1]])


class ShuffledFeatures(Separate):
    """Every head's features lie all over what the output matrix reads."""

    def joined(self, heads: Tensor) -> Tensor:
        return super().joined(heads)[..., torch.arange(WIDTH) * 7 % WIDTH]


class Windows(Separate):
    """A head sees as far as its number says."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        seen = torch.stack([(places[:, None] - places).abs() < 2**head for head in range(q.shape[1])])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class FunctionNorm(Separate):
    """A norm over the concatenated heads that is no module."""

    def joined(self, heads: Tensor) -> Tensor:
        joined = super().joined(heads)
        return F.rms_norm(joined, joined.shape[-1:])


class Decays(Separate):
    """Changes a matrix every time it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.v.weight.data.mul_(0.9)
        return super().forward(x)


class Centers(Separate):
    """Takes the mean over all rows off a matrix, in place."""

    def forward(self, x: Tensor) -> Tensor:
        self.v.weight.data.sub_(self.v.weight.data.mean(0, keepdim=True))
        return super().forward(x)


class Cached(Separate):
    """Attends to what it was given in earlier passes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[tuple[Tensor, Tensor]] = []

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache = [one for one in self.cache if len(one[0]) == len(k)] + [(k.detach(), v.detach())]
        k, v = (torch.cat([one[place] for one in self.cache], 2) for place in (0, 1))
        return super().mixed(q, k, v)


class ReadsMatrix(Separate):
    """Adds a number that depends on a matrix and its size."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.v.weight.mean()


class Transposed(FeedForward):
    """The transpose of the first matrix is used for something else as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.up.weight.T)[..., :WIDTH]


class Routed(nn.Module):
    """Each token goes to one of two feed-forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([FeedForward(), FeedForward()])

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(x[chosen == number])
        return out


class BatchNormed(FeedForward):
    """A batch norm between the two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.norm.running_mean = torch.linspace(-1, 1, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x)).transpose(1, 2)).transpose(1, 2))


class BatchScaled(FeedForward):
    """Hidden features are divided by their deviation over the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden / hidden.std())


# how many groups of heads and of neurons are proved
BLOCKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], int, int]] = {
    "heads in another order": (ShuffledHeads, FeedForward, 2, 2),
    "features in another order": (ShuffledFeatures, FeedForward, 0, 2),
    "a window for each head": (Windows, FeedForward, 0, 2),
    "a norm that is no module": (FunctionNorm, FeedForward, 0, 2),
    "a matrix that decays": (Decays, FeedForward, 0, 0),
    "a matrix that is centred": (Centers, FeedForward, 0, 2),
    "a cache": (Cached, FeedForward, 0, 0),
    "a matrix that is read": (ReadsMatrix, FeedForward, 0, 2),
    "a transpose": (Separate, Transposed, 2, 0),
    "a router": (Separate, Routed, 2, 4),
    "a batch norm": (Separate, BatchNormed, 2, 2),
    "a deviation over the batch": (Separate, BatchScaled, 2, 0),
}


def count(find: Callable[[nn.Module], list[Any]], model: nn.Module) -> int:
    try:
        return len(find(model))
    except ValueError:
        return 0


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_proved_is_cut_exactly(name: str) -> None:
    attention, feed_forward, some_heads, some_neurons = BLOCKS[name]
    model = build(attention, feed_forward)
    assert (count(heads, model), count(neurons, model)) == (some_heads, some_neurons)
    if some_heads or some_neurons:
        assert check_compaction(model) > 500


class Handing(Separate):
    """Gives its values, or its scores, on to the next block, which adds them to its own."""

    def __init__(self, scores: bool) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, x: Tensor, earlier: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.parts(x)
        made = q @ k.transpose(-1, -2) if self.scores else v
        made = made if earlier is None else made + earlier
        mixed = made.softmax(-1) @ v if self.scores else self.mixed(q, k, made)
        return self.o(self.joined(mixed)), made


class HandingBlock(Block):
    def forward(self, x: Tensor, earlier: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        given, made = self.attention(self.norm1(x), earlier)
        x = x + given
        return x + self.feed_forward(self.norm2(x)), made


class HandingModel(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x, made = self.words(tokens), None
        for block in self.blocks:
            x, made = block(x, made)
        return self.head(x)


class Sharing(Separate):
    """Attends to the keys and values that the first block left in a mapping."""

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:  # type: ignore[override]
        q, k, v = self.parts(x)
        k, v = shared.setdefault("keys and values", (k, v))
        return self.o(self.joined(self.mixed(q, k, v)))


class SharingBlock(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.norm1(x), shared)
        return x + self.feed_forward(self.norm2(x))


class SharingModel(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x, shared = self.words(tokens), dict[str, Any]()
        for block in self.blocks:
            x = block(x, shared)
        return self.head(x)


def joined(attention: Callable[[], nn.Module], block: type[Block], model: type[Model]) -> Model:
    found = build(attention)
    found.__class__ = model
    for one in found.blocks:
        one.__class__ = block
    return found


@pytest.mark.parametrize("scores", [False, True])
def test_heads_that_the_next_block_reads_are_refused(scores: bool) -> None:
    model = joined(lambda: Handing(scores), HandingBlock, HandingModel)
    assert (count(heads, model), count(neurons, model)) == (0, 2)
    assert check_compaction(model) > 500


def test_keys_that_other_blocks_find_in_a_mapping_are_not_cut() -> None:
    with pytest.raises(ValueError, match="cutting SharingModel would break it"):
        check_compaction(joined(Sharing, SharingBlock, SharingModel))


class Numbered(Separate):
    """Mixes heads in one layer of the model only."""

    layer_idx = 0

    def joined(self, heads: Tensor) -> Tensor:
        return super().joined(heads + heads.mean(1, keepdim=True) if self.layer_idx else heads)


def test_a_layer_that_differs_by_its_number_is_not_cut() -> None:
    """A layer's number is no part of its configuration, so the first one speaks for both: the comparison refuses."""
    model = build(Numbered)
    model.blocks[1].attention.layer_idx = 1
    with pytest.raises(ValueError, match="cutting Model would change its outputs"):
        check_compaction(model)


class Blended(Separate):
    """Adds a share of the mean of all heads to each."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def joined(self, heads: Tensor) -> Tensor:
        return super().joined(heads + self.share * heads.mean(1, keepdim=True))


def test_what_was_proved_with_another_number_does_not_count() -> None:
    assert (count(heads, build(lambda: Blended(0.0))), count(heads, build(lambda: Blended(0.1)))) == (2, 0)
