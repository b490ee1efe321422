"""What was given, what is wrong with it, what to do: one clear sentence each, before anything is trained."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import platon

Make = Callable[[], nn.Module]
HALF = platon.Constant(0.5)


def sentence(call: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    """What the call is refused with; one line, with a capital-free start as Python's own, and a hint after it."""
    with pytest.raises(kind) as refusal:
        call()
    text = str(refusal.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


def sgd(net: nn.Module) -> optim.Optimizer:
    return optim.SGD(net.parameters(), lr=0.1)


def prune(net: Any, optimizer: Any = None, **settings: Any) -> platon.Pruner:
    return platon.Pruner(net, sgd(net) if optimizer is None else optimizer, **{"schedule": HALF, **settings})


# --- shares and schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "hint"),
    [
        (80, "write 0.8 for 80 %"),
        (12.5, "write 0.125 for 12.5 %"),
        (100, "write 1 for 100 %"),
        (0, "give the share of weights that stays"),
        (0.0, "give the share of weights that stays"),
        (-0.1, "give the share of weights that stays"),
        (101, "give the share of weights that stays"),
        (float("nan"), "give the share of weights that stays"),
        (float("inf"), "give the share of weights that stays"),
        (True, "give the share of weights that stays"),
        ("0.5", "give the share of weights that stays"),
        (None, "give the share of weights that stays"),
    ],
)
def test_keep(keep: Any, hint: str) -> None:
    assert sentence(lambda: platon.Constant(keep)) == f"keep must be in (0, 1], got {keep}; {hint}"
    cubic = sentence(lambda: platon.Cubic(final=keep, total=10))
    assert cubic == f"final must be in (0, 1], got {keep}; {hint}"
    if keep not in (None, True):
        text = sentence(lambda: platon.Cubic(final=0.1, total=10, initial=keep))
        assert text == f"initial must be in (0, 1], got {keep}; {hint}"


def test_phases_longer_than_the_training() -> None:
    text = sentence(lambda: platon.Cubic(final=0.1, total=100, warmup=60, cooldown=41))
    assert text == (
        "warmup + cooldown must not exceed total, got 60 + 41 > 100; shorten one of them or train for longer"
    )
    platon.Cubic(final=0.1, total=100, warmup=60, cooldown=40)  # just fits


def test_initial_below_final() -> None:
    text = sentence(lambda: platon.Cubic(final=0.5, total=10, initial=0.2))
    assert text == "initial must not be below final (0.5), got 0.2; pruning only removes"


@pytest.mark.parametrize(
    ("setting", "value", "least"),
    [
        ("total", 0, 1),
        ("total", 1e4, 1),
        ("total", True, 1),
        ("every", 0, 1),
        ("every", 2.5, 1),
    ],
)
def test_steps_are_whole_numbers(setting: str, value: Any, least: int) -> None:
    text = sentence(lambda: platon.Cubic(**{"final": 0.1, "total": 10, setting: value}))
    assert text == f"{setting} must be a whole number of at least {least}, got {value!r}"


@pytest.mark.parametrize("setting", ["warmup", "cooldown"])
@pytest.mark.parametrize("value", [-1, -0.1, 2.5, "5", True, float("inf"), float("nan")])
def test_phases_are_steps_or_shares(setting: str, value: Any) -> None:
    text = sentence(lambda: platon.Cubic(**{"final": 0.1, "total": 10, setting: value}))
    assert text == f"{setting} must be a whole number of steps, or a share of the training below 1, got {value!r}"


@pytest.mark.parametrize("value", ["0.5", b"0.5", True, [0.5], 0.5j, float("nan")], ids=repr)
def test_a_schedule_gives_numbers(net: nn.Module, value: Any) -> None:
    optimizer = sgd(net)
    prune(net, optimizer, schedule=lambda step: value, score=platon.Magnitude())
    net(torch.ones(2, 4)).sum().backward()
    assert "the schedule's share at step 1 must be in (0, 1], got " in sentence(optimizer.step)


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5)], ids=["numpy", "torch"])
def test_a_schedule_may_give_numbers_of_other_libraries(net: nn.Module, value: Any) -> None:
    optimizer = sgd(net)
    pruner = prune(net, optimizer, schedule=lambda step: value, score=platon.Magnitude())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert pruner.kept() == 0.5


def test_units_that_are_a_word(net: nn.Module) -> None:
    text = sentence(lambda: prune(net, units="heads"), TypeError)
    assert text == "units must come from a function such as platon.heads(model), got 'heads'"


def test_a_matrix_without_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(torch.empty(0, 4))
    for units in (platon.columns, lambda model: platon.blocks(model, (2, 2))):
        with pytest.warns(UserWarning, match="no transformer blocks"):
            text = sentence(lambda units=units: units(model))
        assert text == "'0.weight' has no weights, its shape is (0, 4); leave it out with exclude"


def test_weights_that_become_non_contiguous(net: nn.Module) -> None:
    optimizer = sgd(net)
    prune(net, optimizer)
    net(torch.ones(2, 4)).sum().backward()
    weight = net.blocks[0].up.weight  # type: ignore[union-attr,index]
    weight.data = weight.data.t().contiguous().t()
    text = sentence(optimizer.step, RuntimeError)
    assert text.startswith("parameter 'blocks.0.up.weight' is no longer contiguous in memory")


def test_schedule_of_ones_own_that_gives_no_share(net: nn.Module) -> None:
    optimizer = sgd(net)
    prune(net, optimizer, schedule=lambda step: 80)
    net(torch.ones(2, 4)).sum().backward()
    text = sentence(optimizer.step)
    assert text == "the schedule's share at step 1 must be in (0, 1], got 80; write 0.8 for 80 %"


def test_share_for_a_schedule(net: nn.Module) -> None:
    text = sentence(lambda: prune(net, schedule=0.1), TypeError)
    assert text == "schedule must give a share for a step, as platon.Constant(0.1) does, got 0.1"


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("beta", [1.0, 1, -0.1, 85, float("nan"), "0.85", None])
def test_beta(name: str, beta: Any) -> None:
    text = sentence(lambda: platon.Platon(**{name: beta}))
    assert text == f"{name} must be in [0, 1), got {beta}; 0 forgets at once, 0.99 averages 100 steps"


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "10"])
def test_window(window: Any) -> None:
    text = sentence(lambda: platon.Platon(window=window))
    assert text == f"window must be a whole number of at least 1, got {window!r}"


def test_words(net: nn.Module) -> None:
    wrong: Any = "during"
    assert sentence(lambda: platon.Platon(timing=wrong)) == "timing must be one of 'after', 'before', got 'during'"
    wrong = "layer"
    for score in (platon.Platon, platon.Magnitude):
        text = sentence(lambda score=score: score(scope=wrong))
        expected = (
            "scope must be 'global', 'matrix', 'row', or a pattern such as '2:4' (2 of every 4 stay), got 'layer'"
        )
        assert text == expected
    text = sentence(lambda: prune(net, on_nonfinite="ignore"))
    assert text == "on_nonfinite must be one of 'raise', 'skip', got 'ignore'"


@pytest.mark.parametrize("score", ["platon", platon.Platon, 0.85])
def test_no_score(net: nn.Module, score: Any) -> None:
    text = sentence(lambda: prune(net, score=score), TypeError)
    assert text == f"score must be a method such as platon.Platon(), got {score!r}"


# --- models and optimizers --------------------------------------------------------------------------------------------


def test_no_parameter_matched(net: nn.Module) -> None:
    text = sentence(lambda: platon.weights(net, include="blocks.0.qery"))
    assert text == "no parameter matches 'blocks.0.qery'; nearest: 'blocks.0.query.weight'"


def test_optimizer_does_not_hold_the_parameters(make_net: Make) -> None:
    net, other = make_net(), make_net()
    hint = "build it from this model's parameters, or leave that one out with exclude"
    text = sentence(lambda: prune(net, sgd(other)))
    assert text == f"the optimizer does not hold 'blocks.0.query.weight'; {hint}"
    partial = optim.SGD([p for name, p in net.named_parameters() if "blocks.1.down" not in name], lr=0.1)
    text = sentence(lambda: prune(net, partial))
    assert text == f"the optimizer does not hold 'blocks.1.down.weight'; {hint}"
    prune(net, partial, units=platon.weights(net, exclude="blocks.1.down"))  # what the hint says


def test_units_of_another_model(make_net: Make) -> None:
    net, other = make_net(), make_net()
    text = sentence(lambda: prune(net, units=platon.weights(other)))
    assert text == "the model does not hold 'blocks.0.query.weight'; build units from the model that the pruner gets"


def test_no_optimizer(net: nn.Module) -> None:
    for wrong in (net.parameters(), [1], "adamw", None):
        text = sentence(lambda wrong=wrong: platon.Pruner(net, wrong, schedule=HALF), TypeError)
        kind = type(wrong).__name__
        assert text == f"optimizer must be a torch.optim.Optimizer, got {kind}; give what trains the model"


def test_model_and_optimizer_swapped(net: nn.Module) -> None:
    wrong: Any = sgd(net)
    text = sentence(lambda: platon.Pruner(wrong, wrong, schedule=HALF), TypeError)
    assert text == "model must be a torch.nn.Module, got SGD; the model comes first"


def test_refused_pruner_leaves_no_hook(net: nn.Module) -> None:
    optimizer = sgd(net)
    for settings in ({"score": "platon"}, {"on_nonfinite": "ignore"}, {"schedule": 1}):
        with pytest.raises((ValueError, TypeError)):
            prune(net, optimizer, **settings)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("score", [platon.Platon(), platon.Platon(timing="before"), platon.Magnitude()], ids=str)
def test_parameter_replaced_after_construction(net: nn.Module, score: platon.Score) -> None:
    optimizer = sgd(net)
    pruner = prune(net, optimizer, score=score)
    net.blocks[1].up.weight = nn.Parameter(torch.ones(16, 8))
    net(torch.ones(2, 4)).sum().backward()
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    text = sentence(optimizer.step, RuntimeError)
    assert text == "parameter 'blocks.1.up.weight' was replaced after the pruner was built; build the pruner last"
    assert all(torch.equal(parameter, before[name]) for name, parameter in net.named_parameters()), "nothing moved"
    assert pruner.step_count == 0


def test_module_replaced_after_construction(net: nn.Module) -> None:
    """The old parameter is still in the old module: the model has to be asked, not the module."""
    optimizer = sgd(net)
    prune(net, optimizer)
    net.blocks[1].up = nn.Linear(8, 16)
    net(torch.ones(2, 4)).sum().backward()
    text = sentence(optimizer.step, RuntimeError)
    assert text == "parameter 'blocks.1.up.weight' was replaced after the pruner was built; build the pruner last"


def test_module_wrapped_after_construction(net: nn.Module) -> None:
    """It trains the same parameters, so nothing is wrong."""
    optimizer = sgd(net)
    pruner = prune(net, optimizer)
    net.blocks[1] = nn.Sequential(net.blocks[1])
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert pruner.step_count == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_that_is_not_finite(net: nn.Module, value: float, dtype: torch.dtype) -> None:
    net.to(dtype)
    net.blocks[0].out.weight.detach()[3, 2] = value
    text = sentence(lambda: prune(net))
    assert text == ("'blocks.0.out.weight' holds a weight that is NaN or infinite; load or train a sound model first")


def test_large_weights_are_fine(net: nn.Module) -> None:
    """Their sum overflows, they do not."""
    net.blocks[0].out.weight.detach().fill_(3e38)
    prune(net)


def test_matrix_that_is_not_contiguous(net: nn.Module) -> None:
    net.blocks[0].out.weight = nn.Parameter(torch.ones(8, 8).T)
    net.blocks[0].up.weight = nn.Parameter(torch.ones(8, 16).T)
    text = sentence(lambda: prune(net))
    assert "is not contiguous in memory; give it contiguous data before building the optimizer" in text
