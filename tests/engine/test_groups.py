"""Groups against a plain float64 loop over weights, written from the equations of the notes and not from the engine.

A group is a set of (matrix, row, column); which ones those are is written down here by hand for each kind of unit.
I_G = |Σ w g|, its averages as for a weight; groups are ranked by what a weight of theirs is worth, √(Ī Ū) / n.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import platon
from platon.engine.slices import Index, Slice

Place = tuple[str, int, int]
Group = list[Place]

HIDDEN, HEADS, INNER = 8, 2, 12


def make_bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    return model


def layer(number: int, rest: str) -> str:
    return f"bert.encoder.layer.{number}.{rest}.weight"


def head_groups(number: int) -> list[Group]:
    size = HIDDEN // HEADS
    groups: list[Group] = []
    for head in range(HEADS):
        mine = range(head * size, (head + 1) * size)
        group = [
            (layer(number, f"attention.self.{role}"), row, column)
            for role in ("query", "key", "value")
            for row in mine
            for column in range(HIDDEN)
        ]
        group += [(layer(number, "attention.output.dense"), row, column) for row in range(HIDDEN) for column in mine]
        groups.append(group)
    return groups


def neuron_groups(number: int) -> list[Group]:
    return [
        [(layer(number, "intermediate.dense"), neuron, column) for column in range(HIDDEN)]
        + [(layer(number, "output.dense"), row, neuron) for row in range(HIDDEN)]
        for neuron in range(INNER)
    ]


SHAPES = {"attention.self.query": (8, 8), "attention.self.key": (8, 8), "attention.self.value": (8, 8)}
SHAPES |= {"attention.output.dense": (8, 8), "intermediate.dense": (12, 8), "output.dense": (8, 12)}


def column_groups(number: int) -> list[list[Group]]:
    return [
        [[(layer(number, rest), row, column) for row in range(shape[0])] for column in range(shape[1])]
        for rest, shape in SHAPES.items()
    ]


def block_groups(number: int, height: int, width: int) -> list[list[Group]]:
    return [
        [
            [
                (layer(number, rest), row, column)
                for row in range(top, min(top + height, shape[0]))
                for column in range(left, min(left + width, shape[1]))
            ]
            for top in range(0, shape[0], height)
            for left in range(0, shape[1], width)
        ]
        for rest, shape in SHAPES.items()
    ]


#: name -> (the units, the pools of groups in the order of the ranking, how many of each pool are spared)
KINDS: dict[str, tuple[Callable[[nn.Module], platon.Units], list[list[Group]], int]] = {
    "heads": (platon.heads, [head_groups(0), head_groups(1)], 1),
    "neurons": (platon.neurons, [neuron_groups(0), neuron_groups(1)], 1),
    "heads + neurons": (
        lambda model: platon.heads(model) + platon.neurons(model),
        [head_groups(0), head_groups(1), neuron_groups(0), neuron_groups(1)],
        1,
    ),
    "none spared": (
        lambda model: platon.heads(model, spare=0) + platon.neurons(model, spare=0),
        [head_groups(0), head_groups(1), neuron_groups(0), neuron_groups(1)],
        0,
    ),
    "columns": (platon.columns, [*column_groups(0), *column_groups(1)], 0),
    "blocks": (lambda model: platon.blocks(model, (3, 5)), [*block_groups(0, 3, 5), *block_groups(1, 3, 5)], 0),
}


class Oracle:
    """One number a group, one group at a time."""

    def __init__(self, pools: list[list[Group]], spare: int, beta1: float, beta2: float, method: str) -> None:
        self.pools, self.spare, self.beta1, self.beta2, self.method = pools, spare, beta1, beta2, method
        self.smooth = [[[0.0, 0.0] for _ in pool] for pool in pools]

    def take(self, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        for pool, numbers in zip(self.pools, self.smooth, strict=True):
            for group, number in zip(pool, numbers, strict=True):
                signal = abs(sum(float(weights[m][r, c]) * float(gradients[m][r, c]) for m, r, c in group))
                number[0] = self.beta1 * number[0] + (1 - self.beta1) * signal
                number[1] = self.beta2 * number[1] + (1 - self.beta2) * abs(signal - number[0])

    def scores(self, weights: dict[str, Tensor]) -> list[list[float]]:
        if self.method == "magnitude":
            return [
                [math.fsum(abs(float(weights[m][r, c])) for m, r, c in group) / len(group) for group in pool]
                for pool in self.pools
            ]
        return [
            [math.sqrt(i) * math.sqrt(u) / len(group) for (i, u), group in zip(numbers, pool, strict=True)]
            for numbers, pool in zip(self.smooth, self.pools, strict=True)
        ]

    def keep(self, weights: dict[str, Tensor], share: float) -> list[list[bool]]:
        scores = self.scores(weights)
        total = sum(len(group) for pool in self.pools for group in pool)
        left = max(1, round(share * total))
        kept = [[False] * len(pool) for pool in self.pools]
        for pool, (numbers, own) in enumerate(zip(scores, kept, strict=True)):
            for best in sorted(range(len(numbers)), key=lambda g: (-numbers[g], g))[: self.spare]:
                own[best] = True
                left -= len(self.pools[pool][best])
        ranking = sorted((-number, p, g) for p, numbers in enumerate(scores) for g, number in enumerate(numbers))
        for _, pool, group in ranking:
            if kept[pool][group]:
                continue
            left -= len(self.pools[pool][group])
            if left < 0:
                break
            kept[pool][group] = True
        return kept


def expected_masks(oracle: Oracle, kept: list[list[bool]], units: platon.Units) -> dict[str, Tensor]:
    masks = {name: torch.zeros(matrix.shape, dtype=torch.bool) for name, matrix in units.matrices.items()}
    for pool, flags in zip(oracle.pools, kept, strict=True):
        for group, stays in zip(pool, flags, strict=True):
            for name, row, column in group:
                masks[name][row, column] = stays
    return masks


@pytest.mark.parametrize("method", ["platon", "magnitude"])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_follow_the_equations(kind: str, method: str) -> None:
    make_units, pools, spare = KINDS[kind]
    model = make_bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    oracle = Oracle(pools, spare, 0.8, 0.6, method)
    seen: dict[str, dict[str, Tensor]] = {}
    units = make_units(model)

    def look(*_: Any) -> None:
        seen["weights"] = {name: matrix.detach().clone() for name, matrix in units.matrices.items()}
        seen["gradients"] = {name: matrix.grad.clone() for name, matrix in units.matrices.items()}

    optimizer.register_step_post_hook(look)  # before the pruner's
    schedule = platon.Cubic(final=0.3, total=24, warmup=3, cooldown=6, every=1)
    score = platon.Platon(beta1=0.8, beta2=0.6, window=1) if method == "platon" else platon.Magnitude()
    pruner = platon.Pruner(model, optimizer, score=score, schedule=schedule, units=units)
    total = sum(len(group) for pool in pools for group in pool)
    assert units.count == total
    for step in range(1, 27):
        source = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 50, (4, 8), generator=source)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=torch.randint(0, 2, (4,), generator=source)).loss.backward()
        optimizer.step()
        oracle.take(seen["weights"], seen["gradients"])
        share = schedule(step)
        if share is None:
            continue
        kept = oracle.keep(seen["weights"], share) if share < 1 else [[True] * len(pool) for pool in pools]
        for name, mask in expected_masks(oracle, kept, units).items():
            assert torch.equal(pruner.masks()[name], mask), f"{name} at step {step}"
            weight = units.matrices[name].detach()
            assert torch.equal(weight, torch.where(mask, seen["weights"][name], 0)), f"{name} at step {step}"
        count = sum(
            len(g) for pool, flags in zip(pools, kept, strict=True) for g, k in zip(pool, flags, strict=True) if k
        )
        assert pruner.kept() == count / total
    assert pruner.kept() <= (0.5 if kind == "heads" else 0.4)  # one head of each layer is half of all


def test_the_longest_run_that_fits_is_kept() -> None:
    """Never more than k weights, and no group of the ranking is passed over for a smaller one behind it."""
    model = make_bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = platon.heads(model, spare=0) + platon.neurons(model, spare=0)
    for keep in (0.2, 0.5, 0.77):
        pruner = platon.Pruner(model, optimizer, score=platon.Magnitude(), schedule=platon.Constant(keep), units=units)
        model(input_ids=torch.randint(0, 50, (2, 5)), labels=torch.tensor([0, 1])).loss.backward()
        optimizer.step()
        assert round(keep * units.count) - 128 < pruner.kept() * units.count <= round(keep * units.count)
        pruner.detach()


def test_what_is_spared_stays_even_beyond_the_share() -> None:
    model = make_bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = platon.Pruner(
        model,
        optimizer,
        score=platon.Magnitude(),
        schedule=platon.Constant(0.01),
        units=platon.heads(model) + platon.neurons(model, spare=2),
    )
    model(input_ids=torch.randint(0, 50, (2, 5)), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    for number in range(2):
        masks = pruner.masks()
        assert int(masks[layer(number, "attention.output.dense")][0].sum()) == HIDDEN // HEADS
        assert int(masks[layer(number, "intermediate.dense")][:, 0].sum()) == 2


def test_gpt2_stores_inputs_first() -> None:
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    model = GPT2LMHeadModel(config)
    by_name = {groups.name: groups for groups in platon.columns(model).groups}
    matrix = model.transformer.h[0].mlp.c_fc.weight
    assert matrix.shape == (8, 32)
    groups = by_name["transformer.h.0.mlp.c_fc.weight"]
    assert groups.count == 8
    assert groups.sizes.tolist() == [32] * 8
    blocks = {groups.name: groups for groups in platon.blocks(model, (16, 4)).groups}
    assert blocks["transformer.h.0.mlp.c_fc.weight"].count == 2 * 2  # 32 outputs by 16, 8 inputs by 4


@given(data=st.data())
def test_parts_add_up_and_spread(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    row_groups, column_groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))

    def strips(length: int, count: int) -> Index:
        group = data.draw(st.lists(st.integers(-1, count - 1), min_size=length, max_size=length))
        return Index(torch.tensor(group), count)

    kind = data.draw(st.sampled_from(["rows", "columns", "both"]))
    rows = strips(height, row_groups) if kind != "columns" else None
    columns = strips(width, column_groups) if kind != "rows" else None
    part = Slice("m", nn.Parameter(torch.zeros(height, width)), rows, columns)
    values = np.round(np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(height, width)), 3)
    count = (row_groups if rows else 1) * (column_groups if columns else 1)
    numbers = torch.arange(count, dtype=torch.float64) + 10
    sums, sizes, spread = np.zeros(count), np.zeros(count), np.ones((height, width))
    for r in range(height):
        for c in range(width):
            i = 0 if rows is None else int(rows.unit[r])
            j = 0 if columns is None else int(columns.unit[c])
            if i < 0 or j < 0:
                continue
            group = i * (column_groups if columns else 1) + j
            sums[group] += values[r, c]
            sizes[group] += 1
            spread[r, c] = numbers[group]
    np.testing.assert_allclose(part.reduce(torch.tensor(values)).numpy(), sums, atol=1e-12)
    assert part.sizes.tolist() == sizes.tolist()
    assert np.array_equal(part.expand(numbers).expand(height, width).numpy(), spread)


# --- what is wrong, in one sentence -----------------------------------------------------------------------------------


def test_weights_and_groups_do_not_add_up() -> None:
    model = make_bert()
    with pytest.raises(ValueError, match="weights and heads do not add up"):
        platon.weights(model) + platon.heads(model)
    with pytest.raises(ValueError, match=r"columns and heads both have weights of 'bert\.encoder\.layer\.0"):
        platon.columns(model) + platon.heads(model)
    with pytest.raises(TypeError):
        platon.heads(model) + 3


@pytest.mark.parametrize("shape", [(0, 4), (4,), (2.5, 2)])
def test_a_block_has_two_sides(shape: Any) -> None:
    with pytest.raises(ValueError, match="shape must be two whole numbers above 0"):
        platon.blocks(make_bert(), shape)


@pytest.mark.parametrize("spare", [-1, 1.5, True])
def test_spare_is_a_count(spare: Any) -> None:
    with pytest.raises(ValueError, match="spare must be a whole number of at least 0"):
        platon.heads(make_bert(), spare)


def test_an_architecture_that_is_not_known_is_refused_by_name(net: nn.Module) -> None:
    with pytest.raises(ValueError, match="the heads and neurons of Net are not known"):
        platon.heads(net)


def test_what_is_frozen_stays() -> None:
    model = make_bert()
    model.bert.encoder.layer[0].requires_grad_(False)
    assert all("layer.1." in name for name in platon.heads(model).matrices)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="the model has no neurons that are trained in full"):
        platon.neurons(model)


def test_a_state_of_other_units_is_refused() -> None:
    model = make_bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def pruner(units: platon.Units) -> platon.Pruner:
        return platon.Pruner(
            model, optimizer, schedule=platon.Constant(0.5), units=units, score=platon.Platon(window=1)
        )

    with pytest.raises(ValueError, match="units is 'heads' in the state and 'columns' in the pruner"):
        pruner(platon.columns(model)).load_state_dict(pruner(platon.heads(model)).state_dict())
