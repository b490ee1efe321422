"""The folder that a run on a CPU ends with, and what the run says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from rich.console import Console

import platon
from platon import deployment
from platon.cli import training
from platon.cli.model import measure_speed
from platon.deploy import memory
from platon.deploy.loading import opened
from platon.deploy.ship import ship
from platon.deploy.shrink import shrink
from platon.lab.errors import UserError
from platon.lab.finished import reopen
from platon.lab.printer import Printer
from platon.lab.record import read_record
from platon.lab.run import prune
from platon.lab.settings import resolve
from platon.lab.source import find_source
from platon.lab.sweep.spec import Trial

TINY: dict[str, Any] = {"train_rows": 64, "eval_rows": 24, "batch": 16, "steps": 4, "keep": 0.1, "eval_every": 4}
TINY |= {"warmup": 0.0, "cooldown": 1.0, "checkpoint_every": 4, "dense": "none"}


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured in processes of their own, which tests of memory.py start."""
    found = [{"added_bytes": 8_000_000, "peak_bytes": 9_000_000}, {"added_bytes": 2_000_000, "peak_bytes": 3_000_000}]
    monkeypatch.setattr(memory, "measure", lambda models, *words: found)


def printed(record: dict[str, Any]) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(training._table(record))
    return captured.get()


def test_a_run_ends_with_the_folder_that_is_deployed(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = tmp_path / "run"
    record = prune(resolve(flags=TINY), folder, printer=Printer(lines.append), ship=ship)
    found = record["fast"]
    assert read_record(folder)["fast"] == found
    fast, pruned = platon.load(folder / "fast"), opened(folder / "model")
    pixels = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(pixels).logits, pruned(pixels).logits, rtol=1e-4, atol=1e-5)
    assert found["results"] == record["results"], "measured through the folder"
    assert found["bytes"] == (folder / "fast" / "model.safetensors").stat().st_size
    assert found["milliseconds"].keys() == {"dense", "fast"}
    assert found["memory"] == {"dense": 8_000_000, "fast": 2_000_000}
    assert found["batch"] == [8, None]
    assert found["difference"] < 1e-4
    assert (folder / "fast" / "preprocessor_config.json").exists()
    assert f"writing the model as it is deployed to {folder / 'fast'}, and measuring it" in lines
    text = printed(record)
    for words in ("fast", "memory to load and run it", "8.00 MB", "2.00 MB", "milliseconds, 8 rows", "times as fast"):
        assert words in text
    ratio = found["milliseconds"]["dense"] / found["milliseconds"]["fast"]
    assert f"{ratio:.2f} ×" in text


def test_a_structured_run_ships_its_compact_model(tmp_path: Path) -> None:
    flags = {**TINY, "units": "heads+neurons", "keep": 0.5}
    record = prune(resolve(flags=flags), tmp_path / "run", shrink=shrink, ship=ship)
    fast, small = platon.load(tmp_path / "run" / "fast"), platon.load(tmp_path / "run" / "compact")
    layers = [model.vit.layers for model in (fast, small)]
    assert [layer.mlp.fc1.out_features for layer in layers[0]] == [layer.mlp.fc1.out_features for layer in layers[1]]
    assert record["fast"]["results"] == record["results"]


def test_an_embedding_run_ends_with_a_folder_that_embeds(tmp_path: Path) -> None:
    """It opens as a SentenceTransformer, and is measured as the task measures its encoder."""
    pytest.importorskip("sentence_transformers")
    words = ["one", "two", "three", "four", "five"]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    hf.BertModel(hf.BertConfig(vocab_size=10, max_position_embeddings=32, **sizes)).save_pretrained(tmp_path / "bert")
    hf.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    texts = [" ".join(words[(row * place) % 5] for place in range(1, 2 + row % 6)) for row in range(60)]
    (tmp_path / "texts.txt").write_text("\n".join(dict.fromkeys(texts)))
    flags = {"task": "embed", "model": str(tmp_path / "bert"), "data": str(tmp_path / "texts.txt")}
    sizes = {"train_rows": 16, "eval_rows": 8, "batch": 8}
    record = prune(resolve(flags=TINY | sizes | flags), tmp_path / "run", ship=ship)
    found = record["fast"]
    assert "error" not in found
    for split, metrics in record["results"].items():
        assert found["results"][split] == pytest.approx(metrics, abs=1e-4)
    assert found["milliseconds"].keys() == {"dense", "fast"}
    model = platon.load(tmp_path / "run" / "fast")
    assert model.encode(["one two", "three"]).shape == (2, 16)
    again = reopen(tmp_path / "run").measure(opened(tmp_path / "run" / "fast"))
    assert again["validation"] == pytest.approx(found["results"]["validation"], abs=1e-4)


def test_the_fast_model_of_a_run_in_bf16_is_measured_in_float32(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    record = prune(resolve(flags={**TINY, "precision": "bf16"}), folder, ship=ship)
    assert record["fast"].get("error") is None, "sparse layers take no bfloat16"
    assert record["fast"]["results"].keys() == record["results"].keys()
    again = reopen(folder).measure(platon.load(folder / "fast"))
    assert again["validation"] == record["fast"]["results"]["validation"], "platon eval and speed, too"


def test_speed_measures_a_run_in_bf16_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its engines compute. An evaluation in bf16 would leave the models in it, which are timed and exported next."""
    prune(resolve(flags={**TINY, "precision": "bf16", "fast": False}), tmp_path / "run")
    metrics: list[Any] = []

    def measured(*models: Any, metric: Any, **setting: Any) -> None:
        metrics.append(metric)
        raise ValueError("enough")

    monkeypatch.setattr(deployment, "measure", measured)
    with pytest.raises(UserError, match="enough"):
        measure_speed(find_source(str(tmp_path / "run")))
    opened = reopen(tmp_path / "run")
    model, batch = opened.prepared.build(), opened.prepared.batch()
    with torch.no_grad():
        want = model(**batch).logits
        metrics[0](model)
        assert "forward" not in vars(model)
        assert torch.equal(model(**batch).logits, want)


def test_what_cannot_be_shipped_costs_no_run(tmp_path: Path) -> None:
    def refused(*words: Any) -> dict[str, Any]:
        raise ValueError("the smaller model differs from the pruned one: logits by 1")

    record = prune(resolve(flags=TINY), tmp_path / "run", ship=refused)
    assert record["fast"] == {"error": "the smaller model differs from the pruned one: logits by 1"}
    assert not (tmp_path / "run" / "fast").exists()
    assert "times as fast" not in printed(record)


def test_it_can_be_turned_off_and_is_in_sweeps(tmp_path: Path) -> None:
    record = prune(resolve(flags={**TINY, "fast": False}), tmp_path / "run", ship=ship)
    assert record["fast"] is None
    assert not (tmp_path / "run" / "fast").exists()
    dense = prune(resolve(flags={**TINY, "method": "dense"}), tmp_path / "dense", ship=ship)
    assert dense["fast"] is None, "nothing was pruned"
    trial = Trial("a", tmp_path, None, {"task": "digits"})
    assert not trial.resolved.settings.fast
    assert "--no-fast" in trial.command()
    asked = Trial("a", tmp_path, None, {"task": "digits", "fast": True})
    assert asked.resolved.settings.fast
    assert "--fast" in asked.command()
