"""Computed buffers that are recorded on the meta device and made for real: the oracle is a model built on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

import platon
from platon.deploy.recorder import Recorder


def recorded(build: Callable[[], nn.Module]) -> tuple[nn.Module, bool]:
    """A model from the meta device, and whether its computed buffers could be filled."""
    with torch.device("meta"), Recorder() as recorder:
        model = build()
    stored = model.state_dict()
    return model, recorder.fill(model, [name for name, _ in model.named_buffers() if name not in stored])


def test_the_buffers_are_those_of_a_model_built_on_the_cpu(architecture: Any) -> None:
    kind, config = type(architecture.build()), architecture.build().config
    assert issubclass(kind, PreTrainedModel)
    with no_init_weights():
        model, is_filled = recorded(lambda: kind(type(config).from_dict(config.to_dict())))
        with init_empty_weights(include_buffers=False):
            real = kind(type(config).from_dict(config.to_dict()))
    assert is_filled
    stored = real.state_dict()
    for name, buffer in real.named_buffers():
        if name not in stored:
            found = model.get_buffer(name)
            assert (found.dtype, found.stride(), found.device) == (buffer.dtype, buffer.stride(), buffer.device)
            assert torch.equal(found, buffer)


class Holder(nn.Module):
    """A module that makes its buffer in the way that a test says."""

    def __init__(self, make: Callable[[Holder], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("table", make(self), persistent=False)


def positions(_: nn.Module) -> Tensor:
    return torch.arange(6).expand(1, -1)


def angles(_: nn.Module) -> Tensor:
    table = torch.zeros(4, 6)
    place, rate = torch.arange(4.0)[:, None], torch.exp(torch.arange(0, 6, 2) * -0.5)
    table[:, 0::2] = torch.sin(place * rate)
    table[:, 1::2].copy_(torch.cos(place * rate))  # through a view that nobody keeps
    table[0].add_(torch.tensor([1, 2, 3, 4, 5, 6]))
    return table


def parts(_: nn.Module) -> Tensor:
    first, second = torch.linspace(0, 1, 8).split(4)
    rows, columns = torch.meshgrid(first, second, indexing="ij")
    return torch.stack([rows, columns]).to(torch.float64).triu(diagonal=1)


def exchanged(_: nn.Module) -> Tensor:
    table = torch.zeros(3)
    table.data = torch.ones(3)
    return table.mul_(2)


@pytest.mark.parametrize("make", [positions, angles, parts, exchanged])
def test_calls_are_repeated_in_order(make: Callable[[nn.Module], Tensor]) -> None:
    model, is_filled = recorded(lambda: Holder(make))
    assert is_filled
    expected = make(model)
    found = model.get_buffer("table")
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(found, expected)


def changed_list(_: nn.Module) -> Tensor:
    numbers = [1, 2, 3]
    table = torch.tensor(numbers)
    numbers[0] = 7
    return table


def test_a_list_is_remembered_as_it_was() -> None:
    model, is_filled = recorded(lambda: Holder(changed_list))
    assert is_filled
    assert model.get_buffer("table").tolist() == [1, 2, 3]


def of_numpy(_: nn.Module) -> Tensor:
    return torch.tensor(np.arange(3))


def of_empty(_: nn.Module) -> Tensor:
    return torch.empty(3).fill_(2)


def of_a_parameter(module: Any) -> Tensor:
    return module.linear.weight.detach() * 2


def under_a_parameter(_: nn.Module) -> Tensor:
    table = torch.zeros(3)
    nn.Parameter(table).data.fill_(3)
    return table


def by_device(module: Any) -> Tensor:
    return torch.ones(2) if module.linear.weight.device.type == "cpu" else torch.zeros(2)


def from_before(_: nn.Module) -> Tensor:
    return BEFORE * 2


BEFORE = torch.ones(3, device="meta")


def beside(value: Callable[[], Any]) -> Callable[[Any], Tensor]:
    def make(module: Any) -> Tensor:
        module.__dict__["kept"] = value()
        return torch.arange(3)

    return make


def closed_over() -> Callable[[], Tensor]:
    table = torch.arange(3)
    return lambda: table


def hooked(module: Any) -> Tensor:
    module.register_forward_pre_hook(lambda *_: None)
    return torch.arange(3)


UNCERTAIN: dict[str, Callable[[Any], Tensor]] = {
    "an array of numpy": of_numpy,
    "memory without numbers": of_empty,
    "a parameter": of_a_parameter,
    "memory of a parameter": under_a_parameter,
    "the device": by_device,
    "a tensor from before": from_before,
    "a tensor beside": beside(lambda: torch.arange(3)),
    "a tensor in a list": beside(lambda: [{"a": (torch.arange(3),)}]),
    "a tensor in a function": beside(closed_over),
    "a device beside": beside(lambda: torch.arange(3).device),
    "an object": beside(object),
    "a hook": hooked,
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_is_not_certain_is_left_alone(name: str) -> None:
    model, is_filled = recorded(lambda: Holder(UNCERTAIN[name]))
    assert not is_filled
    assert name == "the device" or model.get_buffer("table").is_meta


def test_a_model_that_is_built_twice_is_the_same(
    bert: nn.Module, batch: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the recorder is not certain, the model is built for real."""
    folder = platon.save(platon.sparsify(bert.eval(), dense_above=1.0), tmp_path / "fast")
    once = platon.load(folder)
    asked = []

    def refuse(_: Recorder, model: nn.Module, names: Iterable[str]) -> bool:
        asked.append(model)
        return False

    monkeypatch.setattr(Recorder, "fill", refuse)
    twice = platon.load(folder)
    assert len(asked) == 1
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        assert torch.equal(once(**inputs).logits, twice(**inputs).logits)
    assert {name: buffer.shape for name, buffer in once.named_buffers()} == {
        name: buffer.shape for name, buffer in twice.named_buffers()
    }
    assert not any(tensor.is_meta for tensor in (*once.parameters(), *once.buffers()))
