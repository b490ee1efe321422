"""States of format 2 as an earlier version wrote them (`states/`): they load, and training goes on as it did there."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn, optim

import platon

STATES = Path(__file__).with_name("states")
CASES: dict[str, Any] = {
    "platon": (platon.Platon(window=2), "weights"),
    "l0": (platon.HardConcrete(score_learning_rate=0.5), "weights"),
    "columns": (platon.Platon(window=1), "columns"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.query(x)) * self.key(x)
        return self.norm(x + self.down(torch.relu(self.up(x))))


def build(name: str) -> tuple[nn.Module, optim.Optimizer, platon.Pruner]:
    score, units = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential()
    model.layers = nn.ModuleList([Block(), Block()])
    model.forward = lambda x: model.layers[1](model.layers[0](x))  # type: ignore[method-assign,index]
    optimizer = optim.SGD(model.parameters(), lr=0.1)  # no state of its own
    schedule = platon.Cubic(final=0.4, total=16, warmup=2, cooldown=4, every=2)
    pruner = platon.Pruner(model, optimizer, score=score, schedule=schedule, units=getattr(platon, units)(model))
    return model, optimizer, pruner


def train(model: nn.Module, optimizer: optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        (model(inputs) - inputs.roll(1, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", CASES)
def test_it_loads_and_ends_with_the_same_masks(name: str) -> None:
    with safe_open(STATES / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is not a dictionary
        state = json.loads(file.metadata()["state"])
    parts: dict[str, dict[str, torch.Tensor]] = {"pruner": {}, "model": {}, "after": {}}
    for key, tensor in tensors.items():
        part, _, inner = key.partition("/")
        parts[part][inner] = tensor
    model, optimizer, pruner = build(name)
    model.load_state_dict(parts["model"])
    pruner.load_state_dict({**state, "tensors": parts["pruner"]})
    assert (state["format"], pruner.step_count) == (2, 6)
    train(model, optimizer, range(6, 16))
    assert all(torch.equal(mask, parts["after"][name]) for name, mask in pruner.masks().items())
    assert pruner.kept() == pytest.approx(0.4, abs=0.02)
