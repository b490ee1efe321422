"""What is wrong with a pruner's state is said in one sentence, and nothing changes then."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import platon
from platon.engine.methods import METHODS


def trained(net: nn.Module, score: platon.Score, steps: int = 3) -> tuple[platon.Pruner, optim.Optimizer]:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, score=score, schedule=platon.Constant(0.5))
    for step in range(steps):
        net(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return pruner, optimizer


DAMAGE: list[tuple[str, Any, str]] = [
    ("step_count", -5, "step_count must be a whole number of at least 0, got -5"),
    ("step_count", 2.0, "step_count must be a whole number of at least 0, got 2.0"),
    ("step_count", "3", "step_count must be a whole number of at least 0, got '3'"),
    ("skipped_count", None, "skipped_count must be a whole number of at least 0, got None"),
    ("kept_count", -1, "kept_count must be a whole number of at least 0 and at most 768, got -1"),
    ("kept_count", 769, "kept_count must be a whole number of at least 0 and at most 768, got 769"),
    ("kept_count", 383, "its masks keep 384 weights, but kept_count is 383"),
    ("keep", math.nan, "keep must be in (0, 1], got nan; give the share of weights that stays"),
    ("keep", [0.5], "keep must be in (0, 1], got [0.5]; give the share of weights that stays"),
    ("cut", [1.0], "cut must be a number, got [1.0]"),
    ("cut", math.nan, "cut must be a number, got nan"),
    ("steering", {"penalty": 1.0}, "steering must hold the numbers penalty, above, slope, got {'penalty': 1.0}"),
    ("steering", None, "steering must be a mapping of names, got None"),
    ("settings", [], "settings must be a mapping of names, got []"),
    ("tensors", None, "tensors must be a mapping of names, got None"),
    ("format", 99, "its format is 99, this version of platon reads 2"),
]


@pytest.mark.parametrize("score", [platon.Platon(window=1), platon.HardConcrete()], ids=["platon", "l0"])
@pytest.mark.parametrize(("key", "value", "sentence"), DAMAGE, ids=[f"{key}={value}" for key, value, _ in DAMAGE])
def test_all_or_nothing(net: nn.Module, score: platon.Score, key: str, value: Any, sentence: str) -> None:
    pruner, _ = trained(net, score)
    good = copy.deepcopy(pruner.state_dict())
    other = {**good, "tensors": {name: torch.zeros_like(tensor) for name, tensor in good["tensors"].items()}}
    other["tensors"] |= {name: tensor for name, tensor in good["tensors"].items() if name.endswith("mask")}
    weights = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="this state does not fit the pruner: ") as refusal:
        pruner.load_state_dict({**other, key: value})
    if (key, value) != ("kept_count", 383) or pruner.kept() == 0.5:
        assert str(refusal.value) == f"this state does not fit the pruner: {sentence}"
    now = pruner.state_dict()
    assert {**now, "tensors": None} == {**good, "tensors": None}
    assert all(torch.equal(now["tensors"][name], tensor) for name, tensor in good["tensors"].items())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite(net: nn.Module, bad: float) -> None:
    pruner, _ = trained(net, platon.Platon(window=1))
    state = copy.deepcopy(pruner.state_dict())
    state["tensors"]["blocks.1.up.weight:uncertainty"][7] = bad
    with pytest.raises(ValueError, match=r"tensor 'blocks\.1\.up\.weight:uncertainty' holds a number that is NaN or"):
        pruner.load_state_dict(state)


@pytest.mark.parametrize("change", [lambda t: t.to("meta"), lambda t: t.to_sparse()], ids=["meta", "sparse"])
@pytest.mark.parametrize("name", ["mask", "uncertainty"])
def test_tensors_without_numbers_in_memory(net: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    pruner, _ = trained(net, platon.Platon(window=1))
    state = copy.deepcopy(pruner.state_dict())
    state["tensors"][f"blocks.1.up.weight:{name}"] = change(state["tensors"][f"blocks.1.up.weight:{name}"])
    with pytest.raises(ValueError, match=rf"tensor 'blocks\.1\.up\.weight:{name}' is not a dense tensor with numbers"):
        pruner.load_state_dict(state)


SCORES = [method.score() for method in METHODS.values() if method.score is not None]


@pytest.mark.parametrize("score", [*SCORES, platon.Magnitude(scope="matrix")], ids=repr)
def test_a_nan_among_the_weights_is_named(net: nn.Module, score: platon.Score) -> None:
    """Before anything is zeroed: a pruned NaN would hide that the model is broken."""
    _, optimizer = trained(net, score)
    with torch.no_grad():
        net.blocks[1].down.weight[0, 0] = math.nan
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"a score of 'blocks\.1\.down\.weight' is NaN, so there is no order"):
        optimizer.step()
    assert bool(net.blocks[1].down.weight[0, 0].isnan())


@pytest.mark.parametrize("window", [1, 2])
def test_a_product_that_overflows_saturates(net: nn.Module, window: int) -> None:
    pruner, optimizer = trained(net, platon.Platon(window=window))
    for _ in range(4):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            net.blocks[0].up.weight[0, 0] = 1e30
        net.blocks[0].up.weight.grad[0, 0] = 1e15  # type: ignore[union-attr]
        optimizer.step()
        assert all(bool(tensor.isfinite().all()) for tensor in pruner.state_dict()["tensors"].values())
        assert bool(pruner.masks()["blocks.0.up.weight"][0, 0])


def test_one_decision_for_all_pruners_of_an_optimizer(net: nn.Module) -> None:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    pruners = [
        platon.Pruner(
            net,
            optimizer,
            score=platon.Platon(window=1),
            schedule=platon.Constant(0.5),
            units=platon.weights(net, include=f"blocks.{i}"),
            on_nonfinite="skip",
        )
        for i in range(2)
    ]
    for step in range(4):
        net(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        if step == 2:
            net.head.weight.grad.fill_(math.inf)
        optimizer.step()
        optimizer.zero_grad()
    for pruner in pruners:
        assert (pruner.step_count, pruner.skipped_count) == (3, 1)
        assert all(bool(tensor.isfinite().all()) for tensor in pruner.state_dict()["tensors"].values())
        pruner.detach()
    assert not optimizer._optimizer_step_pre_hooks


def test_of_several_pruners_one_that_raises_decides(net: nn.Module) -> None:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    for i, policy in enumerate(("skip", "raise")):
        units = platon.weights(net, include=f"blocks.{i}")
        platon.Pruner(net, optimizer, schedule=platon.Constant(0.5), units=units, on_nonfinite=policy)
    net(torch.randn(8, 4)).square().mean().backward()
    net.head.weight.grad.fill_(math.nan)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError, match=r"the gradient of 'head\.weight' is not finite"):
        optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("scope", ["global", "matrix"])
@pytest.mark.parametrize("keep", [1e-9, 0.001])
def test_fewer_weights_than_one_unit_has(net: nn.Module, scope: Any, keep: float) -> None:
    """The best unit stays, of the model or of each matrix: an empty model would be of no use."""
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    units = platon.columns(net)
    score = platon.Magnitude(scope=scope)
    pruner = platon.Pruner(net, optimizer, score=score, schedule=platon.Constant(keep), units=units)
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    columns = [int(mask.any(0).sum()) for mask in pruner.masks().values()]
    assert columns == [1] * 8 if scope == "matrix" else sum(columns) == 1
    assert 0 < pruner.kept() < 0.13
