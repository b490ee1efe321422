"""The examples run to the end on small data."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import platon
from platon.deploy import memory

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [
    pytest.mark.filterwarnings("ignore:no compiled sparse kernel"),  # where there is no compiler
    pytest.mark.filterwarnings("ignore:'pin_memory' argument"),  # Trainer's default, where there is no GPU
]


def example(name: str) -> Any:
    """The module in examples/, imported."""
    spec = importlib.util.spec_from_file_location(f"platon_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A CSV of texts with two labels."""
    lines = [f"the {'cat' if number % 2 else 'dog'} sat on {number} mats,{number % 2}" for number in range(40)]
    (tmp_path / "reviews.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    return tmp_path / "reviews.csv"


def test_every_example_is_run_and_is_on_the_page() -> None:
    tests = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parents[1].rglob("test_*.py"))
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    names = [file.stem for file in EXAMPLES.glob("*.py")]
    assert len(names) >= 5
    for name in names:
        assert f'example("{name}")' in tests or f'"{name}.py"' in tests
        assert f"(../examples/{name}.py)" in page


def test_plain_loop(tmp_path: Path) -> None:
    main = example("plain_loop").main
    whole = main([str(tmp_path / "whole"), "--steps", "20"])
    main([str(tmp_path / "parts"), "--steps", "20", "--stop-at", "11"])
    parts = main([str(tmp_path / "parts"), "--steps", "20"])
    assert whole.kept() == pytest.approx(0.1, abs=1e-5)
    assert parts.fingerprint() == whole.fingerprint()


def test_trainer(tiny_bert: Path, reviews: Path, tmp_path: Path) -> None:
    found = example("trainer").main([str(tiny_bert), str(reviews), str(tmp_path / "run"), "--epochs", "2"])
    assert found["kept"] == pytest.approx(0.1, abs=1e-3)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    matrices = platon.weights(model).matrices.values()
    kept = sum(int(matrix.count_nonzero()) for matrix in matrices) / sum(matrix.numel() for matrix in matrices)
    assert kept == pytest.approx(found["kept"])


def test_own_csv(tiny_bert: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In place of new processes, which take seconds each.
    monkeypatch.setattr(memory, "measure", lambda models, *words: [{"added_bytes": 1, "peak_bytes": 1}] * len(models))
    words = [str(tiny_bert), str(reviews), str(tmp_path / "run"), "--epochs", "2", "--text", "the cat sat"]
    found = example("own_csv").main(words)
    assert found["kept"] == pytest.approx(0.2, abs=1e-3)
    assert 0 <= found["accuracy"] <= 1


def test_decoder(tiny_llama: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "the cat sat on {number} mats and slept"}}\n' for number in range(40)))
    words = [str(tiny_llama), str(texts), str(tmp_path / "runs"), "--steps", "6", "--max-length", "32"]
    found = example("decoder").main(words)
    assert set(found) == {"dense", "wanda", "platon"}
    assert found["platon"] < found["wanda"]
    assert example("decoder").main(words) == found  # finished runs are read


def test_embeddings(tiny_bert: Path, tmp_path: Path) -> None:
    main = example("embeddings").main
    (tmp_path / "texts.txt").write_text("\n".join(f"the cat sat on {number} mats" for number in range(40)))
    (tmp_path / "pairs.csv").write_text("a,b,score\n" + "".join(f"cat {n},dog {n},{n % 4}\n" for n in range(8)))
    words = [str(tiny_bert), str(tmp_path / "texts.txt"), str(tmp_path / "run"), "--pairs", str(tmp_path / "pairs.csv")]
    numbers = main([*words, "--steps", "6", "--sentences", "50"])
    assert numbers["validation cosine"] > 0.5
    assert numbers["largest difference of sparsify"] < 1e-4
    again = main([*words, "--steps", "6", "--sentences", "50"])  # it is finished: nothing is trained
    assert again["validation cosine"] == numbers["validation cosine"]


def test_deploy(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure", lambda models, *words: [{"added_bytes": 1, "peak_bytes": 1}] * len(models))
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert)
    with torch.no_grad():
        for matrix in platon.weights(model).matrices.values():
            matrix[torch.rand_like(matrix) > 0.1] = 0
    model.save_pretrained(tmp_path / "pruned")
    words = ["--batch", "1", "--length", "8", "--rounds", "2"]
    found = example("deploy").main([str(tmp_path / "pruned"), str(tmp_path / "out"), *words])
    assert found["sparse"]["megabytes"] < found["dense"]["megabytes"]
    assert found["fast-half"]["milliseconds"] > 0
    tokens = torch.tensor([[2, 70, 71, 3]])
    with torch.no_grad():
        difference = platon.load(tmp_path / "out" / "fast")(tokens).logits - model.eval()(tokens).logits
    assert difference.abs().max() < 1e-5
