"""Further training of a pruned model keeps it pruned."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.amp import GradScaler

import platon

Make = Callable[[], nn.Module]

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "adamw, fused": lambda parameters: optim.AdamW(parameters, lr=0.05, weight_decay=0.1, fused=True),
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd, foreach nesterov": lambda parameters: optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
}


def train(net: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        data = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        net(torch.randn(6, 4, generator=data)).square().mean().backward()
        optimizer.step()


def zero_some(net: nn.Module) -> dict[str, Tensor]:
    """Zero a part of each prunable matrix; gives the weights that stay, True."""
    kept = {}
    for number, (name, matrix) in enumerate(platon.weights(net).matrices.items()):
        chance = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(number))
        kept[name] = chance > 0.7
        matrix.detach().mul_(kept[name])
    return kept


def zeros_of(net: nn.Module, kept: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: net.get_parameter(name).detach()[~mask] for name, mask in kept.items()}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_zeros_stay_and_the_rest_trains(make_net: Make, build: Callable[..., optim.Optimizer]) -> None:
    net = make_net()
    kept = zero_some(net)
    start = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer = build(net.parameters())
    platon.hold(net, optimizer)
    train(net, optimizer, 5)
    for name, parameter in net.named_parameters():
        mask = kept.get(name, torch.ones_like(parameter, dtype=torch.bool))
        now = parameter.detach()
        assert not now[~mask].any(), f"{name}: a zero grew"
        assert not mask.any() or not torch.equal(now[mask], start[name][mask]), f"{name}: does not train"
    careless = make_net()
    zero_some(careless)
    train(careless, build(careless.parameters()), 5)
    assert any(zeros.any() for zeros in zeros_of(careless, kept).values()), "without it they grow"


def test_momentum_from_before_does_not_move_them(net: nn.Module) -> None:
    optimizer = optim.AdamW(net.parameters(), lr=0.05)
    train(net, optimizer, 3)
    kept = zero_some(net)
    platon.hold(net, optimizer)
    train(net, optimizer, 3)
    assert not any(zeros.any() for zeros in zeros_of(net, kept).values())


def test_what_a_pruner_left(net: nn.Module) -> None:
    """The usual way: prune, then train further."""
    optimizer = optim.AdamW(net.parameters(), lr=0.05)
    pruner = platon.Pruner(net, optimizer, schedule=platon.Constant(0.2), score=platon.Platon(window=1))
    train(net, optimizer, 3)
    pruner.detach()
    holding = platon.hold(net, optimizer)
    train(net, optimizer, 3)
    assert all(torch.equal(mask, pruner.masks()[name]) for name, mask in holding.masks().items())
    assert sum(int(matrix.count_nonzero()) for matrix in pruner.units.matrices.values()) == round(0.2 * 768)


def test_masks_say_what_is_held(net: nn.Module) -> None:
    kept = zero_some(net)
    holding = platon.hold(net, optim.SGD(net.parameters(), lr=0.1))
    assert isinstance(holding, platon.Hold)
    masks = holding.masks()
    assert masks.keys() == kept.keys()
    assert all(mask.dtype == torch.bool and torch.equal(mask, kept[name]) for name, mask in masks.items())


def test_weight_that_becomes_zero_later_is_free(net: nn.Module) -> None:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    platon.hold(net, optimizer)
    net.blocks[0].up.weight.detach().zero_()
    train(net, optimizer, 1)
    assert net.blocks[0].up.weight.any()


def test_detach_lets_them_go(make_net: Make) -> None:
    net, plain = make_net(), make_net()
    kept = zero_some(net)
    zero_some(plain)
    optimizer, other = (optim.AdamW(each.parameters(), lr=0.05) for each in (net, plain))
    holding = platon.hold(net, optimizer)
    holding.detach()
    train(net, optimizer, 3)
    train(plain, other, 3)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    assert any(zeros.any() for zeros in zeros_of(net, kept).values())


def test_only_some_units(net: nn.Module) -> None:
    kept = zero_some(net)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    platon.hold(net, optimizer, platon.weights(net, include="blocks.0"))
    train(net, optimizer, 2)
    grown = {name for name, zeros in zeros_of(net, kept).items() if zeros.any()}
    assert grown == {name for name in kept if name.startswith("blocks.1")}


def test_nothing_is_zero_trains_as_without(make_net: Make) -> None:
    net, plain = make_net(), make_net()
    optimizer, other = (optim.AdamW(each.parameters(), lr=0.05) for each in (net, plain))
    platon.hold(net, optimizer)
    train(net, optimizer, 3)
    train(plain, other, 3)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_grad_scaler(net: nn.Module, fused: bool) -> None:
    kept = zero_some(net)
    optimizer = optim.AdamW(net.parameters(), lr=0.05, fused=fused)
    platon.hold(net, optimizer)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for bad in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 4)).square().mean()).backward()
        if bad:
            net.head.bias.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert not any(zeros.any() for zeros in zeros_of(net, kept).values())


def test_half_precision(net: nn.Module) -> None:
    kept = zero_some(net)
    net.bfloat16()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    platon.hold(net, optimizer)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not any(zeros.any() for zeros in zeros_of(net, kept).values())


def test_large_matrix_goes_piece_by_piece() -> None:
    """More than one piece, and a size that is no multiple of eight."""
    layer = nn.Linear(397, 701)
    layer.weight.detach()[torch.rand(701, 397) < 0.5] = 0
    zero = layer.weight.detach() == 0
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    platon.hold(layer, optimizer, platon.Units({"w": layer.weight}))
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert torch.equal(layer.weight.detach() == 0, zero)


def test_bad_input(net: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"the optimizer does not hold 'blocks.0.query.weight'"):
        platon.hold(net, optim.SGD(net.head.parameters(), lr=0.1))
    wrong: Any = list(net.parameters())
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got list"):
        platon.hold(net, wrong)


def test_masks_are_held_that_are_given(make_net: Make) -> None:
    """A resumed training holds the zeros of its start, not those that training has made since."""
    net = make_net()
    kept = zero_some(net)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    first = platon.hold(net, optimizer)
    masks = first.masks()
    first.detach()
    name, mask = next(iter(kept.items()))
    with torch.no_grad():
        net.get_parameter(name)[mask] = 0.0  # as training may do
    platon.hold(net, optimizer, masks=masks)
    train(net, optimizer, 3)
    assert not any(zeros.any() for zeros in zeros_of(net, kept).values())
    assert net.get_parameter(name).detach()[mask].any(), "a zero that was not given may grow"


def test_masks_that_do_not_fit_are_refused(make_net: Make) -> None:
    net = make_net()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    masks = {name: torch.ones_like(matrix, dtype=torch.bool) for name, matrix in platon.weights(net).matrices.items()}
    name = next(iter(masks))
    for wrong, sentence in (
        ({k: v for k, v in masks.items() if k != name}, f"there is no mask for '{name}'"),
        (masks | {name: masks[name].float()}, "must be a bool tensor of shape"),
        (masks | {name: masks[name][:1]}, "must be a bool tensor of shape"),
    ):
        with pytest.raises(ValueError, match=sentence):
            platon.hold(net, optimizer, masks=wrong)
