"""Each task end to end, from a file to predictions: metrics equal to other libraries', predictions equal to eval's."""

import csv
import io
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

import platon
from platon.cli import app
from platon.lab.errors import UserError
from platon.lab.finished import reopen
from platon.lab.prediction import FORMS, find_form, predict
from platon.lab.printer import Printer
from platon.lab.run import prune
from platon.lab.settings import resolve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from seqeval.metrics import f1_score

TRAINING = {"steps": 12, "batch": 8, "keep": 0.5, "learning_rate": 5e-3, "warmup": 2.0, "cooldown": 4.0, "every": 1}


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(folder: Path, task: str, data: Path, model: Path, **more: Any) -> dict[str, Any]:
    flags = TRAINING | {"task": task, "data": str(data), "model": str(model), **more}
    return prune(resolve(flags=flags), folder)


def say(command: list[str], typed: str | None = None) -> str:
    done = CliRunner().invoke(app, command, input=typed, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


REVIEWS = [{"text": f"film {n} is {'good' if n % 3 else 'bad'}", "label": "yes" if n % 3 else "no"} for n in range(48)]


@pytest.fixture(scope="module")
def reviewed(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A finished run on classes, with a test file."""
    place = tmp_path_factory.mktemp("reviews")
    data = write_lines(place / "reviews.jsonl", REVIEWS)
    test = write_lines(place / "test.jsonl", REVIEWS[:10])
    run(place / "run", "text", data, tiny_bert, test=str(test), holdout=0.25)
    return place


def test_classes_from_file_to_predictions(reviewed: Path) -> None:
    record = json.loads((reviewed / "run" / "record.json").read_text())
    assert list(record["results"]) == ["validation", "test"]
    found = predict(reviewed / "run", reviewed / "test.jsonl")
    said = [row["prediction"] for row in found.nested()]
    true = [row["label"] for row in REVIEWS[:10]]
    assert record["results"]["test"]["accuracy"] == pytest.approx(sk.accuracy_score(true, said))
    for row, source in zip(found.nested(), REVIEWS, strict=False):
        assert row["text"] == source["text"]
        assert row["label"] == source["label"]
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["probability"] == max(row["probabilities"].values()) == row["probabilities"][row["prediction"]]


def test_predictions_are_those_of_eval(reviewed: Path) -> None:
    """The logits that `platon eval` scores and those that `platon predict` reads are the same bits."""
    scored: list[Any] = []
    finished = reopen(reviewed / "run", reviewed / "test.jsonl")
    finished.prepared.score = lambda split, predictions, labels: scored.append(predictions) or {"accuracy": 0.0}  # type: ignore[func-returns-value]
    finished.measure(finished.prepared.build())
    assert finished.prepared.answers is not None
    wanted = [answer.nested() for answer in finished.prepared.answers(scored[0])]
    found = predict(reviewed / "run", reviewed / "test.jsonl", form="model")
    assert [answer.nested() for answer in found.answers] == wanted


def test_the_command_writes_csv_json_lines_and_reads_standard_input(reviewed: Path, tmp_path: Path) -> None:
    folder = str(reviewed / "run")
    file = tmp_path / "new.csv"
    file.write_text('id,text\n7,film is good\n8,"bad, very"\n')
    rows = list(csv.DictReader(io.StringIO(say(["predict", folder, "--data", str(file)]))))
    assert list(rows[0]) == ["id", "text", "prediction", "probability", "p_no", "p_yes"]
    assert [row["id"] for row in rows] == ["7", "8"]
    typed = list(csv.DictReader(io.StringIO(say(["predict", folder], "film is good\n\nbad, very\n"))))
    assert [row["prediction"] for row in typed] == [row["prediction"] for row in rows]
    out = tmp_path / "out.jsonl"
    say(["predict", folder, "--data", str(file), "-o", str(out)])
    assert [json.loads(line)["prediction"] for line in out.read_text().splitlines()] == [
        row["prediction"] for row in rows
    ]
    renamed = tmp_path / "renamed.jsonl"
    write_lines(renamed, [{"body": "film is good", "from": "x"}])
    again = say(["predict", folder, "--data", str(renamed), "--text-column", "body"])
    assert json.loads(again)["prediction"] == rows[0]["prediction"]


def test_mistakes_are_one_sentence(reviewed: Path, tmp_path: Path) -> None:
    file = tmp_path / "new.csv"
    file.write_text("a,b\nx,y\n")
    with pytest.raises(UserError, match=r"which column of .*new\.csv is the text\? .*; it has: a, b"):
        predict(reviewed / "run", file)
    with pytest.raises(UserError, match=r"has no fast/; it has: model"):
        find_form(reviewed / "run", "fast")
    with pytest.raises(UserError, match=r"must end in \.csv or \.jsonl"):
        say(["predict", str(reviewed / "run"), "--data", str(file), "-o", str(tmp_path / "x.txt")])
    with pytest.raises(UserError, match="does not exist"):
        say(["predict", str(reviewed / "run"), "--data", str(tmp_path / "nothing.csv")])


def test_the_fastest_form_is_taken(tmp_path: Path) -> None:
    for name in reversed(FORMS):
        (tmp_path / name).mkdir()
        assert find_form(tmp_path) == tmp_path / name


@pytest.mark.parametrize("teacher", ["none", "dense"])
def test_several_labels_end_to_end(teacher: str, tmp_path: Path, tiny_bert: Path) -> None:
    rows = [{"text": f"film {n} is a", "moods": [m for m in ("glad", "mad") if (n + len(m)) % 3]} for n in range(32)]
    data = write_lines(tmp_path / "own.jsonl", rows)
    more = {} if teacher == "none" else {"teacher": "dense", "dense": "first", "hidden_weight": 0.1}
    record = run(tmp_path / "run", "text", data, tiny_bert, label_column="moods", **more)
    found = predict(tmp_path / "run", data)
    _, _, measure = finished = reopen(tmp_path / "run", data)
    (results,) = measure(finished.prepared.build()).values()
    said, true = (
        [[m in row for m in ("glad", "mad")] for row in rows]
        for rows in ([r["prediction"] for r in found.nested()], [r["moods"] for r in rows])
    )
    for average in ("micro", "macro"):
        assert results[f"{average}_f1"] == pytest.approx(sk.f1_score(true, said, average=average, zero_division=0))
    assert record["metrics"] == ["micro_f1", "macro_f1"]


@pytest.mark.parametrize("teacher", ["none", "dense"])
def test_tags_end_to_end(teacher: str, tmp_path: Path, tiny_bert: Path) -> None:
    names = ("anna", "zoe", "bob")
    rows = [
        {
            "words": ["the", "cat", names[n % 3], "sat"],
            "tags": ["O", "O", "B-PER", "O"] if n % 4 else ["O", "B-CAT", "O", "O"],
        }
        for n in range(40)
    ]
    data = write_lines(tmp_path / "own.jsonl", rows)
    more = {} if teacher == "none" else {"teacher": "dense", "dense": "first"}
    run(tmp_path / "run", "tokens", data, tiny_bert, **more)
    found = [row["prediction"] for row in predict(tmp_path / "run", data).nested()]
    finished = reopen(tmp_path / "run", data)
    (results,) = finished.measure(finished.prepared.build()).values()
    assert results["f1"] == pytest.approx(f1_score([row["tags"] for row in rows], found, zero_division=0))
    assert all(len(tags) == 4 for tags in found)


@pytest.mark.parametrize("teacher", ["none", "dense"])
def test_numbers_end_to_end(teacher: str, tmp_path: Path, tiny_bert: Path) -> None:
    rows = [{"text": f"film {n} is a", "label": n % 7 / 2} for n in range(32)]
    data = write_lines(tmp_path / "own.jsonl", rows)
    more = {} if teacher == "none" else {"teacher": "dense", "dense": "first"}
    record = run(tmp_path / "run", "text", data, tiny_bert, **more)
    found = np.array([row["prediction"] for row in predict(tmp_path / "run", data).nested()])
    finished = reopen(tmp_path / "run", data)
    (results,) = finished.measure(finished.prepared.build()).values()
    assert results["pearson"] == pytest.approx(np.corrcoef(found, [row["label"] for row in rows])[0, 1], abs=1e-5)
    assert record["metrics"] == ["pearson", "spearman"]


def test_images_end_to_end(tmp_path: Path, tiny_vit: Path, make_png: Callable[..., bytes]) -> None:
    for split in ("train", "validation", "exam"):
        for number, name in enumerate(("cat", "dog")):
            place = tmp_path / "photos" / split / name
            place.mkdir(parents=True)
            for one in range(6):
                (place / f"{one}.png").write_bytes(make_png(100 * number + one))
    exam = tmp_path / "photos" / "exam"
    record = run(tmp_path / "run", "images", tmp_path / "photos", tiny_vit, test=str(exam))
    rows = list(predict(tmp_path / "run", exam).nested())
    assert [Path(row["file"]).name for row in rows] == [f"{n}.png" for n in range(6)] * 2
    right = [Path(row["file"]).parent.name == row["prediction"] for row in rows]
    assert record["results"]["test"]["accuracy"] == pytest.approx(sum(right) / 12)
    (single,) = predict(tmp_path / "run", exam / "dog" / "3.png").nested()
    assert single["probabilities"] == pytest.approx(rows[9]["probabilities"], abs=1e-5)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="has no images"):
        predict(tmp_path / "run", tmp_path / "none")


def test_tasks_that_cannot_predict_say_so(tmp_path: Path) -> None:
    prune(
        resolve(flags={"task": "digits", "dense": "none", "steps": 2, "train_rows": 32, "eval_rows": 16}),
        tmp_path / "run",
    )
    with pytest.raises(UserError, match="predict cannot read new rows for the task digits"):
        predict(tmp_path / "run", tmp_path)


# --- what a run says, and zeros that are held -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pruned_model(reviewed: Path) -> Path:
    return reviewed / "run" / "model"


def zeros(model: Path) -> dict[str, Any]:
    matrices = platon.weights(AutoModelForSequenceClassification.from_pretrained(model)).matrices
    return {name: (matrix == 0) for name, matrix in matrices.items()}


def said_by(folder: Path, **flags: Any) -> Iterator[str]:
    told: list[str] = []
    prune(resolve(flags=TRAINING | flags), folder, printer=Printer(told.append))
    return iter(told)


def test_a_run_says_what_it_read_and_holds_zeros(reviewed: Path, pruned_model: Path, tmp_path: Path) -> None:
    data, before = reviewed / "reviews.jsonl", zeros(pruned_model)
    asked = {"task": "text", "data": str(data), "model": str(pruned_model)}
    told = "\n".join(said_by(tmp_path / "held", **asked, method="hold"))
    assert "train       43 rows: yes 67.4 %, no 32.6 %" in told
    assert "validation  5 rows: yes 60.0 %, no 40.0 %" in told
    assert "pruned before, 50.0 % of these are not zero" in told
    assert "pruning     none; zeros stay zero" in told
    assert "5 rows to validate on: one of them is 20 points" in told
    assert "step 12 of 12: validation accuracy" in told
    after = zeros(tmp_path / "held" / "model")
    assert all(torch.equal(before[name] & after[name], before[name]) for name in before)
    record = json.loads((tmp_path / "held" / "record.json").read_text())
    assert record["method"] == "hold"
    assert record["kept"] == pytest.approx(0.5, abs=0.01)
    told = "\n".join(said_by(tmp_path / "again", **asked, every=10))
    assert "the 50.0 % that are zero will grow again in this training; --hold keeps them at zero" in told
    assert "the share falls from 100 % to 50 % in 1 jump (to 50 %): masks come every 10 steps; give --every 1" in told
    assert "the share falls from 100 % to 50 % within 6 steps, too few to recover" in told
    assert "PLATON: 100 % kept to step 2, falling to 50 % by step 8 (a mask every 10), held to step 12" in told
