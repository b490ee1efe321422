"""Saved models that somebody damaged or made up: refused in one sentence, before they take memory or time."""

from __future__ import annotations

import json
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

import platon
from platon.deploy.manifest import checksums
from platon.deploy.storage import CONFIG, MANIFEST, SPARSE, WEIGHTS

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
QUERY = "bert.encoder.layer.0.attention.self.query.weight"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**SMALL))
    return platon.save(model, tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def edit(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object], file: str = WEIGHTS) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def refusal(folder: Path) -> str:
    """What `platon.load` says; it has to be one sentence."""
    with pytest.raises(ValueError, match=r".") as caught:
        platon.load(folder)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 500
    return said


SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"num_labels": 10**9, "id2label": None, "label2id": None}, "'num_labels' is 1000000000, and no tensor"),
    "layers": ({"num_hidden_layers": 10**6}, "'num_hidden_layers' is 1000000, and no tensor"),
    "a thousand layers": ({"num_hidden_layers": 1000}, "a model of more tensors than the 41 that are there"),
    "positions": ({"max_position_embeddings": 2 * 10**8}, "position_embeddings.weight' is .512, 32. in the one"),
    "words": ({"vocab_size": 10**12}, "word_embeddings.weight' is .99, 32. in the one"),
    "no heads": ({"num_attention_heads": 0}, "no BertForSequenceClassification can be built from it"),
    "negative": ({"hidden_size": -32}, "is damaged"),
    "negative heads": ({"num_attention_heads": -4}, "was changed after the model was saved|is damaged"),
    "not a number": ({"num_hidden_layers": float("nan")}, "'num_hidden_layers' is nan"),
    "activation": ({"hidden_act": "unknown"}, "is damaged.*unknown"),
    "a list as number": ({"chunk_size_feed_forward": []}, "'chunk_size_feed_forward' is '..', it has to be a number"),
    "padding": ({"pad_token_id": 10**6}, "is damaged"),
    "negative padding": ({"pad_token_id": -500}, "is damaged"),
}


@pytest.mark.parametrize("size", SIZES)
def test_a_configuration_that_is_none(size: str, folder: Path) -> None:
    """In less than a tenth of a gigabyte and some seconds: it is compared with the tensors before it is built."""
    changes, said = SIZES[size]
    edit(folder / CONFIG, lambda config: config.update(changes))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert re.search(said, refusal(folder))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert time.monotonic() - start < 10


def test_positions_that_no_tensor_shows(tmp_path: Path) -> None:
    """A table that is computed from the configuration alone."""
    config = hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99, n_positions=64)
    folder = platon.save(hf.GPT2Model(config), tmp_path / "model")
    edit(folder / CONFIG, lambda content: content.update({"n_positions": 10**6, "n_ctx": 10**6}))
    assert "does not fit" in refusal(folder)


def test_code_on_a_hub_is_not_looked_for(folder: Path) -> None:
    """Or run: transformers takes the name of an implementation for a repository of kernels."""
    expected = platon.load(folder)
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        edit(folder / CONFIG, lambda config, key=key: config.update({key: "someone/kernel"}))
        edit(folder / MANIFEST, lambda manifest: manifest.update(checksums=checksums(folder, WEIGHTS)))
        model = platon.load(folder)
        assert model.config._attn_implementation == expected.config._attn_implementation


def shaped(shape: Any) -> Change:
    return lambda manifest: manifest["tensors"][QUERY].update({"shape": shape})


MANIFESTS: dict[str, tuple[Change, str]] = {
    "infinite": (shaped([float("inf"), 32]), "its list of tensors cannot be read"),
    "negative": (shaped([-32, -32]), "its list of tensors cannot be read"),
    "a fraction": (shaped([32.0, 32.5]), "its list of tensors cannot be read"),
    "a truth value": (shaped([True, 32]), "its list of tensors cannot be read"),
    "huge": (shaped([10**30]), "its list of tensors cannot be read"),
    "a word": (shaped("32"), "its list of tensors cannot be read"),
    "dtype": (lambda m: m["tensors"][QUERY].update({"dtype": "nn"}), "its list of tensors cannot be read"),
    "dtype, a list": (lambda m: m["tensors"][QUERY].update({"dtype": []}), "its list of tensors cannot be read"),
    "another kind": (lambda m: m.update({"dtypes": {"bert.embeddings.position_ids": "float32"}}), "gives the buffer"),
    "buffers": (lambda m: m.update({"dtypes": [1]}), "its list of tensors cannot be read"),
    "no class": (lambda m: m.update({"class": "PreTrainedModel"}), "'PreTrainedModel', which is no model of"),
    "a class of others": (lambda m: m.update({"class": "AutoModel"}), "'AutoModel', which is no model of"),
    "a list as class": (lambda m: m.update({"class": ["BertModel"]}), "which is no model of transformers"),
    "an abstract class": (
        lambda m: m.update({"class": "BertPreTrainedModel"}),
        "'BertPreTrainedModel', which is no model",
    ),
    "true as format": (lambda m: m.update({"format": True}), "has format True"),
    "modules": (lambda m: m.update({"format": 2, "replaced": {"x": 3}}), "its list of tensors cannot be read"),
    "no such module": (lambda m: m.update({"replaced": {"x": {"kind": "nothing"}}}), "no layer 'x'"),
    "no such kind": (lambda m: m.update({"replaced": {"bert": {"kind": "Bert"}}}), "kind 'Bert', this version reads"),
    "heads": (lambda m: m.update({"heads": 3}), "the numbers of heads differ"),
}


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_that_is_none(manifest: str, folder: Path) -> None:
    change, said = MANIFESTS[manifest]
    edit(folder / MANIFEST, change)
    assert re.search(said, refusal(folder))


@pytest.mark.parametrize("file", [MANIFEST, CONFIG])
def test_deeply_nested(file: str, folder: Path) -> None:
    (folder / file).write_text("[" * 200_000)
    assert "nested too deeply" in refusal(folder)


def test_integers_under_the_name_of_a_weight(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({QUERY: torch.ones(32, 32, dtype=torch.int64)}))
    edit(folder / MANIFEST, lambda manifest: manifest["tensors"][QUERY].update({"dtype": "int64"}))
    assert f"'{QUERY}' is int64 [32, 32] in the one and float32 [32, 32] in the other" in refusal(folder)


def test_the_same_tensor_as_dense_and_as_bits(tmp_path: Path) -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL))
    name = "encoder.layer.0.output.dense.weight"
    with torch.no_grad():
        model.get_parameter(name).zero_()
    folder = platon.save(model, tmp_path / "model", sparse=True)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(32, 64)}), SPARSE)
    assert f"'{name}' is there twice" in refusal(folder)


def test_generation_settings_that_are_none(tmp_path: Path) -> None:
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    folder = platon.save(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **ends)), tmp_path / "model")
    (folder / "generation_config.json").write_text("[]")
    assert "it holds no object" in refusal(folder)


def test_a_folder_without_its_manifest_opens_as_the_same_model(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    assert type(platon.load(folder)) is hf.BertForSequenceClassification


def test_a_classifier_is_not_opened_without_its_head(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    edit(folder / CONFIG, lambda content: content.pop("architectures"))
    with pytest.raises(ValueError, match=r"names no class, and BertModel has no 'classifier.bias'"):
        platon.load(folder)
