"""`platon prune` with a teacher: the dense twin, the model before training, a named model; resumed bit for bit."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertForSequenceClassification

from platon import cli
from platon.lab.errors import UserError
from platon.lab.record import read_record

TINY = shlex.split(
    "--batch 8 --steps 8 --eval-every 4 --log-every 2 --checkpoint-every 3 --every 2 --warmup 1 --cooldown 3 "
    "--keep 0.3 --learning-rate 1e-3 --checkpoints 9 --keep-checkpoints --no-fast"
)


def prune(*words: Any) -> None:
    assert not cli.app(["prune", *map(str, words), *TINY], standalone_mode=False)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def sst2(write_sst2: Callable[..., Path], tiny_bert: Path, tmp_path: Path) -> list[Any]:
    """Options for SST-2 with the tiny BERT."""
    return ["--task", "sst2", "--data", write_sst2(), "--model", tiny_bert]


@pytest.fixture
def embed(tiny_bert: Path, tmp_path: Path) -> list[Any]:
    """Options for embeddings with the tiny BERT."""
    words = ("cat", "dog", "mat", "film")
    texts = [f"the {one} sat on a {other} {number}" for number in range(3) for one in words for other in words]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    rows = [
        {"a": one, "b": other, "score": float(number % 5)}
        for number, (one, other) in enumerate(zip(texts[:10], texts[10:20], strict=True))
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ["--data", tmp_path / "texts.txt", "--pairs", tmp_path / "pairs.jsonl"]
    return ["--task", "embed", "--model", tiny_bert, *data]


def test_the_dense_twin_teaches(sst2: list[Any], tmp_path: Path) -> None:
    taught, plain = tmp_path / "taught", tmp_path / "plain"
    options = ["--dense", "first", "--teacher", "dense", "--hidden-weight", 1, "--temperature", 3]
    prune(*sst2, *options, "-o", taught)
    prune(*sst2, "--dense", "first", "-o", plain)
    assert same(taught / "dense", plain / "dense")  # the twin has no teacher
    assert not same(taught, plain)
    record = read_record(taught)
    said = {name: record["settings"][name] for name in ("teacher", "distil_weight", "temperature", "hidden_weight")}
    assert said == {
        "teacher": {"value": "dense", "source": "user"},
        "distil_weight": {"value": 0.5, "source": "ours"},
        "temperature": {"value": 3.0, "source": "user"},
        "hidden_weight": {"value": 1.0, "source": "user"},
    }
    assert record["kept"] == pytest.approx(0.3, abs=1e-3)
    assert "It learned from the answers of its dense version (weight 0.5)." in (taught / "model/README.md").read_text()
    assert "It learned" not in (plain / "model" / "README.md").read_text()


def test_weight_zero_is_a_run_without_a_teacher(sst2: list[Any], tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    prune(*sst2, "--method", "dense", "-o", trained)
    again = [*sst2[:-1], trained / "model"]
    prune(*again, "-o", tmp_path / "plain")
    prune(*again, "--teacher", "dense", "--distil-weight", 0, "-o", tmp_path / "zero")
    assert same(tmp_path / "plain", tmp_path / "zero")
    prune(*again, "--teacher", trained / "model", "-o", tmp_path / "named")
    prune(*again, "--teacher", "dense", "-o", tmp_path / "itself")
    assert same(tmp_path / "named", tmp_path / "itself")
    assert not same(tmp_path / "named", tmp_path / "plain")


def wider_teacher(tiny_bert: Path, folder: Path) -> Path:
    """A trained model, as far as anyone can tell, whose states are wider."""
    shutil.copytree(tiny_bert, folder)
    names = {0: "negative", 1: "positive"}
    config = BertConfig.from_pretrained(
        tiny_bert, hidden_size=24, num_hidden_layers=2, id2label=names, label2id={v: k for k, v in names.items()}
    )
    torch.manual_seed(7)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("wider", [False, True])
def test_resumed_bit_for_bit(sst2: list[Any], tiny_bert: Path, tmp_path: Path, wider: bool) -> None:
    trained = tmp_path / "trained"
    prune(*sst2, "--method", "dense", "-o", trained)
    teacher = wider_teacher(tiny_bert, tmp_path / "wider") if wider else "dense"
    options = [*sst2[:-1], trained / "model", "--teacher", teacher, "--hidden-weight", 1]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    prune(*options, "-o", whole)
    prune(*options, "-o", parts)
    assert not any("distillation" in name for name in weights(whole))
    # As if it had been killed after the first checkpoint.
    (parts / "record.json").unlink()
    shutil.rmtree(parts / "model")
    for step in (6, 8):
        shutil.rmtree(parts / "checkpoints" / f"checkpoint-{step}")
    assert (parts / "checkpoints" / "checkpoint-3" / "complete.json").is_file()
    prune(*options, "-o", parts, "--resume")
    assert same(whole, parts)


def test_embeddings_without_labels(embed: list[Any], tiny_bert: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prune(*embed, "-o", run)
    record = read_record(run)
    assert record["kept"] == pytest.approx(0.3, abs=1e-3)
    results = record["results"]
    assert set(results["validation"]) == {"cosine", "rank_correlation", "neighbours"}
    assert set(results["pairs"]) == {"spearman", "dense_spearman"}
    assert record["data"]["pairs_rows"] in (10, 20)
    assert 0.5 < results["validation"]["cosine"] < 1
    # The folder is one of sentence-transformers, and embeds as the run measured.
    ours, dense = (SentenceTransformer(str(folder), device="cpu") for folder in (run / "model", tiny_bert))
    text = ["the cat sat on a film 1"]
    assert ours.encode(text).shape == dense.encode(text).shape
    cosine = float(ours.similarity(ours.encode(text), dense.encode(text)))
    assert cosine == pytest.approx(results["validation"]["cosine"], abs=0.2)
    assert not cli.app(["eval", str(run)], standalone_mode=False)


def test_embeddings_measured_again_are_the_same(embed: list[Any], tmp_path: Path) -> None:
    from platon.lab.finished import evaluate_run

    run = tmp_path / "run"
    prune(*embed, "-o", run)
    record, results = evaluate_run(run)
    for split, metrics in record["results"].items():
        assert results[split] == pytest.approx(metrics, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--teacher", "none"], "embed has no labels, so it needs a teacher; leave out --teacher none"),
        (["--distil-weight", "0.5"], "embed has no labels, so distil_weight must be 1, got 0.5"),
        (["--dense", "first"], "embed is compared with the model that it starts from; leave out --dense first"),
    ],
)
def test_what_embeddings_cannot_do(embed: list[Any], tmp_path: Path, options: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        prune(*embed, *options, "-o", tmp_path / "run")


def test_teachers_that_are_refused(sst2: list[Any], tiny_bert: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_bert, bare)
    BertForSequenceClassification.from_pretrained(tiny_bert).bert.save_pretrained(bare)
    with pytest.raises(UserError, match="part of it starts from random values; train the twin first with --dense"):
        prune(*sst2[:-1], bare, "--teacher", "dense", "-o", tmp_path / "a")
    with pytest.raises(UserError, match="is not trained for sst2: part of it starts from random values"):
        prune(*sst2, "--teacher", bare, "-o", tmp_path / "b")
    other = tmp_path / "other"
    shutil.copytree(tiny_bert, other)
    vocabulary = (other / "tokenizer.json").read_text().replace('"film"', '"show"')
    (other / "tokenizer.json").write_text(vocabulary)
    with pytest.raises(UserError, match="is not the model's; they must have the same vocabulary"):
        prune(*sst2, "--teacher", other, "-o", tmp_path / "c")
    with pytest.raises(UserError, match=r"the model folder .* does not exist"):
        prune(*sst2, "--teacher", tmp_path / "nothing", "-o", tmp_path / "d")
    for option, sentence in {
        "--distil-weight=2": "distil_weight must be at most 1, got 2",
        "--temperature=0": "temperature must be above 0, got 0",
        "--hidden-weight=-1": "hidden_weight must be at least 0, got -1",
    }.items():
        with pytest.raises(UserError, match=sentence):
            prune(*sst2, option, "-o", tmp_path / "e")
    assert not list(tmp_path.glob("[a-e]/model"))


def test_metrics_are_finite(embed: list[Any], tmp_path: Path) -> None:
    prune(*embed, "--method", "magnitude", "-o", tmp_path / "run")
    for metrics in read_record(tmp_path / "run")["results"].values():
        assert np.isfinite(list(metrics.values())).all()
