"""ONNX files against PyTorch, in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import platon
from platon.deploy import onnx
from platon.engine.proof.discovery import heads, neurons, proved_groups

BERT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def zeroed(model: nn.Module) -> nn.Module:
    """Without some heads, neurons and columns."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for family in heads(model) + neurons(model):
            gone = torch.rand(family.count, generator=random) < 0.5
            gone[-1] = False
            for member in family.slices:
                member.parameter.mul_(member.expand((~gone).float()))
                member.parameter.select(int(member.rows is not None), 3).zero_()
    return model


def tokens(rows: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[-1, length // 2 + 1 :] = 0
    return {"input_ids": torch.randint(3, 99, (rows, length)), "attention_mask": mask}


def expected(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [x for x in model(**batch).to_tuple() if isinstance(x, Tensor)]


@pytest.fixture
def bert() -> nn.Module:
    torch.manual_seed(0)
    return zeroed(hf.BertForSequenceClassification(hf.BertConfig(**BERT)).eval())


@pytest.mark.parametrize("compacted", [False, True])
def test_any_batch_and_any_length(bert: nn.Module, compacted: bool, tmp_path: Path) -> None:
    model = platon.compact(bert) if compacted else bert
    batch = tokens(4, 9)
    model.train()
    found = onnx.export(model, tmp_path / "model.onnx", [batch | {"labels": torch.zeros(4, dtype=torch.int64)}])
    assert model.training, "it is left as it was"
    model.eval()
    assert found.inputs == ("input_ids", "attention_mask")
    assert found.outputs == ("logits",)
    assert found.difference < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = onnx.Session(found.path, threads=1)
    for rows, length in ((1, 1), (1, 30), (5, 2), (7, 17)):
        batch = tokens(rows, length)
        torch.testing.assert_close(session(batch), expected(model, batch), atol=1e-5, rtol=1e-5)


def test_images(tmp_path: Path) -> None:
    """One row is enough to export with."""
    size = {name: value for name, value in BERT.items() if name != "vocab_size"}
    model = platon.compact(
        zeroed(hf.ViTForImageClassification(hf.ViTConfig(**size, image_size=8, patch_size=4)).eval())
    )
    found = onnx.export(model, tmp_path / "model.onnx", [{"pixel_values": torch.randn(1, 3, 8, 8)}])
    batch = {"pixel_values": torch.randn(6, 3, 8, 8)}
    torch.testing.assert_close(onnx.Session(found.path)(batch), expected(model, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("compacted", [False, True])
def test_every_architecture(architecture: Any, compacted: bool, tmp_path: Path) -> None:
    model = zeroed(architecture.build())
    if compacted:
        model = platon.compact(model)
    batches = [architecture.batch(model), architecture.batch(model, rows=2, length=5)]
    assert onnx.export(model, tmp_path / "model.onnx", batches).difference < 1e-5


# --- bad input --------------------------------------------------------------------------------------------------------


def test_what_is_not_exact_is_not_written(bert: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("the old one")

    class Wrong:
        def __init__(self, file: Path) -> None:
            assert file.read_text() == "the new one"

        def __call__(self, batch: Any) -> list[Tensor]:
            return [one + 0.01 for one in expected(bert, batch)]

    def write(graph: Any, batch: Any, file: Path) -> None:
        graph(*batch.values())
        file.write_text("the new one")

    monkeypatch.setattr(onnx, "_write", write)
    monkeypatch.setattr(onnx, "Session", Wrong)
    with pytest.raises(ValueError, match=r"is not exact, so it is not written: logits differs by 0\.01"):
        onnx.export(bert, path, [tokens(2, 6)])
    assert path.read_text() == "the old one"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_exporter_that_gives_up(bert: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such\noperator")

    monkeypatch.setattr(torch.onnx, "export", give_up)
    with pytest.raises(ValueError, match="torch cannot export BertForSequenceClassification to ONNX: no such operator"):
        onnx.export(bert, tmp_path / "model.onnx", [tokens(2, 6)])
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(bert: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name == "onnxruntime" else name)
    with pytest.raises(ValueError, match=r"ONNX needs onnxruntime: pip install 'platon\[export\]'"):
        onnx.export(bert, tmp_path / "model.onnx", [tokens(2, 6)])


def test_no_batch(bert: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give at least one batch"):
        onnx.export(bert, tmp_path / "model.onnx", [])


@pytest.mark.slow
def test_heads_whose_places_stay(tmp_path: Path) -> None:
    """BLIP's attention computes with as many heads as before: its linears fill in zeros."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = zeroed(hf.BlipVisionModel(hf.BlipVisionConfig(**small, image_size=16, patch_size=8)).eval())
    compacted = platon.compact(model)
    assert any(part.pattern.padded for part in proved_groups(model))
    found = onnx.export(compacted, tmp_path / "model.onnx", [{"pixel_values": torch.randn(2, 3, 16, 16)}])
    assert found.difference <= 1e-5
