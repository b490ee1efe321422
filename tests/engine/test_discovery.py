"""Heads and neurons, against what the models compute: what changes when the slices of one group are zero."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from platon.engine.proof.discovery import heads, neurons, refusals
from platon.engine.slices import Group, Slice
from platon.engine.topology import matrices


def without_biases(model: nn.Module) -> nn.Module:
    """So that a zero row writes zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            if name.endswith("relative_attention_bias.weight"):
                parameter.zero_()
    return model


def unit_of(member: Slice) -> Tensor:
    """The unit of each row or column."""
    index = member.rows or member.columns
    assert index is not None
    return index.unit


def dim_of(member: Slice) -> int:
    """The side of the stored tensor that the units lie along."""
    return int(member.rows is None)


def zero(family: Group, group: int, which: Callable[[str], bool] = lambda name: True) -> None:
    with torch.no_grad():
        for member in family.slices:
            if which(member.name):
                chosen = (unit_of(member) == group).nonzero().view(-1)
                member.parameter.index_fill_(dim_of(member), chosen, 0.0)


def taken_in(model: nn.Module, path: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the linear at the path takes in and gives out."""
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen["in"], seen["out"] = inputs[0].detach(), output.detach()

    with model.get_submodule(path).register_forward_hook(look), torch.no_grad():
        model(**batch)
    return seen["in"], seen["out"]


def test_a_head_is_what_its_slices_make(architecture: Any) -> None:
    """All slices zero: its features vanish from what the output takes in, and no other changes."""
    model = without_biases(architecture.build())
    batch = architecture.batch(model)
    path = f"{architecture.layer}.{architecture.output}"
    family = heads(model)[0]
    assert family.count == architecture.groups
    assert len(heads(model)) == 3
    before, out_before = taken_in(model, path, batch)
    width = before.shape[-1] // architecture.groups  # a head's features lie side by side, groups of heads too
    for group in range(architecture.groups):
        changed = deepcopy(model)
        zero(heads(changed)[0], group)
        after, out = taken_in(changed, path, batch)
        mine = torch.zeros(before.shape[-1], dtype=torch.bool)
        mine[group * width : (group + 1) * width] = True
        assert not after[..., mine].any()
        assert torch.equal(after[..., ~mine], before[..., ~mine])
        # And what the others put out is what there was without this head's share.
        weight = model.get_submodule(path).weight
        weight = weight if architecture.output == "attn.c_proj" else weight.T
        share = before[..., mine] @ weight[mine]
        torch.testing.assert_close(out, out_before - share, atol=1e-6, rtol=1e-5)


def test_queries_keys_and_places_are_of_the_head(architecture: Any) -> None:
    """Only what makes the scores zero: the head looks everywhere alike, and no other head changes its look."""
    model = without_biases(architecture.build())
    model.set_attn_implementation("eager")
    batch = architecture.batch(model)
    look = {**batch, "output_attentions": True}
    with torch.no_grad():
        before = model(**look).attentions[0]
    many = before.shape[1] // architecture.groups
    for group in range(architecture.groups):
        changed = deepcopy(model)
        family = heads(changed)[0]
        if architecture.output == "attn.c_proj":  # packed: the values are the last third of the columns
            with torch.no_grad():
                columns = (unit_of(family.slices[0]) == group).nonzero().view(-1)
                family.slices[0].parameter[:, columns[columns < 40]] = 0.0
        else:
            value = ("value", "v_proj", "v_lin", ".v.")
            last = family.slices[-1].name
            zero(family, group, lambda name: name != last and not any(word in name for word in value))  # noqa: B023
        with torch.no_grad():
            after = changed(**look).attentions[0]
        mine = torch.zeros(before.shape[1], dtype=torch.bool)
        mine[group * many : (group + 1) * many] = True
        assert torch.equal(after[:, ~mine], before[:, ~mine])
        seen = after[:, mine]
        torch.testing.assert_close(seen, (seen > 0) / (seen > 0).sum(-1, keepdim=True), atol=1e-6, rtol=1e-5)
        assert not torch.allclose(before[:, mine], seen, atol=1e-5)


def test_a_neuron_is_what_its_slices_make(architecture: Any) -> None:
    model = without_biases(architecture.build())
    batch = architecture.batch(model)
    path = f"{architecture.layer}.{architecture.down}"
    before, out_before = taken_in(model, path, batch)
    assert [family.count for family in neurons(model)] == [37, 37, 37]
    for neuron in (0, 17, 36):
        changed = deepcopy(model)
        zero(neurons(changed)[0], neuron)
        after, out = taken_in(changed, path, batch)
        assert not after[..., neuron].any()
        others = [other for other in range(37) if other != neuron]
        assert torch.equal(after[..., others], before[..., others])
        weight = model.get_submodule(path).weight
        weight = weight if architecture.output == "attn.c_proj" else weight.T
        torch.testing.assert_close(out, out_before - before[..., neuron, None] * weight[neuron], atol=1e-6, rtol=1e-5)


def test_together_they_are_all_that_can_be_pruned(architecture: Any) -> None:
    model = architecture.build()
    members = [member for family in heads(model) + neurons(model) for member in family.slices]
    prunable = matrices(model)
    assert sorted(member.name for member in members) == sorted(prunable)
    for member in members:
        assert member.parameter is prunable[member.name]
        assert unit_of(member).dtype == torch.int64
        assert unit_of(member).shape == (member.parameter.shape[dim_of(member)],)
    for family in heads(model) + neurons(model):
        assert isinstance(model.get_submodule(family.name), nn.Module)
        for member in family.slices:
            assert len(set(unit_of(member).bincount(minlength=family.count).tolist())) == 1


def test_wrappers_leave_their_names(bert: nn.Module) -> None:
    wrapped = nn.DataParallel(bert)
    assert [family.name for family in heads(wrapped)] == [
        f"module.bert.encoder.layer.{number}.attention" for number in range(2)
    ]
    for family in heads(wrapped) + neurons(wrapped):
        for member in family.slices:
            assert wrapped.get_parameter(member.name) is member.parameter


def test_frozen_matrices_are_there() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL)).requires_grad_(False)
    assert len(heads(model)) == len(neurons(model)) == 2


def test_cross_attention_has_heads_of_its_own() -> None:
    """BERT's and GPT-2's, whose query has a matrix of its own there and whose packed matrix holds two roles."""
    bert = hf.BertLMHeadModel(hf.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True))
    assert [family.name.split(".")[-1] for family in heads(bert)] == ["attention", "crossattention"] * 2
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, add_cross_attention=True, **ends)
    crossed = heads(hf.GPT2LMHeadModel(config))[1]
    assert [member.name.split(".")[-2] for member in crossed.slices] == ["q_attn", "c_attn", "c_proj"]
    assert unit_of(crossed.slices[1]).tolist() == 2 * (16 * [0] + 16 * [1])


SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


class OwnAttention(nn.Module):
    """Has matrices of the right names, and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))


def adapted() -> nn.Module:
    model = hf.BertModel(hf.BertConfig(**SMALL))
    for layer in model.encoder.layer:
        layer.attention.self = OwnAttention()
    return model


class OwnBert(hf.models.bert.modeling_bert.BertAttention):
    """A subclass that computes the same."""


def test_a_subclass_is_judged_by_what_it_computes() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL))
    model.encoder.layer[1].attention = OwnBert(model.config)
    assert [group.count for group in heads(model)] == [2, 2]


def test_one_more_matrix_is_left_alone() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL))
    model.encoder.layer[0].extra = nn.Linear(32, 32)
    assert len(heads(model)) == len(neurons(model)) == 2
    assert refusals(model) == {
        "encoder.layer.0.extra.weight": "the forward pass on small random inputs does not use it",
    }


STRANGERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "albert": (
        lambda: hf.AlbertModel(hf.AlbertConfig(**SMALL, embedding_size=16)),
        "AlbertModel are not known: no .* and 5 more: its block is run 2 times in one pass",
    ),
    "no transformer": (lambda: nn.Linear(2, 2), "Linear are not known: it has no transformer blocks"),
    "no forward pass": (adapted, "BertModel are not known: no .*its forward pass failed on small random inputs"),
}


@pytest.mark.parametrize("find", [heads, neurons])
@pytest.mark.parametrize("name", STRANGERS)
def test_others_are_refused_by_name(name: str, find: Callable[[nn.Module], list[Group]]) -> None:
    build, said = STRANGERS[name]
    with pytest.raises(ValueError, match=f"the heads and neurons of {said}") as caught:
        find(build())
    assert "\n" not in str(caught.value)


def test_nothing_of_the_model_changes(bert: nn.Module) -> None:
    """Neither its numbers nor its mode nor the random state; hooks of others are not called."""
    calls: list[int] = []
    bert.register_forward_hook(lambda *given: calls.append(1))
    before = {name: tensor.clone() for name, tensor in bert.state_dict().items()}
    state = torch.get_rng_state()
    assert bert.training
    heads(bert)
    assert bert.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert not calls
    assert all(torch.equal(tensor, before[name]) for name, tensor in bert.state_dict().items())


def test_shared_matrices_are_refused() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL))
    model.encoder.layer[1].output.dense.weight = model.encoder.layer[0].output.dense.weight
    with pytest.raises(ValueError, match="blocks of BertModel share matrices"):
        heads(model)
