"""Commands and functions on models that are no run's: any folder of save_pretrained, and what a run holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, BertForSequenceClassification, BertModel
from transformers.utils import logging

import platon
from platon import cli
from platon.deploy import memory, onnx
from platon.lab.errors import UserError
from platon.lab.source import find_source
from platon.report.speed import tables

logging.disable_progress_bar()


def command(*words: Any) -> None:
    assert not cli.app([str(word) for word in words], standalone_mode=False)


@pytest.fixture
def model(tiny_bert: Path, tmp_path: Path) -> Path:
    """A classifier that somebody else fine-tuned, and pruned weight by weight: a folder of save_pretrained."""
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "my-model"))
    made = BertForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        for matrix in platon.weights(made).matrices.values():
            matrix.view(-1)[::2] = 0
        made.classifier.weight.mul_(40)
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rows = [(f"film {n} is {'good' if n % 3 else 'bad'}", f"LABEL_{n % 2}") for n in range(11)]
    (tmp_path / "texts.csv").write_text("".join(f"{a},{b}\n" for a, b in [("review", "label"), *rows]))
    return tmp_path / "texts.csv"


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    """What a run looks like to those who open it."""
    folder = tmp_path / "run"
    shutil.copytree(model, folder / "model")
    record = {"format": 1, "task": "text", "method": "platon", "metrics": ["accuracy"], "settings": {}}
    record |= {"results": {"validation": {"accuracy": 0.5}}, "kept": 0.5, "layers": {}, "seconds": 1.0}
    record |= {"parameters": {"all": 1, "prunable": 1, "left": 1}}
    (folder / "record.json").write_text(json.dumps(record))
    return folder


# --- what can be named ------------------------------------------------------------------------------------------------


def test_what_can_be_named(run: Path, model: Path) -> None:
    whole, inside, plain = (find_source(str(path)) for path in (run, run / "model", model))
    assert (whole.folder, inside.folder, plain.folder) == (run / "model", run / "model", model)
    assert [one.run is not None for one in (whole, inside, plain)] == [True, True, False]
    assert [one.whole_run is not None for one in (whole, inside, plain)] == [True, False, False]
    assert [one.beside("onnx") for one in (whole, inside)] == [run / "onnx"] * 2
    assert plain.beside("onnx") == model.with_name("my-model-onnx")
    shutil.copytree(model, run / "compact")
    assert whole.form("fast", "compact") == run / "compact"
    assert inside.form("fast", "compact") == run / "model"


@pytest.mark.usefixtures("offline")
def test_what_cannot(tmp_path: Path, model: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text("{}")
    (model / "config.json").rename(model / "other.json")
    for name, said in {
        "begun": "holds a run that is not finished; go on with: platon prune --output .*begun --resume",
        "my-model": r"is neither a finished run nor a model: there is no record\.json and no config\.json in it",
        "my-modle": "the model folder .*my-modle' does not exist; nearest: 'my-model'",
    }.items():
        with pytest.raises(UserError, match=said):
            find_source(str(tmp_path / name))
    with pytest.raises(UserError, match="'someone/model' is no local folder, and the hub cannot be reached; give"):
        find_source("someone/model")


def test_the_hubs_models_are_fetched_once_and_without_pickles(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **rest: asked.append((name, rest)) or model)
    found = find_source("someone/model")
    assert found.folder == model
    assert found.beside("onnx") == Path("model-onnx")
    [(name, rest)] = asked
    assert name == "someone/model"
    assert not any("bin" in pattern for pattern in rest["allow_patterns"])


# --- load -------------------------------------------------------------------------------------------------------------


def test_load_opens_a_run_and_everything_in_it(run: Path, model: Path) -> None:
    expected = BertForSequenceClassification.from_pretrained(model).eval()
    platon.save(expected, run / "sparse", sparse=True)
    platon.save(platon.sparsify(expected), run / "fast")
    tokens = torch.tensor([[2, 20, 21, 3]])
    with torch.no_grad():
        answer = expected(tokens).logits
        for folder in (run, run / "model", run / "sparse", run / "fast", model):
            opened = platon.load(folder)
            assert type(opened) is BertForSequenceClassification
            assert not opened.training
            torch.testing.assert_close(opened(tokens).logits, answer)


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_load_of_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"there is no folder 'nowhere'|'\.' holds no saved model: there is neither"):
        platon.load(name)


def test_load_opens_no_pickle(model: Path) -> None:
    torch.save(BertForSequenceClassification.from_pretrained(model).state_dict(), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot read the model in"):
        platon.load(model)


def test_load_gives_nothing_random_values(model: Path) -> None:
    """As transformers does for tensors that are not in the file."""
    tensors = load_file(model / "model.safetensors")
    del tensors["classifier.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"do not fit its config\.json: 'classifier.weight' and 0 more are not in"):
        platon.load(model)


# --- eval -------------------------------------------------------------------------------------------------------------


def test_eval_of_any_folder(model: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("eval", model, "--task", "text", "--data", texts, "--text-column", "review", "--label-column", "label")
    said = capsys.readouterr().out
    tokenizer, opened = AutoTokenizer.from_pretrained(model), platon.load(model)
    right = 0
    for line in texts.read_text().splitlines()[1:]:
        text, label = line.split(",")
        with torch.no_grad():
            right += f"LABEL_{int(opened(**tokenizer(text, return_tensors='pt')).logits.argmax())}" == label
    assert f"{100 * right / 11:.2f} %" in said
    assert "11" in said
    assert "recorded" not in said


def test_eval_says_what_it_needs(model: Path, texts: Path, tmp_path: Path) -> None:
    for words, said in (
        ([], "is no run, so it does not say its task; give --task"),
        (["--data", texts], "is no run, so it does not say its task; give --task"),
        (["--task", "txt"], "no task is called 'txt'; nearest: 'text'"),
        (["--task", "text", "--data", tmp_path / "text.csv"], "text.csv does not exist; nearest: 'texts.csv'"),
        (
            ["--task", "text", "--data", texts, "--label-column", "stars"],
            "has no column 'stars'; it has: review, label",
        ),
    ):
        with pytest.raises(UserError, match=said):
            command("eval", model, *words)


def test_a_head_of_random_values_is_not_evaluated(model: Path, texts: Path) -> None:
    BertModel.from_pretrained(model).save_pretrained(model)
    with pytest.raises(UserError, match=r"my-model' is not trained for text: part of it starts from random values"):
        command("eval", model, "--task", "text", "--data", texts)


def test_classes_in_another_order_are_refused(model: Path, write_sst2: Any) -> None:
    """The metric would be wrong without a word."""
    config = json.loads((model / "config.json").read_text())
    config |= {"id2label": {"0": "POSITIVE", "1": "NEGATIVE"}, "label2id": {"POSITIVE": 0, "NEGATIVE": 1}}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="numbers its classes positive, negative, and sst2 negative, positive"):
        command("eval", model, "--task", "sst2", "--data", write_sst2())


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_of_any_folder(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("export", model, "--format", "sparse")
    ours, theirs = platon.load(model.with_name("my-model-sparse")).state_dict(), platon.load(model).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert "my-model-sparse" in capsys.readouterr().out


def test_onnx_folders_are_what_optimum_loads(model: Path) -> None:
    """ORTModelFor… reads config.json and model.onnx, its users the tokenizer, and it gives inputs by their names."""
    command("export", model, "--format", "onnx", "--output", model / "onnx")
    folder = model / "onnx"
    assert {"config.json", "model.onnx", "tokenizer.json", "tokenizer_config.json"} <= {
        p.name for p in folder.iterdir()
    }
    assert type(AutoConfig.from_pretrained(folder)).__name__ == "BertConfig"
    inputs = AutoTokenizer.from_pretrained(folder)(["film is good", "who"], padding=True, return_tensors="pt")
    session = onnx.Session(folder / "model.onnx")
    assert set(session.names) == {"input_ids", "token_type_ids", "attention_mask"}
    assert [one.name for one in session._session.get_outputs()] == ["logits"]
    with torch.no_grad():
        expected = platon.load(model)(**inputs).logits
    torch.testing.assert_close(session(inputs)[0], expected, atol=1e-5, rtol=1e-5)
    (model / "notes").mkdir()
    (model / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something else than an ONNX model"):
        command("export", model, "--format", "onnx", "--output", model / "notes")
    assert [path.name for path in (model / "notes").iterdir()] == ["mine.txt"]


def test_export_of_a_model_in_memory(model: Path, tmp_path: Path) -> None:
    opened = BertForSequenceClassification.from_pretrained(model).eval()
    folder = platon.export(opened, tmp_path / "fast", format="fast", processor=AutoTokenizer.from_pretrained(model))
    assert (folder / "tokenizer.json").exists()
    tokens = torch.tensor([[2, 20, 21, 3]])
    with torch.no_grad():
        torch.testing.assert_close(platon.load(folder)(tokens).logits, opened(tokens).logits)
    with pytest.raises(ValueError, match="no format is called 'tflite'; there are sparse, compact, fast, onnx"):
        platon.export(opened, tmp_path / "other", format="tflite")


# --- speed ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the processes whose memory is measured."""
    monkeypatch.setattr(memory, "measure", lambda models, *args: [{"added_bytes": 5_000_000}] * len(models))


@pytest.mark.usefixtures("no_memory")
def test_speed_of_any_folder(model: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in model.iterdir())
    small = ["--engine", "eager", "--batch", 2, "--length", 8, "--rounds", 2]
    command("speed", model, *small)
    said = capsys.readouterr().out
    assert "eager, pruned, 2 × 8 tokens" in said
    assert "accuracy" not in said
    command("speed", model, *small, "--task", "text", "--data", texts, "--against", model)
    assert "accuracy" in capsys.readouterr().out
    assert sorted(path.name for path in model.iterdir()) == before  # somebody else's folder


@pytest.mark.usefixtures("no_memory")
def test_measure_of_models_in_memory(model: Path, texts: Path) -> None:
    pruned = BertForSequenceClassification.from_pretrained(model).eval()
    dense = BertForSequenceClassification(pruned.config).eval()
    found = platon.measure(pruned, dense, rows=(2,), lengths=(8,), rounds=2, metric=lambda one: {"mine": {"sum": 0.5}})
    assert [line["model"] for line in found["timings"]] == ["dense", "pruned"]
    assert found["models"]["pruned"]["metrics"] == {"mine": {"sum": 0.5}}
    assert found["models"]["dense"]["bytes"] > 0
    assert tables(found)
    found = platon.measure(model, rows=(2,), lengths=(8,), rounds=2, task="text", data=texts)
    assert found["models"]["pruned"]["metrics"]["validation"].keys() == {"accuracy"}
    with pytest.raises(TypeError, match="with a task, model must be a folder or a name"):
        platon.measure(pruned, task="text", data=texts)


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_of_any_folder(model: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it consists of, and the share of each matrix that is not zero."""
    command("inspect", model)
    said = capsys.readouterr().out
    assert "BertForSequenceClassification" in said
    assert "50.00 % of its weights are not 0" in said
    shutil.copytree(model, run / "compact")
    command("inspect", run / "compact")
    assert "BertForSequenceClassification" in capsys.readouterr().out
