"""Unusual blocks: orders, gates, tables and branches that look like units and are not, or the other way round.

Each is cut exactly or refused; the table says which.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from platon.engine.proof.discovery import heads, neurons

from .test_hostile import HEADS, HIDDEN, WIDTH, FeedForward, build, check_compaction
from .test_side_channels import Separate, count

# --- attentions -------------------------------------------------------------------------------------------------------


class BufferOrder(Separate):
    """Heads reach the output matrix in an order that a buffer holds: numbers, or a matrix of zeros and ones."""

    def __init__(self, matrix: bool) -> None:
        super().__init__()
        order = torch.tensor([2, 0, 3, 1])
        self.register_buffer("order", torch.eye(HEADS)[order] if matrix else order)

    def joined(self, heads: Tensor) -> Tensor:
        if self.order.ndim == 2:
            return super().joined(torch.einsum("gh,bhtd->bgtd", self.order, heads))
        return super().joined(heads[:, self.order])


class Twins(nn.Module):
    """Two attentions whose heads one output matrix reads: one after the other, or their sum."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.summed = summed
        self.one, self.other = Separate(), Separate()
        self.other.o = self.one.o

    def forward(self, x: Tensor) -> Tensor:
        if not self.summed:
            return self.one(x) + self.other(x.flip(1))
        made = [twin.joined(twin.mixed(*twin.parts(x))) for twin in (self.one, self.other)]
        return self.one.o(made[0] + made[1])


class GatedByHeads(Separate):
    """A gate for each head, computed from the features of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixed(*self.parts(x))
        gates = self.gate(self.joined(mixed)).sigmoid().transpose(1, 2)
        return self.o(self.joined(mixed * gates[..., None]))


class AcrossHeads(Separate):
    """The softmax is over the heads, not over the positions."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(1) @ v


class ReversedScale(Separate):
    """A scale for every feature of the queries, which lie the other way round: the last head's come first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mixed(q * self.scale.view(-1, self.size).flip(0)[:, None], k, v)


class FixedGates(Separate):
    """A gate for each head that is no parameter: a buffer of floats, a buffer of switches, a list."""

    def __init__(self, gates: Tensor | list[float]) -> None:
        super().__init__()
        if isinstance(gates, Tensor):
            self.register_buffer("gates", gates)
        else:
            self.gates = gates

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # A list that is longer than the heads that are left is cut short without a word.
        gates = self.gates if isinstance(self.gates, Tensor) else torch.tensor(self.gates[: q.shape[1]])
        return super().mixed(q, k, v) * gates[:, None, None].to(q.dtype)


class Difference(Separate):
    """Differential attention: the weights of a pair of heads are subtracted, so that the pair is the unit."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.transpose(-1, -2)).softmax(-1).unflatten(1, (-1, 2))
        return (weights[:, :, 0] - 0.5 * weights[:, :, 1]).repeat_interleave(2, 1) @ v


class FirstValues(Separate):
    """The values of the first head are added to what every head gives."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mixed(q, k, v) + v[:, :1]


class BranchOnCount(Separate):
    """Mixes heads when a certain number of them is there."""

    def __init__(self, when: Callable[[int], bool]) -> None:
        super().__init__()
        self.when = when

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = super().mixed(q, k, v)
        return mixed + mixed.mean(1, keepdim=True) if self.when(q.shape[1]) else mixed


class ColdCache(Separate):
    """Keeps its keys and values, and reads them only when it is told to."""

    reading = False

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.reading:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        self.keys, self.values = k.detach(), v.detach()
        return super().mixed(q, k, v)


class EmptyTable(Separate):
    """Has a parameter without numbers, as where no part of a head is turned by its position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(HEADS, 1, 0))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mixed(*(torch.cat([part, self.table.expand(*part.shape[:3], 0)], -1) for part in (q, k)), v)


# --- feed-forwards ----------------------------------------------------------------------------------------------------


class InGroups(FeedForward):
    """Neurons are changed by a function of the five of their group."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.change(self.up(x).unflatten(-1, (-1, 5))).flatten(-2))


class Swapped(FeedForward):
    """The halves change places between the two matrices."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.gelu(self.up(x)).chunk(2, -1)
        return self.down(torch.cat([other, one], -1))


class CrossedGate(nn.Module):
    """The gate of a neuron is that of its mirror image."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up.flip(-1))


class SideBranch(FeedForward):
    """A branch of low rank reads the same neurons; its four inner features are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden) + self.b(self.a(hidden))


class Maxout(FeedForward):
    """A neuron is the larger one of two neighbouring rows."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).unflatten(-1, (-1, 2)).amax(-1))


class CountsZeros(FeedForward):
    """Adds the share of neurons that are zero: a neuron that is pruned counts, one that is cut out does not."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x))
        return self.down(hidden) + (hidden == 0).to(hidden.dtype).mean(-1, keepdim=True)


class SlopeList(FeedForward):
    """A slope for each neuron in a list, of which as many are taken as there are neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = [0.1 * place for place in range(HIDDEN)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden.relu() * torch.tensor(self.slopes[: hidden.shape[-1]], dtype=hidden.dtype))


# The block, and how many groups of heads and of neurons are proved. Neurons in groups are units of several features, as
# heads are, so they count as heads.
ATTENTIONS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "an order in a buffer": (lambda: BufferOrder(matrix=False), 2),
    "an order as a matrix": (lambda: BufferOrder(matrix=True), 2),
    "one output matrix for two attentions": (lambda: Twins(summed=False), 0),
    "one output matrix for a sum of heads": (lambda: Twins(summed=True), 2),
    "gates from all heads": (GatedByHeads, 0),
    "a softmax over heads": (AcrossHeads, 0),
    "scales the other way round": (ReversedScale, 2),
    "gates in a buffer": (lambda: FixedGates(torch.tensor([1.0, 0.5, 2.0, 0.25])), 2),
    "switches in a buffer": (lambda: FixedGates(torch.tensor([True, False, True, True])), 0),
    "gates in a list": (lambda: FixedGates([1.0, 0.5, 2.0, 0.25]), 2),
    "pairs of heads": (Difference, 2),
    "values of the first head": (FirstValues, 0),
    "another result with three heads": (lambda: BranchOnCount(lambda heads: heads == 3), 2),
    "another result with an odd number of heads": (lambda: BranchOnCount(lambda heads: heads % 2 == 1), 2),
    "a cache that is not read": (ColdCache, 2),
    "a parameter without numbers": (EmptyTable, 2),
}
FEED_FORWARDS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "softmax in groups": (lambda: InGroups(lambda groups: groups.softmax(-1)), 4, 0),
    "a norm in groups": (lambda: InGroups(lambda groups: F.layer_norm(groups, groups.shape[-1:])), 4, 0),
    "halves in the other order": (Swapped, 2, 0),
    "gates in the other order": (CrossedGate, 2, 0),
    "a branch of low rank": (SideBranch, 2, 2),
    "the larger one of two": (Maxout, 2, 2),
    "zeros are counted": (CountsZeros, 2, 0),
    "slopes in a list": (SlopeList, 2, 2),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_unusual_attention(name: str) -> None:
    attention, some_heads = ATTENTIONS[name]
    model = build(attention)
    assert (count(heads, model), count(neurons, model)) == (some_heads, 2)
    assert check_compaction(model) > 1000


def test_blocks_that_differ_in_a_buffer_are_tried_each() -> None:
    """What was proved with one order of heads says nothing about another one."""

    def of_first_head(model: nn.Module) -> list[list[int]]:
        return [(group.slices[0].rows.unit == 0).nonzero().view(-1).tolist() for group in heads(model)]  # type: ignore[union-attr]

    model = build(lambda: BufferOrder(matrix=False))
    assert of_first_head(model) == [list(range(12, 18))] * 2
    model.blocks[1].attention.order = torch.tensor([1, 0, 3, 2])
    assert of_first_head(model) == [list(range(12, 18)), list(range(6, 12))]
    assert check_compaction(model) > 1000
    matrix = build(lambda: BufferOrder(matrix=True))
    matrix.blocks[1].attention.order = torch.eye(HEADS)
    assert of_first_head(matrix) == [list(range(12, 18)), list(range(6))]


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_an_unusual_feed_forward(name: str) -> None:
    feed_forward, some_heads, some_neurons = FEED_FORWARDS[name]
    model = build(feed_forward=feed_forward)
    assert (count(heads, model), count(neurons, model)) == (some_heads, some_neurons)
    assert check_compaction(model) > 1000
