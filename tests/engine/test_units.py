"""Which matrices are pruned: patterns, and what a pattern without a match is answered."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import platon

ATTENTION = [f"attention.self.{name}" for name in ("query", "key", "value")]
LAYER = [*ATTENTION, "attention.output.dense", "intermediate.dense", "output.dense"]


def names(*parts: str, layers: Sequence[int] = (0, 1)) -> list[str]:
    return [f"bert.encoder.layer.{layer}.{part}.weight" for layer in layers for part in parts]


def test_all_by_default(bert: PreTrainedModel) -> None:
    units = platon.weights(bert)
    assert list(units.matrices) == names(*LAYER)
    assert units.count == 81_920
    assert all(units.matrices[name] is bert.get_parameter(name) for name in units.matrices)
    assert repr(units) == "weights(81,920 in 12 matrices)"


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("*.query.weight", names("attention.self.query")),
        ("*attention*", names(*LAYER[:4])),
        ("bert.encoder.layer.?.output.*", names("output.dense")),
        ("*.layer.[1-9].*", names(*LAYER, layers=[1])),
        ("query", names("attention.self.query")),
        ("attention.self", names(*ATTENTION)),
        ("layer.1", names(*LAYER, layers=[1])),
        ("output.dense", names("attention.output.dense", "output.dense")),
        ("bert.encoder.layer.0.intermediate.dense.weight", names("intermediate.dense", layers=[0])),
        (["query", "*.key.*"], names("attention.self.query", "attention.self.key")),
        (("layer.0",), names(*LAYER, layers=[0])),
    ],
    ids=str,
)
def test_include(bert: PreTrainedModel, include: str | list[str], expected: list[str]) -> None:
    units = platon.weights(bert, include=include)
    assert list(units.matrices) == expected, "in model order, whatever the order of the patterns"


def test_a_part_is_a_whole_part() -> None:
    """'layers.1' is not 'layers.10', and 'out' is not 'out_proj'."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 11)
    found = platon.weights(model, include="layers.1").matrices
    assert {name.split(".")[1] for name in found} == {"1"}
    with pytest.raises(ValueError, match="no parameter matches 'out'"):
        platon.weights(model, include="out")


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("attention", names("intermediate.dense", "output.dense")),
        (["*.dense.weight", "value"], names("attention.self.query", "attention.self.key")),
    ],
    ids=str,
)
def test_exclude(bert: PreTrainedModel, exclude: str | list[str], expected: list[str]) -> None:
    assert list(platon.weights(bert, exclude=exclude).matrices) == expected


def test_include_and_exclude(bert: PreTrainedModel) -> None:
    units = platon.weights(bert, include="attention", exclude=["layer.0", "*.output.*"])
    assert list(units.matrices) == names(*ATTENTION, layers=[1])


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("attention.slf", "attention.self.query.weight"),
        ("attention.self.qurey", "attention.self.query.weight"),
        ("intermediat", "intermediate.dense.weight"),
        ("bert.encoder.layers.1", "bert.encoder.layer.1"),
        ("*.querry.weight", "query.weight"),
        ("layer.7", "layer."),
    ],
)
@pytest.mark.parametrize("word", ["include", "exclude"])
def test_nothing_matches(bert: PreTrainedModel, word: str, pattern: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=r"^no parameter matches .*; nearest: ") as refusal:
        platon.weights(bert, **{word: ["query", pattern] if word == "include" else pattern})
    sentence = str(refusal.value)
    assert sentence.startswith(f"no parameter matches {pattern!r}; nearest: ")
    assert nearest in sentence.split("nearest: ")[1]


def test_nothing_is_left(bert: PreTrainedModel) -> None:
    sentence = "BertForSequenceClassification has no prunable matrix left; .*wider include or a narrower exclude"
    with pytest.raises(ValueError, match=sentence):
        platon.weights(bert, exclude="encoder")
    with pytest.raises(ValueError, match=sentence):
        platon.weights(bert, include=[])
    bert.requires_grad_(False)
    with pytest.raises(ValueError, match=sentence):
        platon.weights(bert)


def test_model_without_linear_layers() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    with (
        pytest.warns(UserWarning, match="no transformer blocks"),
        pytest.raises(ValueError, match="Sequential has no prunable matrix left; give a model with trainable linear"),
    ):
        platon.weights(model)


def test_names_are_plain_under_wrappers(bert: PreTrainedModel) -> None:
    """So a pattern, and a checkpoint, hold for the wrapped model as well."""
    compiled = torch.compile(bert, backend="eager")
    assert list(platon.weights(compiled, include="bert.encoder.layer.0").matrices) == names(*LAYER, layers=[0])


def test_units_of_ones_own(net: nn.Module) -> None:
    """Any parameters of the model by any name: here one that `weights` leaves out."""
    units = platon.Units({"inlet": net.inlet.weight})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, schedule=platon.Constant(0.5), units=units, score=platon.Platon(window=1))
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert list(pruner.masks()) == ["inlet"]
    assert int((net.inlet.weight == 0).sum()) == 16
