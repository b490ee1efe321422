"""What is measured, and how: with a clock and engines of our own, and once for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import platon
from platon.deploy import memory, speed
from platon.deploy.speed import Setting, measure, opened, shaped

BERT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
TOKENS = {
    "input_ids": torch.arange(3, 13).view(2, 5),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    "labels": torch.zeros(2, dtype=torch.int64),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model as transformers saves it, and a compact one."""
    place = tmp_path_factory.mktemp("models")
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT))
    model.save_pretrained(place / "dense")
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight[:, ::2] = 0.0
    platon.save(platon.compact(model), place / "pruned")
    return {name: place / name for name in ("dense", "pruned")}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Time that passes only inside calls: a model's next entry in `takes`, in milliseconds; and no other processes."""
    state: dict[str, Any] = {"now": 0.0, "order": [], "takes": {}}

    def engine(open_model: Any, batch: Any, place: Path) -> Any:
        size = sum(parameter.numel() for parameter in open_model().parameters())

        def call(batch: Any) -> None:
            name = "dense" if size > 5000 else "pruned"
            state["order"].append((name, tuple(batch["input_ids"].shape)))
            state["now"] += 1e-3 * state["takes"][name].pop(0)

        assert len(batch["input_ids"]) > 1, "it is prepared with several rows"
        return call

    monkeypatch.setattr(speed, "ENGINES", {"fake": engine})
    monkeypatch.setattr(speed.time, "perf_counter", lambda: state["now"])
    monkeypatch.setattr(speed, "_memory", lambda engine, folder, batch, place: {"peak_bytes": len(batch)})
    return state


def test_models_take_turns(folders: dict[str, Path], clock: dict[str, Any]) -> None:
    warm = [100.0, 100.0]
    clock["takes"] = {"dense": [*warm, 10.0, 30.0, 20.0], "pruned": [*warm, 5.0, 4.0, 6.0]}
    sizes = [sum(p.numel() for p in opened(folder).parameters()) for folder in folders.values()]
    assert sizes[0] > 5000 > sizes[1], sizes
    found = measure(folders, TOKENS, Setting(("fake",), (4,), (6,), rounds=3))
    names = [name for name, _ in clock["order"]]
    assert names == ["dense", "pruned"] * 2 + ["dense", "pruned", "pruned", "dense", "dense", "pruned"]
    assert {shape for _, shape in clock["order"]} == {(4, 6)}
    dense, pruned = found["timings"]
    assert (dense["model"], dense["engine"], dense["rows"], dense["length"]) == ("dense", "fake", 4, 6)
    assert (dense["low_ms"], dense["median_ms"], dense["high_ms"]) == pytest.approx((10, 20, 30))
    assert dense["per_second"] == pytest.approx(4 / 0.020)
    assert pruned["median_ms"] == pytest.approx(5)
    assert [line["peak_bytes"] for line in found["memory"]] == [2, 2]
    assert found["models"]["dense"]["bytes"] == (folders["dense"] / "model.safetensors").stat().st_size
    assert found["models"]["pruned"]["parameters"] == sizes[1]
    json.dumps(found, allow_nan=False)


def test_all_shapes_and_the_metric(folders: dict[str, Path], clock: dict[str, Any]) -> None:
    clock["takes"] = {"dense": [1.0] * 99, "pruned": [1.0] * 99}
    seen: list[nn.Module] = []

    def metric(model: nn.Module) -> dict[str, dict[str, float]]:
        seen.append(model)
        return {"validation": {"accuracy": 0.5}}

    found = measure(folders, TOKENS, Setting(("fake",), (1, 3), (4, 9), rounds=1), metric)
    shapes = [(line["rows"], line["length"]) for line in found["timings"][::2]]
    assert shapes == [(1, 4), (3, 4), (1, 9), (3, 9)]
    assert len(seen) == 2
    assert found["models"]["pruned"]["metrics"] == {"validation": {"accuracy": 0.5}}


def test_an_engine_that_gives_up_is_said(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others go on."""

    def broken(open_model: Any, batch: Any, place: Path) -> Any:
        raise RuntimeError("no\ncompiler")

    monkeypatch.setitem(speed.ENGINES, "compile", broken)
    monkeypatch.setattr(speed, "_memory", lambda *args: {"peak_bytes": 1})
    found = measure(folders, TOKENS, Setting(("compile", "eager"), (2,), (4,), rounds=1))
    assert found["timings"][0] == {"engine": "compile", "rows": 2, "length": 4, "error": "RuntimeError: no compiler"}
    assert [line["model"] for line in found["timings"][1:]] == ["dense", "pruned"]


def test_more_tokens_than_the_model_takes(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_memory", lambda *args: {"peak_bytes": 1})
    found = measure(folders, TOKENS, Setting(("eager",), (2,), (65,), rounds=1))
    assert [line["error"] for line in found["timings"]] == ["the model takes at most 64 tokens, got 65"]


def test_memory_is_that_of_a_process_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    """For real: more than torch alone takes, and less than this process has held after filling its memory."""
    ballast = torch.ones(250_000_000)  # 1 GB
    mine = memory.peak()
    assert mine > ballast.numel() * 4
    found = speed._memory("eager", folders["pruned"], shaped(TOKENS, 2, 8), tmp_path)
    assert 50e6 < found["peak_bytes"] < mine - 200e6


def test_a_process_that_fails_is_said(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "python-that-fails")

    def failed(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == ["python-that-fails", "-m", "platon.deploy.memory"]
        return subprocess.CompletedProcess(command, 1, "", "Traceback\n  lines\nMemoryError: all  of it\n")

    monkeypatch.setattr(subprocess, "run", failed)
    found = speed._memory("eager", folders["pruned"], shaped(TOKENS, 2, 8), tmp_path)
    assert found == {"error": "MemoryError: all of it"}


def test_threads_are_set_and_given_back(folders: dict[str, Path], clock: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    clock["takes"] = {"dense": [1.0] * 9, "pruned": [1.0] * 9}
    found = measure(folders, TOKENS, Setting(("fake",), (2,), (4,), rounds=1, threads=before + 1))
    assert found["machine"]["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_batches_are_made_of_real_ones() -> None:
    made = shaped(TOKENS, 3, 7)
    assert made.keys() == {"input_ids", "attention_mask"}
    assert made["input_ids"].tolist()[0] == [3, 4, 5, 6, 7, 3, 4]
    assert made["input_ids"][2].equal(made["input_ids"][0])
    assert made["attention_mask"].all()
    pixels = {"pixel_values": torch.randn(2, 3, 4, 4)}
    assert shaped(pixels, 5, None)["pixel_values"].shape == (5, 3, 4, 4)
    assert shaped(pixels, 1, 99)["pixel_values"].equal(pixels["pixel_values"][:1])


def test_models_are_opened_whoever_saved_them(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        model = opened(folder)
        assert isinstance(model, hf.BertForSequenceClassification)
        assert not model.training
    assert isinstance(opened(folders["dense"]).bert.encoder.layer[0].output.dense.weight, Tensor)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"engines": ("fast",)}, "no engine is called 'fast'; there are eager, compile, onnx"),
        ({"rows": (1, 0)}, "batch must be at least 1, got 1, 0"),
        ({"rows": ()}, "batch must be at least 1, got none"),
        ({"lengths": (-3,)}, "length must be at least 1, got -3"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
    ],
)
def test_bad_settings(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Setting(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "compile", "onnx"])
def test_every_engine_runs(folders: dict[str, Path], engine: str) -> None:
    found = measure(folders, TOKENS, Setting((engine,), (1, 2), (4,), rounds=2))
    assert [line["model"] for line in found["timings"]] == ["dense", "pruned"] * 2
    assert all(line["median_ms"] > 0 for line in found["timings"])
    assert all(line["peak_bytes"] > 50e6 for line in found["memory"])
