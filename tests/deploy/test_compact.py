"""Compact models against the models with zeros that they came from."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import platon
from platon.deploy.surgery import Gathered
from platon.engine.proof.discovery import heads, neurons
from platon.engine.slices import Group, Slice

LIMIT = 1e-5


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Every float tensor that the model gives, the hidden states of every layer included."""
    with torch.no_grad():
        found = model(**batch, output_hidden_states=True)
    flat = [x for value in found.to_tuple() for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in flat if isinstance(x, Tensor)]


def difference(one: nn.Module, other: nn.Module, batch: dict[str, Tensor]) -> float:
    pairs = zip(outputs(one, batch), outputs(other, batch), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def unit_of(member: Slice) -> Tensor:
    """The unit of each row or column."""
    index = member.rows or member.columns
    assert index is not None
    return index.unit


def zero(family: Group, gone: Tensor) -> None:
    """Zero all slices of the groups in `gone`."""
    with torch.no_grad():
        for member in family.slices:
            member.parameter.mul_(member.expand((~gone).float()))


def mask_randomly(model: nn.Module, seed: int = 0) -> dict[str, int]:
    """One head left in the first layer, no neuron gone in the second, anything in the others; how many stay."""
    random = torch.Generator().manual_seed(seed)
    left = {}
    for number, family in enumerate(heads(model)):
        gone = torch.rand(family.count, generator=random) < 0.5
        gone[int(torch.randint(family.count, (1,), generator=random))] = False
        if number == 0:
            gone[:] = True
            gone[1] = False
        zero(family, gone)
        left[family.name] = int((~gone).sum())
    for number, family in enumerate(neurons(model)):
        gone = torch.rand(family.count, generator=random) < 0.6
        gone[:] &= number != 1
        zero(family, gone)
        left[f"{family.name}, neurons"] = int((~gone).sum())
    return left


def counts(model: nn.Module) -> dict[str, int]:
    return {family.name: family.count for family in heads(model)} | {
        f"{family.name}, neurons": family.count for family in neurons(model)
    }


# --- every architecture -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_same_outputs_from_less(architecture: Any, implementation: str) -> None:
    model = architecture.build()
    if implementation == "eager":
        model.set_attn_implementation("eager")
    batch = architecture.batch(model)
    dense = outputs(model, batch)
    left = mask_randomly(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = platon.compact(model)
    assert counts(small) == left
    assert difference(model, small, batch) <= LIMIT
    assert max(float((a - b).abs().max()) for a, b in zip(dense, outputs(model, batch), strict=True)) > 0.01
    # By count: what is left of the blocks is what was not zero.
    blocks = sum(member.parameter.numel() for f in heads(model) + neurons(model) for member in f.slices)
    zeros = sum(int((m.parameter == 0).sum()) for f in heads(model) + neurons(model) for m in f.slices)
    kept = sum(member.parameter.numel() for f in heads(small) + neurons(small) for member in f.slices)
    assert kept == blocks - zeros
    # And the given model is what it was.
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.warns(UserWarning, match="has nothing to remove"):
        assert platon.compact(small) is small


def test_a_constant_is_folded(architecture: Any) -> None:
    """Only what writes is zero, so the biases go on contributing."""
    model = architecture.build()
    batch = architecture.batch(model)
    for family in heads(model):
        plan = [m for m in family.slices[:-1] if any(w in m.name for w in ("value", "v_proj", "v_lin", "attn.v."))]
        with torch.no_grad():
            for member in plan:
                member.parameter[unit_of(member) == 2] = 0.0
            if not plan:  # packed
                values = (unit_of(family.slices[0]) == 2) & (torch.arange(60) >= 40)
                family.slices[0].parameter[:, values] = 0.0
    for family in neurons(model):
        for member in family.slices[:-1]:
            zero(Group(family.name, family.count, (member,)), torch.arange(family.count) % 3 == 0)
    small = platon.compact(model)
    assert difference(model, small, batch) <= LIMIT
    assert [family.count for family in neurons(small)] == 3 * [24]
    # A position that attends to nothing gets no constant, so a causal attention keeps a head whose bias is not zero.
    biases = [name for name, _ in model.named_parameters() if "v_proj.bias" in name or "c_attn.bias" in name]
    stays = architecture.output in ("self_attn.o_proj", "attn.c_proj") and bool(biases)
    assert {family.count for family in heads(small)} == {architecture.groups - (not stays)}


def test_inputs_that_are_still_used_are_gathered(architecture: Any) -> None:
    model = architecture.build()
    batch = architecture.batch(model)
    random = torch.Generator().manual_seed(0)
    left = {}
    with torch.no_grad():
        for family in heads(model) + neurons(model):
            for member in family.slices:
                linear = model.get_submodule(member.name.removesuffix(".weight"))
                inputs = 1 if isinstance(linear, nn.Linear) else 0
                gone = torch.rand(member.parameter.shape[inputs], generator=random) < 0.4
                gone[0] = False
                member.parameter.index_fill_(inputs, gone.nonzero().view(-1), 0.0)
                left[member.name] = int((~gone).sum())
    small = platon.compact(model)
    assert difference(model, small, batch) <= LIMIT
    for name, parameter in small.named_parameters():
        if name in left:
            linear = small.get_submodule(name.removesuffix(".weight"))
            assert parameter.shape[1 if isinstance(linear, nn.Linear) else 0] == left[name]
    with pytest.warns(UserWarning, match="has nothing to remove"):
        platon.compact(small)


def test_a_layer_that_is_zero_as_a_whole(architecture: Any) -> None:
    """It keeps a head and a neuron, and gives its biases."""
    model = architecture.build()
    batch = architecture.batch(model)
    for family in heads(model)[1:2] + neurons(model)[1:2]:
        zero(family, torch.ones(family.count, dtype=torch.bool))
    small = platon.compact(model)
    assert difference(model, small, batch) <= LIMIT
    assert [family.count for family in heads(small)] == [architecture.groups, 1, architecture.groups]
    assert [family.count for family in neurons(small)] == [37, 1, 37]


def test_compact_models_are_compacted_again(architecture: Any) -> None:
    """Heads and neurons and columns, in two goes, as when a compact model is trained and pruned further."""
    model = architecture.build()
    batch = architecture.batch(model)
    small = model
    for seed in (1, 2):
        chosen = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for family in heads(small) + neurons(small):
                gone = torch.rand(family.count, generator=chosen) < 0.3
                gone[0] = False
                zero(family, gone)
                for member in family.slices:
                    linear = small.get_submodule(member.name.removesuffix(".weight"))
                    inputs = 1 if isinstance(linear, nn.Linear) else 0
                    member.parameter.select(inputs, seed).zero_()
        before = deepcopy(small)
        small = platon.compact(small)
        assert size(small) < size(before)
        assert difference(before, small, batch) <= LIMIT


def test_a_compact_model_is_trained_and_pruned_again(architecture: Any) -> None:
    model = architecture.build()
    mask_randomly(model)
    small = platon.compact(model).train()
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-3)
    pruner = platon.Pruner(small, optimizer, schedule=platon.Constant(0.5))
    batch = architecture.batch(small)
    for _ in range(2):
        found = small(**batch).to_tuple()[0]
        found.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert pruner.kept() == pytest.approx(0.5, abs=1e-3)
    assert all(torch.isfinite(parameter).all() for parameter in small.parameters())


def test_generation_goes_on() -> None:
    """With the cache of keys and values, whose layers have different numbers of heads."""
    config = hf.LlamaConfig(
        vocab_size=99,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=37,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config).eval()
    mask_randomly(model)
    small = platon.compact(model)
    start = torch.randint(3, 99, (2, 5))
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(start)}
    assert torch.equal(model.generate(start, **settings), small.generate(start, **settings))


# --- what is decided --------------------------------------------------------------------------------------------------


def test_left_padding_is_why_causal_heads_are_not_folded() -> None:
    """The reason holds: a position that sees nothing does not give the value's bias."""
    config = hf.GPT2Config(
        vocab_size=99, n_embd=20, n_layer=1, n_head=5, bos_token_id=1, eos_token_id=2, n_positions=32
    )
    model = hf.GPT2Model(config).eval()
    with torch.no_grad():
        model.h[0].attn.c_attn.weight.zero_()
        model.h[0].attn.c_attn.bias.fill_(1.0)
    seen: list[Tensor] = []
    model.h[0].attn.c_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    mask = torch.tensor([[0, 0, 1, 1]])
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7, 8]]), attention_mask=mask)
    assert torch.allclose(seen[0][:, 2:], torch.ones(1))
    assert not torch.allclose(seen[0][:, :2], torch.ones(1))


def test_a_missing_bias_is_made() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL)).eval()
    layer = model.encoder.layer[0]
    layer.output.dense.bias = None
    with torch.no_grad():
        layer.intermediate.dense.weight[3] = 0.0
        layer.intermediate.dense.bias[3] = 2.0
    small = platon.compact(model)
    assert small.encoder.layer[0].output.dense.bias is not None
    assert difference(model, small, {"input_ids": torch.arange(5)[None]}) <= LIMIT


@pytest.mark.parametrize(("gate", "up", "goes"), [(True, False, True), (False, True, False), (True, True, True)])
def test_a_gate_is_a_factor(gate: bool, up: bool, goes: bool) -> None:
    """Its bias is zero, so a zero row closes it; the other factor's bias is not, so a zero row leaves the gate."""
    config = hf.LlamaConfig(**SMALL, mlp_bias=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    model = hf.LlamaModel(config).eval()
    mlp = model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.bias.fill_(0.7)
        if gate:
            mlp.gate_proj.weight[5] = 0.0
        if up:
            mlp.up_proj.weight[5] = 0.0
    if not goes:
        with pytest.warns(UserWarning, match="nothing to remove"):
            assert platon.compact(model) is model
        return
    small = platon.compact(model)
    assert small.layers[0].mlp.down_proj.in_features == 63
    assert difference(model, small, {"input_ids": torch.arange(5)[None]}) <= LIMIT


SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@given(st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_any_zeros_of_any_shape(seed: int) -> None:
    """Rows and columns of every matrix of the blocks, at random: whatever goes, the outputs stay."""
    torch.manual_seed(seed)
    model = hf.BertModel(hf.BertConfig(**SMALL)).eval()
    with torch.no_grad():
        for family in heads(model) + neurons(model):
            for member in family.slices:
                for dim in (0, 1):
                    gone = torch.rand(member.parameter.shape[dim]) < torch.rand(1) * 1.2 - 0.2
                    member.parameter.index_fill_(dim, gone.nonzero().view(-1), 0.0)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_().mul_(torch.rand_like(parameter) < 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = platon.compact(model)
    assert difference(model, small, {"input_ids": torch.randint(99, (2, 6))}) <= LIMIT


def test_half_precision_stays() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL)).eval().to(torch.bfloat16)
    mask_randomly(model)
    small = platon.compact(model)
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}
    assert difference(model, small, {"input_ids": torch.arange(5)[None]}) < 0.1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, where it is first imported
def test_wrappers_come_off(bert: nn.Module, batch: dict[str, Tensor]) -> None:
    bert.eval()
    mask_randomly(bert)
    del batch["labels"]
    for wrapped in (nn.DataParallel(bert), torch.compile(bert)):
        small = platon.compact(wrapped)
        assert isinstance(small, hf.BertForSequenceClassification)
        assert difference(bert, small, batch) <= LIMIT


def test_frozen_parameters_stay_frozen() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL)).requires_grad_(False)
    mask_randomly(model)
    small = platon.compact(model)
    assert not any(parameter.requires_grad for parameter in small.parameters())
    assert isinstance(small.encoder.layer[0].attention.self.query, nn.Linear)
    assert not isinstance(small.encoder.layer[0].attention.self.query, Gathered)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_nothing_to_remove_is_said() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL))
    with torch.no_grad():  # zeros everywhere, but nothing as a whole
        model.encoder.layer[0].output.dense.weight.view(-1)[::3] = 0.0
    with pytest.warns(UserWarning, match="BertModel has nothing to remove") as said:
        assert platon.compact(model) is model
    assert len(said) == 1


def test_others_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="the heads and neurons of Sequential are not known: it has no"):
        platon.compact(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        platon.compact("runs/sst2")


def test_a_state_of_fixed_width_is_not_broken() -> None:
    """RWKV makes its state by the configuration, as wide as before; without a state the compact model would run."""
    config = hf.RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=30, intermediate_size=24, context_length=16)
    model = hf.RwkvForCausalLM(config).eval()
    with torch.no_grad():
        for block in model.rwkv.blocks:
            block.attention.output.weight[:, :5] = 0.0
            block.attention.value.weight[:5] = 0.0
    with pytest.raises(ValueError, match="cutting RwkvForCausalLM would break"):
        platon.compact(model)


def test_a_model_with_random_outputs_is_named() -> None:
    model = hf.ViTMAEModel(
        hf.ViTMAEConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=32)
    ).eval()
    with torch.no_grad():
        for group in neurons(model):
            for part in group.slices:
                part.parameter.mul_(part.expand((torch.arange(group.count) > 4).float()))
    with pytest.raises(ValueError, match="gives other outputs when it is run again"):
        platon.compact(model)
