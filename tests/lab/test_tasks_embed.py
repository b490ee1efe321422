"""Embedding models: their pooling against sentence-transformers, their metrics against scipy, their texts and pairs."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling as TheirPooling
from transformers import AutoModel, AutoTokenizer

from platon.lab import tasks
from platon.lab.errors import UserError
from platon.lab.tasks import Request, similarity
from platon.lab.tasks.embed import embed
from platon.lab.tasks.pooling import MODES, Pooling, SentenceFormat, read_format

TEXTS = [f"the {animal} sat on {place} {number}" for number in range(4) for animal in ("cat", "dog") for place in "ab"]


def with_texts(tmp_path: Path, texts: list[str] = TEXTS, name: str = "texts.txt") -> Path:
    file = tmp_path / name
    file.write_text("\n".join(texts) + "\n")
    return file


def prepare(model: Path, data: Path | None, **others: Any) -> tasks.Prepared:
    return tasks.find("embed").prepare(Request(data=data, model=str(model), **others))


@pytest.fixture
def sentence_model(tiny_bert: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a sentence-transformers folder of the tiny BERT with this pooling."""

    def make(*modes: str, normalised: bool = True) -> Path:
        folder = tmp_path / f"sentences-{'-'.join(modes)}-{normalised}"
        shutil.copytree(tiny_bert, folder)
        SentenceFormat(str(folder), Pooling(modes or ("mean",), normalised)).save(folder, 16, 32)
        return folder

    return make


# --- pooling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [*((mode,) for mode in MODES), ("mean", "max")])
def test_pooling_is_that_of_sentence_transformers(modes: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    states = torch.randn(3, 5, 4)
    for mask in (
        [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
        [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]],
    ):
        inside = torch.tensor(mask)
        theirs = TheirPooling(4, modes)({"token_embeddings": states, "attention_mask": inside})["sentence_embedding"]
        torch.testing.assert_close(Pooling(modes)(states, inside), theirs)


@pytest.mark.parametrize("modes", [("mean",), ("cls",), ("mean", "max")])
@pytest.mark.parametrize("normalised", [False, True])
def test_formats_are_read_as_sentence_transformers_writes_them(
    sentence_model: Callable[..., Path], tmp_path: Path, modes: tuple[str, ...], normalised: bool
) -> None:
    ours = sentence_model(*modes, normalised=normalised)
    theirs = tmp_path / "theirs"
    SentenceTransformer(str(ours), device="cpu").save(str(theirs))
    for folder in (ours, theirs):
        form = read_format(str(folder))
        assert form.pooling == Pooling(modes, normalised)
        # New versions keep the length in the tokenizer.
        assert (form.max_length or AutoTokenizer.from_pretrained(folder).model_max_length) == 32


def test_a_plain_encoder_has_the_mean(tiny_bert: Path) -> None:
    assert read_format(str(tiny_bert)) == SentenceFormat(str(tiny_bert))


def test_poolings_that_are_not_known(sentence_model: Callable[..., Path]) -> None:
    folder = sentence_model("mean")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "attention"}))
    with pytest.raises(UserError, match="pools by 'attention', which platon does not know; known: cls, max, mean"):
        read_format(str(folder))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_attention_tokens": True}))
    with pytest.raises(UserError, match="pools by 'pooling_mode_attention_tokens'"):
        read_format(str(folder))
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="is made of Transformer, Pooling, Dense; platon knows"):
        read_format(str(folder))
    (folder / "modules.json").write_text("{}")
    with pytest.raises(UserError, match=r"modules.json of .* must be a list"):
        read_format(str(folder))
    (folder / "modules.json").write_text("[")
    with pytest.raises(UserError, match=r"modules.json of .* is not JSON"):
        read_format(str(folder))


def test_embeddings_are_those_of_sentence_transformers(sentence_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = sentence_model("mean")
    prepared = prepare(folder, with_texts(tmp_path), holdout=0.5)
    ours = embed(prepared.build(), prepared.evaluation["validation"], prepared.collate)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = prepared.evaluation["validation"]
    texts = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert prepared.score("validation", ours, None) == pytest.approx(
        {"cosine": 1.0, "rank_correlation": 1.0, "neighbours": 1.0}
    )


def test_what_is_saved_loads_everywhere(sentence_model: Callable[..., Path], tmp_path: Path) -> None:
    prepared = prepare(sentence_model("cls"), with_texts(tmp_path))
    model, saved = prepared.build(), tmp_path / "saved"
    model.save_pretrained(saved)
    prepared.processor.save_pretrained(saved)
    assert read_format(str(saved)).pooling == Pooling(("cls",), True)
    encoder = SentenceTransformer(str(saved), device="cpu")
    assert encoder.encode(["the cat"]).shape == (1, 16)
    assert np.linalg.norm(encoder.encode("the cat")) == pytest.approx(1, abs=1e-5)
    assert AutoModel.from_pretrained(saved).config.hidden_size == 16


def test_random_state_is_left_alone(tiny_bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    prepare(tiny_bert, with_texts(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_scipy() -> None:
    random = np.random.default_rng(0)
    theirs = random.normal(size=(30, 5))
    ours = theirs + 0.5 * random.normal(size=theirs.shape)

    def cosines(x: Any) -> Any:
        return 1 - scipy.spatial.distance.pdist(x, "cosine")

    each = [1 - scipy.spatial.distance.cosine(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert similarity.mean_cosine(ours, theirs) == pytest.approx(np.mean(each))
    expected = scipy.stats.spearmanr(cosines(ours), cosines(theirs)).statistic
    assert similarity.rank_correlation(ours, theirs) == pytest.approx(expected)
    square = [scipy.spatial.distance.squareform(1 - cosines(x)) for x in (ours, theirs)]
    nearest = [[set(np.argsort(row)[1:11]) for row in table] for table in square]
    shared = [len(a & b) / 10 for a, b in zip(*nearest, strict=True)]
    assert similarity.neighbour_overlap(ours, theirs) == pytest.approx(np.mean(shared))
    scores = random.normal(size=15)
    pairs = [1 - scipy.spatial.distance.cosine(ours[i], ours[15 + i]) for i in range(15)]
    assert similarity.pair_spearman(ours, scores) == pytest.approx(scipy.stats.spearmanr(pairs, scores).statistic)


def test_metrics_of_a_model_that_learned_nothing() -> None:
    theirs = np.random.default_rng(0).normal(size=(30, 5))
    constant = np.tile(theirs[:1], (30, 1))
    broken = np.full((30, 5), np.nan)
    assert similarity.rank_correlation(constant, theirs) == 0
    for found in (constant, broken):
        for metric in (similarity.mean_cosine, similarity.rank_correlation, similarity.neighbour_overlap):
            assert np.isfinite(metric(found, theirs))
    best = theirs / np.linalg.norm(theirs, axis=1, keepdims=True)
    mean = np.tile(best.mean(0), (30, 1))
    assert similarity.constant_cosine(theirs) == pytest.approx(similarity.mean_cosine(mean, theirs))
    assert similarity.mean_cosine(constant, theirs) <= similarity.constant_cosine(theirs)


# --- texts and pairs --------------------------------------------------------------------------------------------------


def test_texts_of_every_kind(tiny_bert: Path, tmp_path: Path, write_parquet: Callable[..., Path]) -> None:
    rows = [{"sentence": text} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.csv").write_text("sentence\n" + "\n".join(TEXTS))
    files = [with_texts(tmp_path), tmp_path / "a.jsonl", tmp_path / "a.csv", write_parquet("a.parquet", sentence=TEXTS)]
    prints = {prepare(tiny_bert, file).fingerprint for file in files}
    assert len(prints) == 1
    (tmp_path / "split").mkdir()
    with_texts(tmp_path / "split", TEXTS[:8], "train.txt")
    with_texts(tmp_path / "split", TEXTS[6:], "validation.txt")
    prepared = prepare(tiny_bert, tmp_path / "split")
    assert len(prepared.train) == 6  # two are in the validation
    assert len(prepared.evaluation["validation"]) == len(TEXTS) - 6


def test_repeated_texts_count_once(tiny_bert: Path, tmp_path: Path) -> None:
    prepared = prepare(tiny_bert, with_texts(tmp_path, [*TEXTS, "", *TEXTS, f"  {TEXTS[0]} "]), holdout=0.25)
    assert len(prepared.train) + len(prepared.evaluation["validation"]) == len(TEXTS)


def test_pairs(sentence_model: Callable[..., Path], tmp_path: Path, write_parquet: Callable[..., Path]) -> None:
    columns = {"sentence1": TEXTS[:6], "sentence2": TEXTS[6:12], "label": [0.0, 1.0, 2.5, 3.0, 4.0, 5.0]}
    write_parquet("hub/glue/stsb/validation.parquet", **columns, idx=list(range(6)))
    file = write_parquet("pairs.parquet", **columns, idx=list(range(6)))
    folder, texts = sentence_model("mean"), with_texts(tmp_path)
    found = []
    for place in (file, tmp_path / "hub"):
        prepared = prepare(folder, texts, pairs=str(place))
        assert prepared.counts["pairs"] == 6
        assert len(prepared.evaluation["pairs"]) == 12
        vectors = embed(prepared.build(), prepared.evaluation["pairs"], prepared.collate)
        found.append(prepared.score("pairs", vectors, None))
    theirs = SentenceTransformer(str(folder), device="cpu")
    cosines = [theirs.similarity(*theirs.encode([a, b])).item() for a, b in zip(TEXTS[:6], TEXTS[6:12], strict=True)]
    expected = scipy.stats.spearmanr(cosines, columns["label"]).statistic
    assert found == [{"spearman": pytest.approx(expected), "dense_spearman": pytest.approx(expected)}] * 2


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ([], "is empty; at least one row is needed"),
        (["the cat"], "has one text only; an embedding model learns from texts that differ"),
        (["the cat"] * 9, "has the same text in all of its 9 rows; an embedding model learns from"),
        (["a", "b", "c"], "has 3 different texts; at least 4 are needed, 3 of them held out"),
    ],
)
def test_texts_that_teach_nothing(tiny_bert: Path, tmp_path: Path, texts: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        prepare(tiny_bert, with_texts(tmp_path, texts))


def test_other_input_that_cannot_be_right(
    tiny_bert: Path, tmp_path: Path, write_parquet: Callable[..., Path], sentence_model: Callable[..., Path]
) -> None:
    texts = with_texts(tmp_path)
    with pytest.raises(UserError, match=r"the task embed needs texts; give a .txt file"):
        prepare(tiny_bert, None)
    with pytest.raises(UserError, match="embed needs a model; give an encoder or a sentence-transformers folder"):
        tasks.find("embed").prepare(Request(data=texts))
    with pytest.raises(UserError, match=r"txt does not exist"):
        prepare(tiny_bert, tmp_path / "nothing.txt")
    (tmp_path / "latin.txt").write_bytes("für\n".encode("latin-1"))
    with pytest.raises(UserError, match="is not UTF-8 text"):
        prepare(tiny_bert, tmp_path / "latin.txt")
    two = write_parquet("two.parquet", a=TEXTS, b=TEXTS)
    with pytest.raises(UserError, match=r"which column of .* is the text\? give --text-column; it has: a, b"):
        prepare(tiny_bert, two)
    assert len(prepare(tiny_bert, two, text_column="b").train) > 0
    with pytest.raises(UserError, match="must have two columns of text and one of numbers, the score; it has: a, b"):
        prepare(tiny_bert, texts, pairs=str(two))
    same = write_parquet("same.parquet", a=TEXTS, b=TEXTS, score=[1.0] * len(TEXTS))
    with pytest.raises(UserError, match="needs pairs with different scores"):
        prepare(tiny_bert, texts, pairs=str(same))
