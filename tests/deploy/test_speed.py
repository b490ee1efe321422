"""What is measured, and how: with a clock and engines of our own, and once for real."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import platon
from platon.deploy import memory, speed
from platon.deploy.engine import Ready, Subject
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

    def engine(subject: Subject) -> Ready:
        size = sum(parameter.numel() for parameter in subject.open().parameters())

        def call(batch: Any) -> dict[str, Tensor]:
            name = "dense" if size > 5000 else "pruned"
            state["order"].append((name, tuple(batch["input_ids"].shape)))
            state["now"] += 1e-3 * state["takes"][name].pop(0)
            return {"logits": torch.zeros(len(batch["input_ids"]), 2)}

        assert len(subject.batch["input_ids"]) > 1, "it is prepared with several rows"
        return Ready(call)

    monkeypatch.setattr(speed, "ENGINES", {"eager": engine, "fake": engine})
    monkeypatch.setattr(speed.time, "perf_counter", lambda: state["now"])
    return state


@pytest.fixture(autouse=True)
def no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory without new processes, except where that is tested."""
    if "process" not in request.node.name:
        monkeypatch.setattr(
            memory, "measure", lambda models, *words: [{"added_bytes": 1, "peak_bytes": 2} for _ in models]
        )


def test_models_take_turns(folders: dict[str, Path], clock: dict[str, Any]) -> None:
    warm = [100.0, 100.0, 100.0]  # a first call that shows whether it runs, and two of warm-up
    clock["takes"] = {"dense": [*warm, 10.0, 30.0, 20.0], "pruned": [*warm, 5.0, 4.0, 6.0]}
    sizes = [sum(p.numel() for p in opened(folder).parameters()) for folder in folders.values()]
    assert sizes[0] > 5000 > sizes[1], sizes
    found = measure(folders, TOKENS, Setting(("eager",), (4,), (6,), rounds=3))
    names = [name for name, _ in clock["order"]]
    assert names == ["dense", "pruned"] * 3 + ["dense", "pruned", "pruned", "dense", "dense", "pruned"]
    assert {shape for _, shape in clock["order"]} == {(4, 6)}
    dense, pruned = found["timings"]
    assert (dense["model"], dense["engine"], dense["rows"], dense["length"]) == ("dense", "eager", 4, 6)
    assert (dense["low_ms"], dense["median_ms"], dense["high_ms"]) == pytest.approx((10, 20, 30))
    assert dense["per_second"] == pytest.approx(4 / 0.020)
    assert pruned["median_ms"] == pytest.approx(5)
    assert [line["added_bytes"] for line in found["contenders"]] == [1, 1]
    assert found["contenders"][0]["bytes"] == (folders["dense"] / "model.safetensors").stat().st_size
    assert found["models"]["pruned"]["parameters"] == sizes[1]
    json.dumps(found, allow_nan=False)


def test_all_shapes_and_the_metric_of_each_engine(folders: dict[str, Path], clock: dict[str, Any]) -> None:
    clock["takes"] = {"dense": [1.0] * 99, "pruned": [1.0] * 99}
    seen: list[Any] = []

    def metric(model: Any) -> dict[str, dict[str, float]]:
        seen.append(model)
        return {"validation": {"accuracy": 0.5}}

    lines: list[str] = []
    found = measure(folders, TOKENS, Setting(("fake",), (1, 3), (4, 9), rounds=1), metric, lines.append)
    shapes = [(line["rows"], line["length"]) for line in found["timings"][::3]]
    assert shapes == [(1, 4), (3, 4), (1, 9), (3, 9)]
    assert [(line["engine"], line["model"]) for line in found["contenders"]] == [
        ("eager", "dense"),
        ("fake", "dense"),
        ("fake", "pruned"),
    ]
    assert isinstance(seen[0], hf.PreTrainedModel)
    answer = seen[1](**TOKENS)
    assert answer.keys() == {"loss", "logits"}, "measured through the engine"
    assert answer["logits"].shape == (2, 2)
    assert all(line["metrics"] == {"validation": {"accuracy": 0.5}} for line in found["contenders"])
    assert "fake, pruned, 3 × 9 tokens: 1 ms" in lines
    assert any(line.startswith("fake, dense: 0.0") and line.endswith(" MB, accuracy 0.5") for line in lines)


def test_who_takes_part() -> None:
    """Engines that gain nothing from zeros get the pruned model only if its matrices are smaller."""
    engines = ("eager", "sparse", "onnx-int8")
    same = [tuple(one) for one in speed._contenders(engines, {"dense": 9, "pruned": 9})]
    assert same == [("eager", "dense"), ("eager", "pruned"), ("sparse", "pruned"), ("onnx-int8", "dense")]
    smaller = [tuple(one) for one in speed._contenders(engines, {"dense": 9, "pruned": 5})]
    assert smaller == [*same, ("onnx-int8", "pruned")]
    assert [tuple(one) for one in speed._contenders(("sparse",), {"dense": 9, "pruned": 9})] == [same[0], same[2]]


def test_an_engine_that_gives_up_is_said(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others go on."""

    def broken(subject: Subject) -> Ready:
        raise RuntimeError("no\ncompiler")

    monkeypatch.setitem(speed.ENGINES, "compile", broken)
    found = measure(folders, TOKENS, Setting(("compile", "eager"), (2,), (4,), rounds=1))
    wanted = {"engine": "compile", "model": "dense", "rows": 2, "length": 4, "error": "RuntimeError: no compiler"}
    assert found["timings"][0] == wanted
    assert [line["model"] for line in found["timings"][2:]] == ["dense", "pruned"]
    assert [line["engine"] for line in found["contenders"]] == ["eager", "eager"]


def test_more_tokens_than_the_model_takes(folders: dict[str, Path]) -> None:
    found = measure(folders, TOKENS, Setting(("eager",), (2,), (65,), rounds=1))
    assert {line["error"] for line in found["timings"]} == {"the model takes at most 64 tokens, got 65"}
    assert found["contenders"] == []


def test_memory_is_what_a_model_adds_to_a_process_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    """For real: not what torch takes, nor what this process holds; and an engine that fails costs no other."""
    ballast = torch.ones(100_000_000)  # 400 MB
    assert memory.peak() > ballast.numel() * 4
    models = [("eager", folder, tmp_path) for folder in (folders["pruned"], tmp_path / "none", folders["dense"])]
    models.append(("torch-int8", folders["dense"], tmp_path))
    first, failed, last, other_engine = memory.measure(models, shaped(TOKENS, 2, 8), 1)
    assert 0 < first["added_bytes"] <= first["peak_bytes"] < 100e6
    assert 0 < last["added_bytes"] < 100e6
    assert other_engine["added_bytes"] > 0
    assert list(failed) == ["error"]
    assert "none" in failed["error"]


def test_what_a_call_adds() -> None:
    def run() -> object:
        pages = mmap.mmap(-1, 100_000_000)  # new ones: an allocator may have memory left from other tests
        np.frombuffer(pages, dtype=np.uint8)[:] = 1
        return pages

    found = memory.added(run)
    assert 95e6 < found["added_bytes"] <= found["peak_bytes"] + 1e6 < 130e6


def test_a_process_that_fails_is_said(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "python-that-fails")

    def failed(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == ["python-that-fails", "-m", "platon.deploy.memory"]
        return subprocess.CompletedProcess(command, 1, "", "Traceback\n  lines\nMemoryError: all  of it\n")

    monkeypatch.setattr(subprocess, "run", failed)
    found = memory.measure([("eager", folders["pruned"], tmp_path)] * 2, shaped(TOKENS, 2, 8), 1)
    assert found == [{"error": "MemoryError: all of it"}] * 2


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
        ({"engines": ("fast",)}, "no engine is called 'fast'; there are eager, compile, sparse, onnx, onnx-int8"),
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
@pytest.mark.parametrize("engine", [name for name in speed.ENGINES if name != "eager"])
def test_every_engine_runs(folders: dict[str, Path], engine: str) -> None:
    """And computes what the model computes, or nearly, where it is quantised."""
    for package in ("openvino", "nncf"):
        if engine.startswith("openvino"):
            pytest.importorskip(package)
    answers: dict[Any, Tensor] = {}

    def metric(model: Any) -> dict[str, dict[str, float]]:
        with torch.no_grad():
            answers[len(answers)] = model(**TOKENS)["logits"]
        return {}

    found = measure(folders, TOKENS, Setting((engine,), (1, 2), (4,), rounds=2), metric)
    assert not [line["error"] for line in found["timings"] if "error" in line]
    assert all(line["median_ms"] > 0 for line in found["timings"])
    places = [(line["engine"], line["model"]) for line in found["contenders"]]
    assert len(places) == (2 if engine == "sparse" else 3)
    near = 0.02 if engine.endswith("int8") else 1e-4
    for place, (_, model) in enumerate(places):
        if model == "dense":
            torch.testing.assert_close(answers[place], answers[0], rtol=near, atol=near)
