"""Tags of words: files, the alignment of words and tokens, and the metrics against seqeval and scikit-learn."""

import json
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from platon.lab.errors import UserError
from platon.lab.tasks import Prepared, Request, find
from platon.lab.tasks.tags import ENTITIES, TYPES, WORDS, entities, scheme_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from seqeval.metrics import f1_score, precision_score, recall_score
    from seqeval.metrics.sequence_labeling import get_entities

TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "GPE-LOC"))]
sentences = st.lists(
    st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1, max_size=8), min_size=1, max_size=5
)

ROWS = [
    (["The", "cat", "sat", "on", "Anna", "Meyer"], ["O", "O", "O", "O", "B-PER", "I-PER"]),
    (["Oslo", "is", "good", "#"], ["B-LOC", "O", "O", "O"]),
    (["who", "is", "Zoe", "?"], ["O", "O", "B-PER", "O"]),
] * 4


def write_jsonl(file: Path, rows: Any = ROWS, words: str = "words", tags: str = "tags") -> Path:
    file.write_text("".join(json.dumps({words: some, tags: their}) + "\n" for some, their in rows))
    return file


def own(data: Path, model: Path, **asked: Any) -> Prepared:
    return find("tokens").prepare(Request(data=data, model=str(model), **asked))


def logits_for(prepared: Prepared, split: str, rows: Any) -> np.ndarray:
    """Logits that say the labels of the split at their tokens and anything elsewhere, padded as Trainer pads."""
    names = prepared.build().config.num_labels
    found = np.full((len(rows), max(prepared.lengths[split]), names), -100.0)
    random = np.random.default_rng(0)
    for row, one in enumerate(rows):
        found[row, : len(one["labels"])] = random.normal(size=(len(one["labels"]), names))
        for place, label in enumerate(one["labels"]):
            if label >= 0:
                found[row, place, label] = 50
    return found


# --- metrics ----------------------------------------------------------------------------------------------------------


@given(sentences)
def test_entities_and_their_f1_equal_seqeval(rows: list[list[tuple[str, str]]]) -> None:
    said = [[one for one, _ in row] for row in rows]
    true = [[one for _, one in row] for row in rows]
    for tags in said:
        assert entities(tags) == get_entities(tags)
    found = ENTITIES.score(said, true)
    for name, theirs in {"f1": f1_score, "precision": precision_score, "recall": recall_score}.items():
        assert found[name] == pytest.approx(theirs(true, said, zero_division=0)), name


@given(st.lists(st.tuples(st.sampled_from("NVA"), st.sampled_from("NVA")), min_size=1, max_size=30))
def test_tags_of_words_equal_sklearn(pairs: list[tuple[str, str]]) -> None:
    said, true = map(list, zip(*pairs, strict=True))
    found = WORDS.score([said], [true])
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(true, said))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(true, said, average="macro", zero_division=0))


def test_schemes() -> None:
    assert scheme_of(["O", "B-PER", "I-PER"]) is ENTITIES
    assert scheme_of(["U-PER", "L-PER", "I-PER", "B-PER", "O"]) is ENTITIES
    assert scheme_of(["O", "PER"]) is TYPES
    assert scheme_of(["NOUN", "VERB"]) is WORDS
    assert entities(["B-A", "L-A", "U-A", "U-A"]) == [("A", 0, 1), ("A", 2, 2), ("A", 3, 3)]
    found = TYPES.score([["PER", "PER", "O", "LOC"]], [["PER", "PER", "O", "O"]])
    assert (found["precision"], found["recall"]) == (0.5, 1.0)
    assert ENTITIES.chance(["O", "B-PER"], [["O", "B-PER"]])["f1"] == pytest.approx(2 / 3)


# --- files ------------------------------------------------------------------------------------------------------------

CONLL = """-DOCSTART- -X- O O

# id = 1
The DT O
cat NN O
sat VB O
on IN O
Anna NNP B-PER
Meyer NNP I-PER

Oslo NNP B-LOC
is VB O
good JJ O
# SYM O

who WP O
is VB O
Zoe NNP B-PER
? . O
"""


def test_every_file_gives_the_same(tmp_path: Path, tiny_bert: Path) -> None:
    (tmp_path / "own.conll").write_text("\n".join([CONLL] * 4))
    (tmp_path / "own.txt").write_text(
        "\r\n".join("\t".join(line.split()) for line in ("\n\n".join([CONLL] * 4)).split("\n"))
    )
    names = sorted({tag for _, tags in ROWS for tag in tags})
    hub = datasets.Dataset.from_dict(
        {"tokens": [words for words, _ in ROWS], "ner_tags": [[names.index(tag) for tag in tags] for _, tags in ROWS]},
        features=datasets.Features(
            {
                "tokens": datasets.List(datasets.Value("string")),
                "ner_tags": datasets.List(datasets.ClassLabel(names=names)),
            }
        ),
    )
    hub.to_parquet(tmp_path / "own.parquet")
    found = [
        own(file, tiny_bert)
        for file in (
            write_jsonl(tmp_path / "own.jsonl"),
            tmp_path / "own.conll",
            tmp_path / "own.txt",
            tmp_path / "own.parquet",
        )
    ]
    assert len({one.fingerprint for one in found}) == 1
    assert tuple(found[0].build().config.id2label.values()) == ("B-LOC", "B-PER", "I-PER", "O")
    about = dict(found[0].about)
    assert about["train"].startswith("11 rows, ")
    assert "tagged, PER " in about["train"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("own.conll", "The O\ncat\n", r"own\.conll, line 2, must be a word and its tag"),
        ("own.jsonl", '{"words": ["a", "b"], "tags": ["O"]}', r"row 0 of .* has 2 words and 1 tags"),
        ("own.jsonl", '{"words": [], "tags": []}', r"row 0 of .* has no words|must hold"),
        ("own.jsonl", '{"words": "a b", "tags": ["O", "O"]}', r"column 'words' of .* must hold a list in each row"),
        ("own.jsonl", '{"words": ["a"], "x": ["O"]}', r"which column of .* has the tags\? give --label-column; it has"),
        ("own.jsonl", '{"words": ["a"], "tags": ["O"]}', r"has the tag 'O' only; two are needed"),
        (
            "own.csv",
            "words,tags\na,O\n",
            r"own\.csv is of no known kind; give one of \.json, \.jsonl, \.parquet, \.conll",
        ),
    ],
)
def test_wrong_files(name: str, content: str, sentence: str, tmp_path: Path, tiny_bert: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=sentence):
        own(tmp_path / name, tiny_bert)


# --- words and tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [None, 8])
def test_every_word_is_read_at_its_first_token(length: int | None, tmp_path: Path, tiny_bert: Path) -> None:
    """Short inputs cut rows into pieces, and no word is lost."""
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl")
    write_jsonl(tmp_path / "data" / "validation.jsonl", ROWS[:3])
    prepared = own(tmp_path / "data", tiny_bert, max_length=length)
    rows = prepared.evaluation["validation"]
    assert prepared.counts == {"validation": 3}
    assert len(rows) == 3 if length is None else len(rows) > 3
    assert max(map(len, rows["input_ids"])) <= (length or 64)
    assert sum(label >= 0 for labels in rows["labels"] for label in labels) == sum(len(words) for words, _ in ROWS[:3])
    for row in rows:
        tokens = prepared.processor.convert_ids_to_tokens(row["input_ids"])
        for token, label in zip(tokens, row["labels"], strict=True):
            assert (label >= 0) == (token not in ("[CLS]", "[SEP]") and not token.startswith("##"))
    perfect = prepared.score("validation", logits_for(prepared, "validation", rows), None)
    assert perfect == {"f1": 1.0, "precision": 1.0, "recall": 1.0, "accuracy": 1.0}
    assert "pieces" in dict(prepared.about)["texts"] or length is None


def test_a_forward_pass_and_evaluation_by_a_trained_model(tmp_path: Path, tiny_bert: Path) -> None:
    file = write_jsonl(tmp_path / "own.jsonl", words="tokens", tags="ner")
    prepared = own(file, tiny_bert)
    model = prepared.build().eval()
    batch = prepared.collate([prepared.train[n] for n in range(4)])
    with torch.no_grad():
        assert torch.isfinite(model(**batch).loss)
    model.save_pretrained(tmp_path / "model")
    prepared.processor.save_pretrained(tmp_path / "model")
    again = find("tokens").prepare(Request().for_evaluation(tmp_path / "model", file))
    assert again.counts == {"validation": 12}
    write_jsonl(tmp_path / "new.jsonl", [(["a"], ["B-ORG"])])
    with pytest.raises(UserError, match=r"row 0 of .* has the tag 'B-ORG', which the model does not know: 'B-LOC'"):
        find("tokens").prepare(Request().for_evaluation(tmp_path / "model", tmp_path / "new.jsonl"))
    (tmp_path / "new.txt").write_text("Anna is good\n\nwho\n")
    new = find("tokens").prepare(Request().for_prediction(tmp_path / "model", tmp_path / "new.txt"))
    assert new.answers is not None
    rows = new.evaluation["new"]
    logits = np.zeros((len(rows), max(new.lengths["new"]), 4))
    logits[:, 1, 1] = 9  # the first word of each row
    found = [answer.nested()["prediction"] for answer in new.answers(logits)]
    assert found == [["B-PER", "B-LOC", "B-LOC"], ["B-PER"]]
