"""Weights that are kept aside: what others write to the model between two steps is neither lost nor overwritten."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

import platon

LEARNED = [platon.Movement(), platon.SoftMovement(), platon.HardConcrete()]
ALL = [platon.Platon(window=1), platon.Magnitude(), *LEARNED]
Make = Callable[[], nn.Module]


def name_of(score: platon.Score) -> str:
    return type(score).__name__


def train(net: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        net(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def built(net: nn.Module, score: platon.Score, keep: float = 0.5) -> tuple[platon.Pruner, optim.Optimizer]:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    return platon.Pruner(net, optimizer, score=score, schedule=platon.Constant(keep)), optimizer


def full(pruner: platon.Pruner, name: str) -> Tensor:
    return pruner.state_dict()["tensors"][f"{name}:full"].view(16, 8)


@pytest.mark.parametrize("score", LEARNED, ids=name_of)
def test_new_weights_are_taken_over(net: nn.Module, score: platon.Score) -> None:
    pruner, optimizer = built(net, score)
    train(net, optimizer, 3)
    matrix, name = net.blocks[0].up.weight, "blocks.0.up.weight"
    kept = pruner.masks()[name]
    before = full(pruner, name).clone()
    with torch.no_grad():
        matrix.copy_(torch.where(kept, torch.full_like(matrix, 3.0), matrix))
    optimizer.zero_grad()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # moves nothing
    assert torch.equal(full(pruner, name)[kept], torch.full_like(matrix, 3.0)[kept])
    assert torch.equal(full(pruner, name)[~kept], before[~kept])  # these were not written to


@pytest.mark.parametrize("score", LEARNED, ids=name_of)
def test_without_changes_nothing_is_taken(net: nn.Module, make_net: Make, score: platon.Score) -> None:
    """Loading the very weights that are there counts as a change of version, and changes nothing."""
    other = make_net()
    (_, optimizer), (_, other_optimizer) = built(net, score), built(other, score)
    for _ in range(3):
        train(net, optimizer, 1)
        net.load_state_dict(copy.deepcopy(net.state_dict()))
        train(other, other_optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("score", ALL, ids=name_of)
def test_detach_leaves_a_loaded_model_alone(net: nn.Module, score: platon.Score) -> None:
    pruner, optimizer = built(net, score)
    train(net, optimizer, 3)
    best = {name: torch.randn_like(tensor) for name, tensor in net.state_dict().items()}
    net.load_state_dict(best)
    pruner.detach()
    assert all(torch.equal(tensor, best[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("score", ALL, ids=name_of)
def test_deterministic_after_detach_writes_nothing(net: nn.Module, score: platon.Score) -> None:
    pruner, optimizer = built(net, score)
    train(net, optimizer, 3)
    inside = pruner.deterministic()
    inside.__enter__()
    pruner.detach()
    train(net, optimizer, 2)
    finished = copy.deepcopy(net.state_dict())
    inside.__exit__(None, None, None)
    with pruner.deterministic():
        pass
    pruner.settle()
    pruner.unsettle()
    assert all(torch.equal(tensor, finished[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copies_are_refused(net: nn.Module, how: Callable[[object], object]) -> None:
    pruner, optimizer = built(net, platon.Platon())
    with pytest.raises(TypeError, match="a pruner cannot be copied or pickled, because its hooks stay"):
        how(pruner)
    with pytest.raises(TypeError, match="a hold cannot be copied or pickled, because its hooks stay"):
        how(platon.hold(net, optimizer))
    if how is copy.deepcopy:
        with pytest.raises(TypeError, match="build a new pruner on the copied model"):
            how((net, optimizer, pruner))
