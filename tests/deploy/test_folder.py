"""The folder that is shipped: half precision, embeddings in int8, sentence transformers, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import platon
from platon.deploy.embedding import PackedEmbedding
from platon.deploy.manifest import checksums
from platon.deploy.storage import CONFIG, MANIFEST, WEIGHTS

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TOKENS = {"input_ids": torch.arange(3, 19).view(2, 8)}


@pytest.fixture(scope="module")
def model() -> hf.BertForSequenceClassification:
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**SMALL)).eval()
    with torch.no_grad():
        for matrix in platon.weights(model).matrices.values():
            matrix[torch.rand(matrix.shape) > 0.2] = 0.0
    return model


@pytest.fixture(scope="module")
def fast(model: nn.Module) -> nn.Module:
    return platon.sparsify(model, dense_above=0.5)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**TOKENS).logits


# --- fewer bytes ------------------------------------------------------------------------------------------------------


def test_half_precision_is_the_rounded_model(model: nn.Module, fast: nn.Module, tmp_path: Path) -> None:
    """The oracle: every matrix rounded by torch. What comes back computes in float32."""
    rounded = hf.BertForSequenceClassification(model.config).eval()
    rounded.load_state_dict({n: t.half().float() if t.ndim > 1 else t for n, t in model.state_dict().items()})
    for name, one in {"fast": fast, "dense": model}.items():
        back = platon.load(platon.save(one, tmp_path / name, precision="float16"))
        assert {parameter.dtype for parameter in back.parameters()} == {torch.float32}
        torch.testing.assert_close(logits(back), logits(rounded), rtol=1e-5, atol=1e-6)
    bits = platon.load(platon.save(model, tmp_path / "bits", sparse=True, precision="float16"))
    assert torch.equal(logits(bits), logits(rounded))
    whole, half = (platon.save(fast, tmp_path / "one"), tmp_path / "fast")
    assert (half / WEIGHTS).stat().st_size < 0.75 * (whole / WEIGHTS).stat().st_size


def test_a_table_in_int8_is_off_by_half_a_scale(model: nn.Module) -> None:
    weight = model.get_input_embeddings().weight.detach().clone()
    weight[5] = 0.0
    table = PackedEmbedding.of(weight)
    assert table.numbers.dtype == torch.int8
    error = (table.weight - weight).abs()
    assert bool((error <= table.scales[:, None] * 0.5001).all())
    assert not table.weight[5].any()
    ids = torch.tensor([[5, 98], [0, 7]])
    assert torch.equal(table(ids), table.weight[ids])
    with pytest.raises(ValueError, match="not finite cannot be stored in int8"):
        PackedEmbedding.of(torch.full((2, 2), torch.nan))


def test_embeddings_in_int8_come_back(fast: nn.Module, tmp_path: Path) -> None:
    """All three tables of BERT; saved again, they are the same."""
    folder = platon.save(fast, tmp_path / "model", precision="float16", embeddings="int8")
    back = platon.load(folder)
    tables = [module for module in back.modules() if isinstance(module, PackedEmbedding)]
    assert len(tables) == 3
    torch.testing.assert_close(logits(back), logits(fast), rtol=0.0, atol=0.02)
    again = platon.load(platon.save(back, tmp_path / "again"))
    assert torch.equal(logits(again), logits(back))
    assert not any(parameter.requires_grad for parameter in back.parameters())


def test_what_cannot_be_rounded(model: nn.Module, tmp_path: Path) -> None:
    decoder = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=16)).eval()
    back = platon.load(platon.save(decoder, tmp_path / "decoder", embeddings="int8"))
    kinds = {name: type(module) for name, module in back.named_modules()}
    assert kinds["transformer.wte"] is nn.Embedding, "the output layer reads it too"
    assert kinds["transformer.wpe"] is PackedEmbedding
    assert back.lm_head.weight is back.transformer.wte.weight
    config = hf.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ValueError, match="has no embedding table that can be stored in int8"):
        platon.save(hf.ViTModel(config), tmp_path / "vit", embeddings="int8")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"precision": "bfloat16"}, "precision must be 'float32' or 'float16', got 'bfloat16'"),
        ({"embeddings": "int4"}, "embeddings must be None or 'int8', got 'int4'"),
    ]
    for options, said in wrong:
        with pytest.raises(ValueError, match=said):
            platon.save(model, tmp_path / "wrong", **options)
    large = hf.BertModel(hf.BertConfig(**SMALL))
    with torch.no_grad():
        large.pooler.dense.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"'pooler.dense.weight' has numbers above 65504"):
        platon.save(large, tmp_path / "wrong", precision="float16")
    with pytest.raises(ValueError, match=r"is torch.bfloat16; save the model without it"):
        platon.save(large.bfloat16(), tmp_path / "wrong", precision="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoder"]


# --- what is mapped ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_arrays_lie_in_the_mapped_file(fast: nn.Module, tmp_path: Path) -> None:
    """The numbers of sparse layers and embeddings are read from the file where they are used, not copied."""
    back = platon.load(platon.save(fast, tmp_path / "model"))
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(os.fspath(tmp_path / "model" / WEIGHTS)):
            start, _, end = line.split()[0].partition("-")
            spans.append((int(start, 16), int(end, 16)))
    held = [*back.parameters(), *(buffer for name, buffer in back.named_buffers() if name.endswith("values"))]
    assert spans
    for tensor in held:
        assert any(start <= tensor.data_ptr() < end for start, end in spans)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_loading_leaves_garbage_collection_as_it_was(fast: nn.Module, tmp_path: Path, enabled: bool) -> None:
    platon.save(fast, tmp_path / "fast")
    try:
        (gc.enable if enabled else gc.disable)()
        platon.load(tmp_path / "fast")
        assert gc.isenabled() == enabled
        (tmp_path / "fast" / WEIGHTS).write_bytes(b"")
        with pytest.raises(ValueError, match=r"damaged|changed|truncated|bytes"):
            platon.load(tmp_path / "fast")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_every_edited_byte_is_noticed(fast: nn.Module, tmp_path: Path) -> None:
    folder = platon.save(fast, tmp_path / "model", embeddings="int8")
    good = (folder / WEIGHTS).read_bytes()
    data = 8 + struct.unpack("<Q", good[:8])[0]
    for place in range(data, len(good), (len(good) - data) // 20):
        (folder / WEIGHTS).write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ValueError, match=r"was changed after the model was saved|the weights are damaged") as error:
            platon.load(folder)
        assert "\n" not in str(error.value)
    for length in (0, 7, data, len(good) - 1):
        (folder / WEIGHTS).write_bytes(good[:length])
        with pytest.raises(ValueError, match="is damaged"):
            platon.load(folder)
    (folder / WEIGHTS).write_bytes(good)
    platon.load(folder)


def test_what_a_configuration_may_be_edited_in(fast: nn.Module, tmp_path: Path) -> None:
    folder = platon.save(fast, tmp_path / "model")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "id2label": {"0": "bad", "1": "good"}}))
    assert platon.load(folder).config.id2label == {0: "bad", 1: "good"}
    for changed in ({"layer_norm_eps": 1.0}, {"hidden_act": "relu"}, {"num_attention_heads": 2}):
        (folder / CONFIG).write_text(json.dumps(config | changed))
        with pytest.raises(ValueError, match=r"config.json in .* was changed after the model was saved"):
            platon.load(folder)


def test_checksums_of_a_forger_do_not_open_the_kernel(fast: nn.Module, tmp_path: Path) -> None:
    """Whoever edits columns can compute checksums too: what the arrays say is checked for itself."""
    folder = platon.save(fast, tmp_path / "model")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if name.endswith(".columns"))
    save_file({key: t.clone().fill_(255) if key == name else t.clone() for key, t in tensors.items()}, folder / WEIGHTS)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["checksums"] = checksums(folder, WEIGHTS)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="'columns' names a column that is not there"):
        platon.load(folder)


# --- sentence transformers --------------------------------------------------------------------------------------------


@pytest.fixture
def embedder(tmp_path: Path) -> Any:
    """A SentenceTransformer of a small BERT with a tokenizer of a few words."""
    package = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    place = tmp_path / "plain"
    torch.manual_seed(0)
    inner = hf.BertModel(hf.BertConfig(**SMALL)).eval()
    with torch.no_grad():
        for matrix in platon.weights(inner).matrices.values():
            matrix[torch.rand(matrix.shape) > 0.2] = 0.0
    inner.save_pretrained(place)
    hf.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(place)
    module = Transformer(str(place))
    return package.SentenceTransformer(modules=[module, Pooling(32), Normalize()], device="cpu").eval()


def test_a_sentence_transformer_comes_back(embedder: Any, tmp_path: Path) -> None:
    texts = ["one two", "three", "two two three one"]
    expected = torch.from_numpy(embedder.encode(texts))
    fast = platon.sparsify(embedder, dense_above=0.5)
    folder = platon.save(fast, tmp_path / "fast", precision="float16", embeddings="int8")
    assert (folder / "modules.json").exists()
    assert (folder / MANIFEST).exists()
    assert not (tmp_path / "fast" / "README.md").exists()
    back = platon.load(folder)
    assert type(back) is type(embedder)
    assert [type(module) for module in back] == [type(module) for module in embedder]
    found = torch.from_numpy(back.encode(texts))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.01)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3))
    exact = platon.load(platon.save(fast, tmp_path / "exact"))
    torch.testing.assert_close(torch.from_numpy(exact.encode(texts)), expected, rtol=1e-5, atol=1e-6)
    fast.save_pretrained(str(tmp_path / "own"), create_model_card=False)
    assert torch.equal(
        torch.from_numpy(platon.load(tmp_path / "own").encode(texts)), torch.from_numpy(fast.encode(texts))
    )


def test_a_sentence_transformer_of_others_is_refused(embedder: Any, tmp_path: Path) -> None:
    folder = platon.save(platon.sparsify(embedder, dense_above=0.5), tmp_path / "fast")
    good = (folder / "modules.json").read_text()
    for wrong, said in {
        good.replace("sentence_transformers.", "os."): "which is not opened",
        good.replace('"path": "1_Pooling"', '"path": "../plain"'): "which is not opened",
        "[3": "is damaged",
        "[3]": "is damaged",
    }.items():
        (folder / "modules.json").write_text(wrong)
        with pytest.raises(ValueError, match=said):
            platon.load(folder)
    (folder / "modules.json").write_text(good)
    (folder / MANIFEST).unlink()  # what is left looks like a model of transformers, but its weights do not fit
    with pytest.raises(ValueError, match="do not fit its config"):
        platon.load(folder)
