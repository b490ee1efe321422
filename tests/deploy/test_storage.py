"""Saved models: bit for bit the same when they come back, and refused when anything does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import platon
from platon.deploy import bitmask
from platon.deploy.storage import MANIFEST, SPARSE, WEIGHTS, size_on_disk
from platon.engine.proof.discovery import heads, neurons

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def prune_groups(model: nn.Module, seed: int = 0, share: float = 0.5) -> None:
    """Zero heads and neurons, all but one of each layer at the most, and one more column of every matrix."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for family in heads(model) + neurons(model):
            gone = torch.rand(family.count, generator=random) < share
            gone[-1] = False
            for member in family.slices:
                member.parameter.mul_(member.expand((~gone).float()))
                member.parameter.select(int(member.rows is not None), 3).zero_()
            family.slices[-1].parameter.select(int(family.slices[-1].rows is None), -1).zero_()  # half a head stays


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype
        and torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8), second[name].contiguous().view(-1).view(torch.uint8)
        )
        for name, tensor in first.items()
    )


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch).to_tuple()[0]


@pytest.fixture
def small() -> hf.BertForSequenceClassification:
    """A compact model, with gathered inputs too."""
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**SMALL)).eval()
    prune_groups(model)
    return platon.compact(model)


TOKENS = {"input_ids": torch.arange(3, 19).view(2, 8)}


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compacted", "sparse"), [(True, False), (False, True)])
def test_back_as_it_was(architecture: Any, compacted: bool, sparse: bool, tmp_path: Path) -> None:
    model = architecture.build()
    prune_groups(model)
    if compacted:
        model = platon.compact(model)
    state = torch.get_rng_state()
    assert platon.save(model, tmp_path / "model", sparse=sparse) == tmp_path / "model"
    back = platon.load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), state)
    assert type(back) is type(model)
    assert not back.training
    assert same_bits(model, back)
    batch = architecture.batch(model)
    assert torch.equal(logits(model, batch), logits(back, batch))
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    assert {n for n, _ in back.named_parameters(remove_duplicate=False)} - {
        n for n, _ in back.named_parameters()
    } == tied


def test_back_in_a_new_process(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Every architecture, compact: what another process computes is the same to the bit."""
    architectures = request.getfixturevalue("architectures")
    expected = {}
    for number, one in enumerate(architectures.values()):
        model = one.build()
        prune_groups(model)
        small = platon.compact(model)
        platon.save(small, tmp_path / f"model{number}")
        batch = one.batch(model)
        save_file(batch, tmp_path / f"batch{number}.safetensors")
        expected[str(number)] = logits(small, batch)
    script = (
        "import sys, warnings\n"
        "from pathlib import Path\n"
        "import torch\n"
        "warnings.simplefilter('ignore')\n"
        "torch.set_num_threads(1)\n"
        "import platon\n"
        "from safetensors.torch import load_file, save_file\n"
        "place, count = Path(sys.argv[1]), int(sys.argv[2])\n"
        "found = {}\n"
        "for number in range(count):\n"
        "    model = platon.load(place / f'model{number}')\n"
        "    batch = load_file(place / f'batch{number}.safetensors')\n"
        "    with torch.no_grad():\n"
        "        found[str(number)] = model(**batch).to_tuple()[0].contiguous()\n"
        "save_file(found, place / 'found.safetensors')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path), str(len(architectures))], check=True)
    found = load_file(tmp_path / "found.safetensors")
    assert len(found) == len(expected) == len(architectures)
    for number, name in enumerate(architectures):
        assert torch.equal(found[str(number)], expected[str(number)]), name


def test_what_comes_back_goes_on(architecture: Any, tmp_path: Path) -> None:
    """Trained, pruned, compacted and saved again."""
    model = architecture.build()
    prune_groups(model)
    platon.save(platon.compact(model), tmp_path / "model")
    back = platon.load(tmp_path / "model").train()
    optimizer = torch.optim.AdamW(back.parameters(), lr=1e-3)
    pruner = platon.Pruner(back, optimizer, schedule=platon.Constant(0.5))
    batch = architecture.batch(back)
    back(**batch).to_tuple()[0].square().mean().backward()
    optimizer.step()
    assert pruner.kept() == pytest.approx(0.5, abs=1e-3)
    pruner.detach()
    prune_groups(back.eval(), seed=5)
    again = platon.compact(back)
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in back.parameters())
    torch.testing.assert_close(logits(again, batch), logits(back, batch), atol=1e-5, rtol=0)
    platon.save(again, tmp_path / "model")  # in place of the first
    assert same_bits(again, platon.load(tmp_path / "model"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sparse", [False, True])
def test_other_precisions(dtype: torch.dtype, sparse: bool, tmp_path: Path) -> None:
    """With Llama's rotary table, a buffer that is made and not stored."""
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **ends)).eval().to(dtype)
    prune_groups(model)
    small = platon.compact(model)
    back = platon.load(platon.save(small, tmp_path / "model", sparse=sparse))
    assert same_bits(small, back)
    assert torch.equal(logits(small, TOKENS), logits(back, TOKENS))


def test_generation_settings_come_back(tmp_path: Path) -> None:
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **ends))
    model.generation_config.max_new_tokens = 7
    assert platon.load(platon.save(model, tmp_path / "model")).generation_config.max_new_tokens == 7


def test_a_configuration_with_infinity_comes_back(tmp_path: Path) -> None:
    """JSON has no infinity; transformers writes an object in its place."""
    config = hf.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    config.limits = [0.0, float("inf"), float("-inf")]
    platon.save(hf.BertModel(config), tmp_path / "model")
    assert platon.load(tmp_path / "model").config.limits == config.limits


def test_parts_with_different_attention_come_back(tmp_path: Path) -> None:
    """Implementations differ in rounding, and a part may have another one than the whole."""
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    images = {"image_size": 8, "patch_size": 4}
    words = {"vocab_size": 9, "bos_token_id": 1, "eos_token_id": 2}
    config = hf.CLIPConfig(text_config={**small, **words}, vision_config={**small, **images}, projection_dim=8)
    config._attn_implementation = {"": "eager", "text_config": "sdpa", "vision_config": "eager"}
    back = platon.load(platon.save(hf.CLIPModel(config), tmp_path / "model")).config
    found = [one._attn_implementation for one in (back, back.text_config, back.vision_config)]
    assert found == ["eager", "sdpa", "eager"]
    manifest = tmp_path / "model" / MANIFEST
    content = json.loads(manifest.read_text())
    for other in ({"text_config": 3}, {"": "flash"}, ["sdpa"], "hub/kernel", {"text_config": {"": {"": [1]}}}):
        manifest.write_text(json.dumps(content | {"attention": other}))
        assert platon.load(tmp_path / "model").config.text_config._attn_implementation in ("eager", "sdpa")


def test_other_architectures_are_stored_too(tmp_path: Path) -> None:
    """Only their shapes are those of their configuration."""
    config = hf.T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=8, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model = hf.T5ForConditionalGeneration(config)
    with torch.no_grad():
        model.encoder.block[0].layer[1].DenseReluDense.wi.weight.view(-1)[::3] = 0.0
    back = platon.load(platon.save(model, tmp_path / "model", sparse=True))
    assert same_bits(model, back)


# --- bits and values --------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@given(st.data())
def test_compressed_and_back(data: st.DataObject) -> None:
    """Any bits: minus zero, not a number, infinities; any shape, the empty one and that of a number included."""
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    density = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    count = torch.Size(shape).numel()
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count, width), generator=random, dtype=torch.uint8)
    raw *= (torch.rand(count, 1, generator=random) < density).to(torch.uint8)
    if dtype.is_floating_point and count > 2:
        special = torch.tensor([-0.0, float("nan"), float("-inf")], dtype=dtype)
        raw[:3] = special.view(-1, 1).view(torch.uint8).view(3, width)
    tensor = raw.view(-1).view(dtype).view(shape)
    stored = bitmask.compress({"x": tensor})
    back = bitmask.decompress(stored, {"x": tuple(shape)})["x"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))
    size = sum(t.numel() * t.element_size() for t in stored.values())
    assert size <= tensor.numel() * tensor.element_size()


def test_the_format_is_the_documented_one() -> None:
    """By hand: the first element is the lowest bit of the first byte."""
    tensor = torch.tensor([[0.0, 1.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, -0.0], [2.5, 0.0, 0.0]])
    stored = bitmask.compress({"w": tensor})
    assert stored["bits/w"].tolist() == [0b00000010, 0b00000011]
    assert stored["values/w"].tolist() == [1.5, -0.0, 2.5]
    assert bitmask.compress({"w": torch.ones(3)}).keys() == {"w"}


def test_a_tenth_takes_a_seventh_of_the_bytes(tmp_path: Path) -> None:
    """On disk, at 10 % kept, the prunable part takes at most 0.14 of its dense float32 bytes."""
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**{**SMALL, "hidden_size": 256, "intermediate_size": 1024}))
    prunable = platon.weights(model).matrices
    with torch.no_grad():
        for matrix in prunable.values():
            matrix[torch.rand_like(matrix) >= 0.1] = 0.0
    file = platon.save(model, tmp_path / "model", sparse=True) / SPARSE
    stored = load_file(file)
    others = sum(t.numel() * t.element_size() for name, t in stored.items() if name.split("/")[-1] not in prunable)
    dense = sum(4 * matrix.numel() for matrix in prunable.values())
    assert 0.13 < (file.stat().st_size - others) / dense <= 0.14
    assert size_on_disk(tmp_path / "model") == file.stat().st_size


# --- bad input --------------------------------------------------------------------------------------------------------


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


QUERY = "bert.encoder.layer.0.attention.self.query.weight"


def other_shape(manifest: dict[str, Any]) -> None:
    manifest["tensors"][QUERY]["shape"] = [1, 2]


def other_dtype(manifest: dict[str, Any]) -> None:
    manifest["tensors"][QUERY]["dtype"] = "float16"


def one_less(manifest: dict[str, Any]) -> None:
    del manifest["tensors"][QUERY]


def one_more(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["extra"] = {"dtype": "float32", "shape": [2]}


def keyed(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update({key: value})


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "shape": (other_shape, f"manifest.json does not fit .*'{QUERY}' is float32 .1, 2. in the one and float32"),
    "dtype": (other_dtype, f"'{QUERY}' is float16 .* in the one and float32"),
    "one less": (one_less, f"'{QUERY}' is missing in the one"),
    "one more": (one_more, "'extra' is float32 .2. in the one and missing in the other"),
    "no tensors": (keyed("tensors", [1]), "its list of tensors cannot be read"),
    "format": (keyed("format", 99), "has format 99, this version reads 1"),
    "outside": (keyed("weights", "../model.safetensors"), "names the weights '../model.safetensors'"),
    "absolute": (keyed("weights", "/etc/passwd"), "names the weights '/etc/passwd'"),
    "class": (keyed("class", "os"), "the class 'os', which is no model of transformers"),
    "a class that is no model": (keyed("class", "BertConfig"), "'BertConfig', which is no model of transformers"),
    "another class": (keyed("class", "BertForQuestionAnswering"), "does not fit the config.json beside it"),
    "another architecture": (
        keyed("class", "T5Model"),
        "does not fit config.json .* names T5Model, the other is of 'bert'",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_manifest_that_does_not_fit(misfit: str, sparse: bool, small: nn.Module, tmp_path: Path) -> None:
    change, said = MISFITS[misfit]
    folder = platon.save(small, tmp_path / "model", sparse=sparse)
    edited(folder, change)
    with pytest.raises(ValueError, match=said) as caught:
        platon.load(folder)
    assert "\n" not in str(caught.value)


def test_a_config_that_does_not_fit(small: nn.Module, tmp_path: Path) -> None:
    folder = platon.save(small, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for changes in (
        {"intermediate_size": 3},
        {"num_attention_heads": 8},
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ValueError, match=r"does not fit|was changed after the model was saved"):
            platon.load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    with pytest.raises(ValueError, match=r"config\.json' is damaged: .*hidden_size") as caught:
        platon.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file(share: float, sparse: bool, small: nn.Module, tmp_path: Path) -> None:
    folder = platon.save(small, tmp_path / "model", sparse=sparse)
    path = folder / (SPARSE if sparse else WEIGHTS)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="is damaged") as caught:
        platon.load(folder)
    assert "\n" not in str(caught.value)


def changed_tensors(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_damaged_bits(tmp_path: Path) -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL))
    name = "encoder.layer.0.output.dense.weight"
    with torch.no_grad():
        model.get_parameter(name).view(-1)[::2] = 0.0
    folder = platon.save(model, tmp_path / "model", sparse=True)
    good = (folder / SPARSE).read_bytes()

    def less_values(tensors: dict[str, Tensor]) -> None:
        tensors[f"values/{name}"] = tensors[f"values/{name}"][:-1].clone()

    def less_bits(tensors: dict[str, Tensor]) -> None:
        tensors[f"bits/{name}"] = tensors[f"bits/{name}"][:-1].clone()

    def no_values(tensors: dict[str, Tensor]) -> None:
        del tensors[f"values/{name}"]

    def no_bits(tensors: dict[str, Tensor]) -> None:
        del tensors[f"bits/{name}"]

    for change, said in {
        less_values: "count 1024 values, but there are 1023",
        less_bits: "which does not fit its shape",
        no_values: "without their values",
        no_bits: "comes without its bits",
    }.items():
        (folder / SPARSE).write_bytes(good)
        changed_tensors(folder / SPARSE, change)
        with pytest.raises(ValueError, match=f"is damaged: .*{said}"):
            platon.load(folder)


def test_inputs_that_are_not_there(small: nn.Module, tmp_path: Path) -> None:
    """A list of columns may name any number, and the file is whole all the same."""
    folder = platon.save(small, tmp_path / "model")
    name = "bert.encoder.layer.0.attention.self.query.columns"
    assert name in load_file(folder / WEIGHTS)
    changed_tensors(folder / WEIGHTS, lambda tensors: tensors[name].fill_(32))
    with pytest.raises(ValueError, match=f"'{name}' names some that are not there, of 32"):
        platon.load(folder)


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no saved model: there is neither manifest\.json nor config\.json"):
        platon.load(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": 1')
    with pytest.raises(ValueError, match="is damaged"):
        platon.load(tmp_path)
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(ValueError, match="holds no object"):
        platon.load(tmp_path)


def test_other_things_are_not_overwritten(small: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match="holds something else than a saved model"):
            platon.save(small, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_save_that_fails_leaves_the_old_one(small: nn.Module, tmp_path: Path) -> None:
    folder = platon.save(small, tmp_path / "model")

    class Broken:
        def save_pretrained(self, place: Path) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        platon.save(deepcopy(small), folder, processor=Broken())
    assert same_bits(platon.load(folder), small)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_built_again_is_not_saved(small: nn.Module, tmp_path: Path) -> None:
    small.bert.pooler.dense = nn.Linear(32, 7)
    with pytest.raises(ValueError, match=r"does not fit BertForSequenceClassification as transformers builds it"):
        platon.save(small, tmp_path / "model")
    with pytest.raises(TypeError, match="model must be a model of transformers or a SentenceTransformer, got Linear"):
        platon.save(nn.Linear(2, 2), tmp_path / "model")
    assert not list(tmp_path.iterdir())


class BertForMaskedLM(hf.BertForMaskedLM):
    """Has the name of a class of transformers, and another forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = 2 * found.logits
        return found


class Own(hf.BertForMaskedLM):
    """Has a name of its own."""


@pytest.mark.parametrize("kind", [BertForMaskedLM, Own])
def test_a_class_of_the_user_is_not_saved(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{kind.__name__} of .* cannot be saved: .* exports and runs no other code"):
        platon.save(kind(hf.BertConfig(**SMALL)), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("own", [nn.Tanh, nn.Identity])
@pytest.mark.parametrize("change", [platon.compact, deepcopy])
def test_modules_of_the_user_are_not_saved(own: Any, change: Any, tmp_path: Path) -> None:
    model = hf.BertForMaskedLM(hf.BertConfig(**SMALL)).eval()
    prune_groups(model)
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn = own()
    said = (
        f"'bert.encoder.layer.1.intermediate.intermediate_act_fn' is a {own.__name__}, where transformers builds a GELU"
    )
    with pytest.raises(ValueError, match=said):
        platon.save(change(model), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_of_the_users_modules_a_sparsified_model_can_leave_one_out(tmp_path: Path) -> None:
    model = hf.BertForMaskedLM(hf.BertConfig(**SMALL)).eval()
    inner = model.bert.encoder.layer[1].intermediate
    inner.intermediate_act_fn = nn.Tanh()
    with pytest.raises(ValueError, match="intermediate_act_fn' is a Tanh, where transformers builds a GELU"):
        platon.save(platon.sparsify(model, dense_above=1), tmp_path / "saved")
    inner.intermediate_act_fn = nn.Identity()
    fast = platon.sparsify(model, dense_above=1)
    platon.save(fast, tmp_path / "saved")
    batch = {"input_ids": torch.arange(12)[None]}
    assert torch.equal(logits(fast, batch), logits(platon.load(tmp_path / "saved"), batch))
    assert torch.allclose(logits(fast, batch), logits(model, batch), atol=1e-5)


def test_a_model_that_takes_another_module_by_itself_is_saved(tmp_path: Path) -> None:
    model = hf.BigBirdModel(hf.BigBirdConfig(**SMALL, block_size=8)).eval()
    batch = {"input_ids": torch.arange(12)[None]}
    want = model(**batch).last_hidden_state
    assert type(model.encoder.layer[0].attention.self).__name__ == "BigBirdSelfAttention"
    platon.save(model, tmp_path / "saved")
    assert torch.equal(platon.load(tmp_path / "saved")(**batch).last_hidden_state, want)


def test_a_model_with_parametrizations_is_saved(tmp_path: Path) -> None:
    sizes = {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
    config = hf.HubertConfig(**SMALL, **sizes, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4)
    model = hf.HubertModel(config).eval()
    assert type(model.encoder.pos_conv_embed.conv).__name__ == "ParametrizedConv1d"
    platon.save(model, tmp_path / "saved")
    sound = {"input_values": torch.randn(1, 400)}
    assert torch.equal(platon.load(tmp_path / "saved")(**sound).last_hidden_state, model(**sound).last_hidden_state)


def test_a_compact_model_without_its_manifest_is_one_sentence(small: nn.Module, tmp_path: Path) -> None:
    folder = platon.save(small, tmp_path / "model")
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"^cannot read the model in .*: its weights do not fit its config\.json"):
        platon.load(folder)
