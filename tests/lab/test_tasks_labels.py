"""What the labels of a user's own texts are: classes, several in a row, or numbers; and rows that are held out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn import metrics as sk

from platon.lab.errors import UserError
from platon.lab.tasks import Prepared, Request, find
from platon.lab.tasks.holdout import stratified
from platon.lab.tasks.target import Classes, Numbers, Several

matrices = st.tuples(st.integers(2, 20), st.integers(1, 5)).flatmap(
    lambda shape: hnp.arrays(np.int64, (2, *shape), elements=st.integers(0, 1))
)


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = [",".join(rows[0]), *(",".join(f'"{cell}"' for cell in row.values()) for row in rows)]
        file.write_text("\n".join(lines) + "\n")
    return file


def own(data: Path, model: Path, **asked: Any) -> Prepared:
    return find("text").prepare(Request(data=data, model=str(model), **asked))


def labels_of(prepared: Prepared) -> str:
    return dict(prepared.about)["labels"]


# --- what labels are --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "asked", "problem", "names", "reason"),
    [
        ([5.0, 1.0, 5.0, 1.0], None, "single_label_classification", ("1", "5"), "whole numbers; --labels numbers"),
        ([5, 1, 3, 1], None, "single_label_classification", ("1", "3", "5"), "whole numbers"),
        ([0.5, 1.0, 2.0, 1.0], None, "regression", ("score",), "fractions; --labels classes"),
        ([5.0, 1.0, 5.0, 1.0], "numbers", "regression", ("score",), "as --labels says"),
        ([0.5, 1.0, 0.5, 1.0], "classes", "single_label_classification", ("0.5", "1"), "as --labels says"),
        (["good", "bad", "good", "bad"], None, "single_label_classification", ("bad", "good"), "one word"),
    ],
)
def test_the_column_decides_and_the_run_says_so(
    labels: list[Any],
    asked: str | None,
    problem: str,
    names: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    tiny_bert: Path,
) -> None:
    rows = [{"text": f"film {n}", "label": label} for n, label in enumerate(labels * 3)]
    prepared = own(write(tmp_path / "own.csv", rows), tiny_bert, labels=asked)
    config = prepared.build().config
    assert (config.problem_type, tuple(config.id2label.values())) == (problem, names)
    assert reason in labels_of(prepared)


def test_many_whole_numbers_are_asked_about(tmp_path: Path, tiny_bert: Path) -> None:
    file = write(tmp_path / "own.csv", [{"text": f"film {n}", "price": n} for n in range(60)])
    with pytest.raises(UserError, match=r"60 different whole numbers in 60 rows; say what they are: --labels numbers"):
        own(file, tiny_bert)
    assert own(file, tiny_bert, labels="numbers").metrics == ("pearson", "spearman")
    assert own(file, tiny_bert, labels="classes").build().config.num_labels == 60


LISTS = [["sad"], ["glad", "mad"], [], ["mad"], ["glad"], ["sad", "mad"]] * 2


def test_several_labels_in_every_form_are_the_same(tmp_path: Path, tiny_bert: Path) -> None:
    texts = [f"film {n}" for n in range(len(LISTS))]
    rows = [{"text": text, "moods": moods} for text, moods in zip(texts, LISTS, strict=True)]
    columns = [
        {"text": text} | {mood: int(mood in moods) for mood in ("glad", "mad", "sad")}
        for text, moods in zip(texts, LISTS, strict=True)
    ]
    words = [{"text": text, "moods": "; ".join(moods)} for text, moods in zip(texts, LISTS, strict=True)]
    found = [
        own(write(tmp_path / "own.jsonl", rows), tiny_bert, label_column="moods"),
        own(write(tmp_path / "own.parquet", rows), tiny_bert, label_column="moods"),
        own(write(tmp_path / "columns.csv", columns), tiny_bert, label_column="glad, mad,sad"),
        own(write(tmp_path / "words.csv", words), tiny_bert, label_column="moods", labels="several"),
    ]
    assert len({one.fingerprint for one in found}) == 1
    for prepared in found:
        model = prepared.build().eval()
        assert model.config.problem_type == "multi_label_classification"
        assert tuple(model.config.id2label.values()) == ("glad", "mad", "sad")
        rows_of = prepared.evaluation["validation"]
        batch = prepared.collate([rows_of[n] for n in range(len(rows_of))])
        with torch.no_grad():
            output = model(**batch)
        assert torch.isfinite(output.loss)
        assert set(prepared.score("validation", output.logits.numpy(), batch["labels"].numpy())) == {
            "micro_f1",
            "macro_f1",
        }
    assert dict(found[0].about)["train"].startswith("11 rows: ")


@pytest.mark.parametrize(
    ("rows", "asked", "sentence"),
    [
        ([{"text": "a", "x": 0, "y": 2}], {"label_column": "x,y"}, r"row 0 of .* needs 0 or 1 in column 'y', got 2"),
        ([{"text": "a", "x": 0, "y": 1}], {"label_column": "x,z"}, r"has no column 'z'; it has: text, x, y"),
        ([{"text": "a", "x": 0, "y": 1}], {"label_column": "x,y", "labels": "classes"}, r"names 2 columns"),
        ([{"text": "a", "label": []}] * 2, {}, r"has no label in any row|must hold"),
        ([{"text": "a", "label": [0.5]}], {}, r"row 0 of .* needs a list of labels in column 'label'"),
        ([{"text": "a", "label": "x"}] * 2, {"labels": "numbers"}, r"must hold numbers, but holds"),
    ],
)
def test_wrong_labels(rows: list[Any], asked: dict[str, str], sentence: str, tmp_path: Path, tiny_bert: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        own(write(tmp_path / "own.jsonl", rows), tiny_bert, **asked)


def test_a_model_without_names_is_evaluated_by_numbers(tmp_path: Path, tiny_bert: Path) -> None:
    """As other people's models on the hub: LABEL_0 and LABEL_1."""
    rows = write(tmp_path / "own.jsonl", [{"text": "film", "label": label} for label in (1, 0, 1)])
    prepared = find("text").prepare(Request().for_evaluation(tiny_bert, rows))
    assert prepared.evaluation["validation"]["labels"][:] == [1, 0, 1]


def test_a_test_file_is_apart_from_what_is_evaluated(tmp_path: Path, tiny_bert: Path) -> None:
    rows = [{"text": f"film {n}", "label": n % 2} for n in range(20)]
    test = write(tmp_path / "test.csv", rows[:7])
    prepared = own(write(tmp_path / "own.csv", rows), tiny_bert, test=str(test), eval_rows=1)
    assert list(prepared.evaluation) == ["validation"]
    assert prepared.counts == {"validation": 1, "test": 7}
    assert set(prepared.chance) == {"validation", "test"}
    write(tmp_path / "test.csv", [{"text": "film", "label": 3}])
    with pytest.raises(UserError, match=r"row 0 of .*test\.csv has the label 3, which training does not have"):
        own(tmp_path / "own.csv", tiny_bert, test=str(test))


# --- metrics ----------------------------------------------------------------------------------------------------------


@given(matrices)
def test_f1_of_several_labels_equals_sklearn(pair: np.ndarray) -> None:
    said, true = pair
    target = Several(tuple(map(str, range(said.shape[1]))))
    found = target.score("validation", said - 0.5, true.astype(np.float32))
    for average in ("micro", "macro"):
        # With one column sklearn reads a vector of classes.
        wanted = sk.f1_score(true, said, average=average, zero_division=0) if said.shape[1] > 1 else None
        assert found[f"{average}_f1"] == pytest.approx(
            sk.f1_score(true[:, 0], said[:, 0], zero_division=0) if wanted is None else wanted
        )


@given(hnp.arrays(np.int64, st.tuples(st.integers(2, 8), st.integers(1, 4)), elements=st.integers(0, 1)))
def test_chance_of_several_labels_is_the_best_constant_set(true: np.ndarray) -> None:
    labels = true.shape[1]
    target = Several(tuple(map(str, range(labels))))
    best = {"micro_f1": 0.0, "macro_f1": 0.0}
    for chosen in range(2**labels):
        said = np.array([[float(chosen >> n & 1) for n in range(labels)]] * len(true))
        found = target.score("validation", said - 0.5, true)
        best = {name: max(best[name], found[name]) for name in best}
    assert target.chance(true) == pytest.approx(best)


def test_answers_of_each_target() -> None:
    (one,) = Classes(("bad", "good")).answers(np.array([[0.0, np.log(3.0)]]))
    assert one.nested() == {"prediction": "good", "probability": 0.75, "probabilities": {"bad": 0.25, "good": 0.75}}
    assert one.flat() == {"prediction": "good", "probability": 0.75, "p_bad": 0.25, "p_good": 0.75}
    (some,) = Several(("a", "b", "c")).answers(np.array([[1.0, -1.0, 900.0]]))
    assert some.nested()["prediction"] == ["a", "c"]
    assert some.flat()["prediction"] == "a|c"
    assert some.flat()["p_c"] == 1.0
    (number,) = Numbers().answers(np.array([[2.5]]))
    assert number.nested() == number.flat() == {"prediction": 2.5}


# --- holding out ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.floats(0.05, 0.95))
def test_held_out_rows_are_in_proportion(classes: list[int], share: float) -> None:
    count = max(1, min(len(classes) - 1, round(share * len(classes))))
    out = stratified(classes, count)
    assert len(set(out.tolist())) == len(out) == count
    assert (np.diff(out) > 0).all()
    assert (out == stratified(classes, count)).all()
    for name in set(classes):
        size, taken = classes.count(name), sum(classes[row] == name for row in out)
        assert abs(taken - count * size / len(classes)) <= 1 + 1e-9 or count > len(classes) - len(set(classes))


def test_rare_classes_stay_in_training(tmp_path: Path, tiny_bert: Path) -> None:
    rows = [{"text": f"film {n}", "label": "rare" if n == 7 else "usual" if n % 10 else "some"} for n in range(100)]
    file = write(tmp_path / "own.csv", rows)
    for seed_free in range(2):
        prepared = own(file, tiny_bert, holdout=0.1 + 0.1 * seed_free)
        held = prepared.evaluation["validation"]["labels"][:]
        assert held.count(1) == 1 + seed_free, "the same share of the class 'some'"
        assert held.count(0) == 0, "the only row of the class 'rare' is trained on"
    old = own(file, tiny_bert, stratify=False)
    assert len(old.evaluation["validation"]) == 10
