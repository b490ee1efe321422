"""`platon export` and `platon speed` on a real run of digits, and what they say when something is wrong."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import platon
from platon import cli
from platon.cli import model as cli_model
from platon.cli.model import ENGINES, Format
from platon.deploy import memory, onnx, speed
from platon.deploy.engine import Engine, eager
from platon.deploy.shrink import shrink
from platon.engine.proof.discovery import heads, neurons
from platon.lab.errors import UserError
from platon.lab.finished import evaluate_run, reopen
from platon.lab.record import read_record
from platon.lab.run import prune
from platon.lab.settings import resolve

TINY: dict[str, Any] = {"train_rows": 64, "eval_rows": 24, "batch": 16, "steps": 4, "keep": 0.1, "eval_every": 4}
TINY |= {"warmup": 0.0, "cooldown": 1.0, "checkpoint_every": 4}


def platon_command(*words: Any) -> None:
    assert not cli.app([str(word) for word in words], standalone_mode=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run without structure; tests copy it."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    prune(resolve(flags={**TINY, "dense": "none"}), folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def structured(run: Path) -> Path:
    """The same with heads and neurons gone."""
    model = speed.opened(run / "model")
    with torch.no_grad():
        for family in heads(model) + neurons(model):
            gone = torch.arange(family.count) % 2 == 1
            for member in family.slices:
                member.parameter.mul_(member.expand((~gone).float()))
    model.save_pretrained(run / "model")
    return run


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_sparse(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    platon_command("export", run, "--format", "sparse")
    dense = speed.opened(run / "model").state_dict()
    back = platon.load(run / "sparse").state_dict()
    assert all(torch.equal(back[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in dense.items())
    assert (run / "sparse" / "sparse.safetensors").stat().st_size < 0.3 * (
        run / "model/model.safetensors"
    ).stat().st_size
    said = capsys.readouterr().out
    assert "% of 0.82 MB" in said
    assert str(run / "sparse") in said
    assert (run / "sparse" / "preprocessor_config.json").exists()


def test_export_compact(structured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    platon_command("export", structured, "--format", "compact", "--output", structured / "small")
    small = platon.load(structured / "small")
    assert max(family.count for family in heads(small)) == 2  # or less, where none of a head's weights was kept
    assert (structured / "small" / "preprocessor_config.json").exists()
    assert "largest difference of the outputs" in capsys.readouterr().out


def test_export_onnx(structured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The compact model, where there is one."""
    platon_command("export", structured, "--format", "compact")
    platon_command("export", structured, "--format", "onnx")
    assert "checked in ONNX Runtime" in capsys.readouterr().out
    batch = reopen(structured)[1].batch(5)
    assert batch.keys() == {"pixel_values"}
    with torch.no_grad():
        expected = platon.load(structured / "compact")(**batch).logits
    file = structured / "onnx" / "model.onnx"
    torch.testing.assert_close(onnx.Session(file)(batch)[0], expected, atol=1e-5, rtol=1e-5)
    assert file.stat().st_size < (structured / "model" / "model.safetensors").stat().st_size
    assert (structured / "onnx" / "preprocessor_config.json").exists()


def test_onnx_under_a_name_of_its_own_says_where_the_processor_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "mine").mkdir()
    platon_command("export", run, "--format", "onnx", "--output", run / "mine" / "small.onnx")
    assert not (run / "mine" / "preprocessor_config.json").exists()
    assert f"image processor: {run / 'model'}" in capsys.readouterr().out


def test_nothing_to_remove(run: Path) -> None:
    model = speed.opened(run / "model")
    with torch.no_grad():
        for family in heads(model) + neurons(model):
            for member in family.slices:
                member.parameter.add_(0.1)
    model.save_pretrained(run / "model")
    with pytest.raises(UserError, match="ViTForImageClassification has nothing to remove"):
        platon_command("export", run, "--format", "compact")
    assert not (run / "compact").exists()


@pytest.mark.parametrize("form", ["sparse", "compact", "onnx"])
def test_a_damaged_model(form: str, run: Path) -> None:
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cannot read the model in '.*/run/model': ") as caught:
        platon_command("export", run, "--format", form)
    assert "\n" not in str(caught.value)
    assert not (run / form).exists()


@pytest.mark.parametrize("form", ["sparse", "compact", "onnx"])
def test_a_folder_without_a_run(form: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is neither a finished run nor a model: there is no record\.json and no conf"):
        platon_command("export", tmp_path, "--format", form)
    assert not list(tmp_path.iterdir())


def test_other_things_are_not_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something else than a saved model"):
        platon_command("export", run, "--format", "sparse", "--output", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_onnx_without_its_packages(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="ONNX needs onnx, onnxscript, onnxruntime"):
        platon_command("export", run, "--format", "onnx")
    assert not (run / "onnx").exists()


def test_rounding_is_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    platon_command("export", run, "--format", "fast", "--precision", "float16")
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"validation accuracy [\d.]+ %, before rounding [\d.]+ %", said)
    assert json.loads((run / "fast" / "manifest.json").read_text())["precision"] == "float16"
    with pytest.raises(UserError, match="precision and embeddings are for the formats sparse and fast, got 'compact'"):
        platon_command("export", run, "--format", "compact", "--precision", "float16")


# --- speed ------------------------------------------------------------------------------------------------------------


def test_speed(structured: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    platon_command("export", structured, "--format", "compact")
    monkeypatch.setattr(memory, "measure", lambda models, *args: [{"added_bytes": 5_000_000}] * len(models))
    platon_command("speed", structured, "--engine", "eager", "--batch", 2, "--batch", 3, "--rounds", 2)
    found = json.loads((structured / "speed.json").read_text())
    assert [(line["model"], line["rows"], line["length"]) for line in found["timings"]] == [
        ("dense", 2, None),
        ("pruned", 2, None),
        ("dense", 3, None),
        ("pruned", 3, None),
    ]
    dense, pruned = found["models"].values()
    assert pruned["parameters"] < dense["parameters"]
    assert pruned["bytes"] < dense["bytes"]
    assert [line["metrics"] for line in found["contenders"]] == [found["contenders"][0]["metrics"]] * 2  # same outputs
    assert (structured / "figures" / "speed.png").stat().st_size > 5000
    said = capsys.readouterr().out
    for word in ("eager, pruned, 2 rows", "eager", "accuracy", "memory", "5.00 MB", "speed.json", "×"):
        assert word in said


def test_sparse_is_compared_with_dense_kernels(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a dense twin the same weights are measured twice; only the pruned model may skip its zeros."""
    opened: list[str] = []

    def recorded(name: str) -> Engine:
        return lambda subject: (opened.append(name), eager(subject))[1]

    for name in ("eager", "sparse"):
        monkeypatch.setitem(speed.ENGINES, name, recorded(name))
    seen: list[str] = []
    monkeypatch.setattr(
        memory, "measure", lambda models, *args: seen.extend(one[0] for one in models) or [{}] * len(models)
    )
    platon_command("speed", run, "--engine", "sparse", "--batch", 2, "--batch", 3, "--rounds", 2, "--no-metric")
    assert opened == ["eager", "sparse"] * 2
    assert seen == ["eager", "sparse"]
    said = capsys.readouterr().out
    for line in (r"eager, dense, 2 rows: .* ms", r"sparse, pruned, 3 rows: .* ms"):
        assert re.search(line, said)


def test_sparse_is_measured_unless_the_user_chooses() -> None:
    assert [name for name in speed.ENGINES if name != "compile"] == ENGINES
    assert inspect.signature(cli_model.speed).parameters["engine"].default is ENGINES


def test_the_dense_twin_is_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one; and the model with its zeros, where there is nothing compact."""
    seen: list[Any] = []

    def measured(folders: Any, *rest: Any) -> None:
        seen.append(folders)
        raise ValueError("enough")

    monkeypatch.setattr(speed, "measure", measured)
    with pytest.raises(UserError, match="enough"):
        platon_command("speed", run)
    for name in ("dense/model", "sparse", "compact"):
        (run / name).mkdir(parents=True)
        (run / name / "config.json").write_text("{}")
        with pytest.raises(UserError, match="enough"):
            platon_command("speed", run)
    assert seen == [
        {"dense": run / "model", "pruned": run / "model"},
        {"dense": run / "dense" / "model", "pruned": run / "model"},
        {"dense": run / "dense" / "model", "pruned": run / "sparse"},
        {"dense": run / "dense" / "model", "pruned": run / "compact"},
    ]
    assert not (run / "speed.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "fast"], "no engine is called 'fast'; there are eager, compile, sparse, onnx"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--length", "0"], "length must be at least 1, got 0"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
    ],
)
def test_speed_of_nothing(run: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        platon_command("speed", run, *words)
    assert not (run / "speed.json").exists()


@pytest.mark.parametrize("command", ["export", "speed"])
def test_help_is_quick_and_says_it_all(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.app([command, "--help"], standalone_mode=False)
    said = capsys.readouterr().out
    wanted = {
        "export": ("--format", "--output", "sparse", "onnx", "compact", "Example"),
        "speed": ("--engine", "--batch"),
    }
    assert all(word in said for word in wanted[command])
    assert Format("onnx") is Format.onnx


# --- at the end of a run ----------------------------------------------------------------------------------------------


def test_a_structured_run_ends_with_its_compact_model(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = {**TINY, "dense": "none", "units": "heads+neurons", "keep": 0.5}
    record = prune(resolve(flags=flags), folder, shrink=shrink)
    small = platon.load(folder / "compact")
    before = speed.opened(folder / "model")
    assert sum(family.count for family in neurons(small)) < sum(family.count for family in neurons(before))
    assert record["compact"]["parameters"] == sum(p.numel() for p in small.parameters())
    assert record["compact"]["parameters"] <= record["parameters"]["left"]
    assert record["compact"]["bytes"] == (folder / "compact" / "model.safetensors").stat().st_size
    assert record["compact"]["difference"] <= 1e-5
    assert read_record(folder)["compact"] == record["compact"]
    assert (folder / "compact" / "preprocessor_config.json").exists()


def test_a_compact_model_is_pruned_further(tmp_path: Path) -> None:
    """From its folder, with its smaller matrices; what comes out can be evaluated and exported like any other run."""
    first = prune(
        resolve(flags={**TINY, "dense": "none", "units": "heads+neurons", "keep": 0.5}), tmp_path / "one", shrink=shrink
    )
    flags = {**TINY, "dense": "none", "keep": 0.5, "model": str(tmp_path / "one" / "compact")}
    second = prune(resolve(flags=flags), tmp_path / "two")
    assert second["parameters"]["all"] == first["compact"]["parameters"]
    assert second["kept"] == pytest.approx(0.5, abs=1e-3)
    assert evaluate_run(tmp_path / "two")[1] == second["results"]
    platon_command("export", tmp_path / "two", "--format", "sparse")
    again = platon.load(tmp_path / "two" / "sparse")
    assert sum(p.numel() for p in again.parameters()) == first["compact"]["parameters"]


def test_more_than_asked_for_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "measure", lambda models, *args: [{"added_bytes": 5_000_000}] * len(models))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, "keep": 0.01}.items()]
    platon_command("prune", *words, "--dense", "none", "--units", "heads", "--no-fast", "--output", tmp_path / "run")
    kept = read_record(tmp_path / "run")["kept"]
    assert kept >= 0.25  # one of four heads
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"{100 * kept:.2f} % is kept, more than the 1.00 % that was asked for: one head of each attention always stays"
        in said
    )


def test_a_compact_model_that_cannot_be_made_costs_no_run(tmp_path: Path) -> None:
    def refused(model: Any, batch: Any, folder: Path, processor: Any) -> dict[str, Any]:
        raise ValueError("the heads of Model are not known")

    record = prune(resolve(flags={**TINY, "dense": "none", "units": "heads+neurons"}), tmp_path / "run", shrink=refused)
    assert record["compact"] == {"error": "the heads of Model are not known"}
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_other_runs_have_none(finished: Path) -> None:
    assert read_record(finished)["compact"] is None


def test_outputs_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, structured: Path) -> None:
    from platon.deploy import shrink as module

    def wrong(model: Any) -> Any:
        small = platon.compact(model)
        with torch.no_grad():
            small.classifier.bias.add_(0.01)
        return small

    monkeypatch.setattr(module, "compact", wrong)
    batch = {"pixel_values": torch.randn(2, 1, 8, 8)}
    with pytest.raises(ValueError, match=r"the smaller model differs from the pruned one: logits by 0\.01"):
        shrink(speed.opened(structured / "model"), batch, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_inspect_shows_the_structure_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the configuration alone: there are no weights in the folder."""
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
    config = transformers.BertConfig(**small, vocab_size=50, architectures=["BertForMaskedLM"])
    config.save_pretrained(tmp_path)
    platon_command("inspect", tmp_path)
    said = capsys.readouterr().out
    assert "12 heads and 72 neurons are proved; they hold 100.0 % of the prunable weights" in said
    [row] = [line for line in said.splitlines() if "bert.encoder.layer.0 to 2" in line]
    assert [cell.strip() for cell in row.split("│")[2:6]] == [
        "BertLayer",
        "4",
        "24",
        f"{3 * (4 * 32 * 32 + 2 * 32 * 24):,}",
    ]
    assert "refused" not in said


def test_inspect_shows_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    transformers.AlbertConfig(**small, vocab_size=50, embedding_size=16).save_pretrained(tmp_path)
    platon_command("inspect", tmp_path)
    said = capsys.readouterr().out
    assert "0 heads and 0 neurons are proved" in said
    assert "attention.query.weight and 5 more" in said
    assert "its block is run 2 times in one pass" in said
