"""A run from settings to folder, in this process; test_cli.py stops, kills and resumes it in others."""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

from platon import Platon, cli, weights
from platon.lab import arguments, best_model, checkpoint, finish, tasks
from platon.lab import run as lab
from platon.lab.claim import read_started, settings_to_resume
from platon.lab.errors import UserError
from platon.lab.file import write_json
from platon.lab.finished import evaluate_run, reopen
from platon.lab.folder import HISTORY, LOCK, PROBE, RECORD, STARTED
from platon.lab.printer import Printer
from platon.lab.record import read_history, read_record
from platon.lab.run import prune
from platon.lab.settings import ResolvedSettings, resolve
from platon.lab.step_count import StepCounts
from platon.lab.stop import Interrupted, StopCallback
from platon.lab.tasks import Prepared, Request, Task

Write = Callable[..., Path]
Png = Callable[..., bytes]

TINY: dict[str, Any] = {"train_rows": 128, "eval_rows": 40, "batch": 16, "steps": 12, "eval_every": 3}
TINY |= {"log_every": 2, "checkpoint_every": 4, "every": 2, "warmup": 1.0, "cooldown": 5.0, "keep_checkpoints": True}


def tiny(**flags: Any) -> ResolvedSettings:
    return resolve(flags={**TINY, "dense": "none", **flags})


def content(folder: Path) -> dict[str, bytes]:
    """Every file below the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def bits(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its dense twin first and no checkpoints left; tests must leave it as it is."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    prune(tiny(dense="first", keep=0.15, seed=3, keep_checkpoints=False), folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without a twin, with its checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    prune(tiny(), folder)
    return folder


# --- what a run leaves ------------------------------------------------------------------------------------------------


def test_record_is_complete(finished: Path) -> None:
    record = read_record(finished)
    settings = record["settings"]
    assert settings["keep"] == {"value": 0.15, "source": "user"}
    assert settings["learning_rate"] == {"value": 5e-4, "source": "ours"}
    assert record["plan"] == dataclasses.asdict(StepCounts(12, 1, 5, 1, eval_every=3, log_every=2, checkpoint_every=4))
    assert {"platon", "torch", "transformers", "datasets", "accelerate", "python"} == set(record["versions"])
    assert record["versions"]["torch"] == torch.__version__
    assert record["data"]["train_rows"] == 128
    assert record["data"]["validation_rows"] == 40
    same = tasks.find("digits").prepare(Request(train_rows=128, eval_rows=40))
    assert record["data"]["fingerprint"] == same.fingerprint
    assert record["metrics"] == ["accuracy"]
    assert 0 <= record["results"]["validation"]["accuracy"] <= 1
    assert 0 < record["chance"]["validation"]["accuracy"] < 0.3
    assert record["seconds"] > 0
    assert record["bytes"] == (finished / "model" / "model.safetensors").stat().st_size


def test_record_names_the_method_and_the_settings_that_matter_to_it(finished: Path) -> None:
    record = read_record(finished)
    assert record["title"] == "PLATON"
    assert record["method_settings"] == dataclasses.asdict(Platon(window=2))  # the first mask falls on step 2
    dense = read_record(finished / "dense")
    assert (dense["title"], dense["method_settings"]) == ("Dense", {})


def test_exactly_the_share_asked_for_is_kept(finished: Path) -> None:
    record = read_record(finished)
    total = record["parameters"]["prunable"]
    assert total == 4 * 12 * 64 * 64  # four layers of 64, feed-forward of four times that
    assert record["kept"] == round(0.15 * total) / total
    model = AutoModelForImageClassification.from_pretrained(finished / "model")
    matrices = weights(model).matrices
    assert sum(int(m.count_nonzero()) for m in matrices.values()) == round(0.15 * total)
    assert record["layers"] == {name: int(m.count_nonzero()) / m.numel() for name, m in matrices.items()}
    assert record["parameters"]["all"] == sum(p.numel() for p in model.parameters())
    assert record["parameters"]["left"] == record["parameters"]["all"] - total + round(0.15 * total)


def test_model_folder_is_plain_transformers(finished: Path) -> None:
    """Nobody needs platon: the model and its image processor load, and measure as the record says."""
    model = AutoModelForImageClassification.from_pretrained(finished / "model").eval()
    AutoImageProcessor.from_pretrained(finished / "model", backend="pil")
    assert model.config.id2label[7] == "7"
    rows = tasks.find("digits").prepare(Request(train_rows=128, eval_rows=40)).evaluation["validation"]
    with torch.no_grad():
        found = [int(model(rows[n]["pixel_values"][None]).logits.argmax()) for n in range(len(rows))]
    right = sum(label == rows[n]["labels"] for n, label in enumerate(found))
    assert right / len(rows) == read_record(finished)["results"]["validation"]["accuracy"]


def test_model_card_has_settings_and_results(finished: Path) -> None:
    card = (finished / "model" / "README.md").read_text()
    record = read_record(finished)
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "15.0 % of the prunable weights kept" in card
    accuracy = 100 * record["results"]["validation"]["accuracy"]
    dense = 100 * record["dense"]["results"]["validation"]["accuracy"]
    assert f"| validation | accuracy | {accuracy:.2f} | {dense:.2f} |" in card
    assert "| keep | 0.15 | user |" in card
    assert f"torch {torch.__version__}" in card


def test_history_has_a_line_for_each_log_and_each_evaluation(plain: Path) -> None:
    history = read_history(plain)
    training = [line for line in history if "loss" in line]
    assert [line["step"] for line in training] == [2, 4, 6, 8, 10, 12]
    assert all({"step", "loss", "learning_rate", "grad_norm", "keep", "kept"} <= line.keys() for line in training)
    assert [line["keep"] for line in training][-3:] == [0.1] * 3
    evaluations = [line["step"] for line in history if "eval_validation_accuracy" in line]
    assert evaluations == [3, 6, 9, 12]


def test_checkpoints_are_few_and_complete(plain: Path) -> None:
    places = checkpoint.steps(plain / "checkpoints")
    assert list(places) == [8, 12]
    assert all(checkpoint.problem(place) is None for place in places.values())


def test_nothing_is_left_lying_about(finished: Path) -> None:
    """Neither best models nor checkpoints, of the run and of its twin."""
    for folder in (finished, finished / "dense"):
        known = {"model", "dense", RECORD, HISTORY, PROBE, STARTED, LOCK}
        assert {path.name for path in folder.iterdir()} <= known


def test_checkpoints_that_a_kill_left_are_removed_and_foreign_files_stay(finished: Path, tmp_path: Path) -> None:
    """Killed after the record was written, before the checkpoints were removed."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    place = run / "checkpoints"
    (place / "checkpoint-8").mkdir(parents=True)
    (place / "checkpoint-8" / checkpoint.MARKER).write_text("{}")
    (place / "notes.txt").write_text("mine")
    prune(read_started(run), run, resume=True)
    assert [path.name for path in place.iterdir()] == ["notes.txt"]
    (place / "notes.txt").unlink()
    prune(read_started(run), run, resume=True)
    assert not place.exists()


def test_pruning_starts_from_the_dense_model(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, dense = read_record(finished), read_record(finished / "dense")
    assert dense["method"] == "dense"
    assert dense["kept"] == 1.0
    assert record["dense"] == {name: dense[name] for name in ("results", "parameters", "bytes", "seconds")}
    started: list[Any] = []
    prepare = Task.prepare

    def spy(self: Task, request: Request) -> Prepared:
        started.append(request.model)
        return prepare(self, request)

    monkeypatch.setattr(Task, "prepare", spy)
    for where in ("first", "beside"):
        prune(tiny(dense=where, steps=2, warmup=0.0, cooldown=0.0), tmp_path / where)
    assert started == [None, str(tmp_path / "first" / "dense" / "model"), None, None]
    assert read_record(tmp_path / "beside")["dense"] is not None


def test_same_seed_gives_the_same_bits_and_another_does_not(plain: Path, tmp_path: Path) -> None:
    prune(tiny(), tmp_path / "again")
    prune(tiny(seed=1), tmp_path / "other")
    assert all(torch.equal(tensor, bits(plain)[name]) for name, tensor in bits(tmp_path / "again").items())
    assert not all(torch.equal(tensor, bits(plain)[name]) for name, tensor in bits(tmp_path / "other").items())
    assert read_record(plain)["results"] == read_record(tmp_path / "again")["results"]


@pytest.mark.parametrize(
    "flags",
    [
        {"method": "magnitude", "scope": "matrix"},
        {"accumulate": 2},
        {"precision": "bf16"},
        {"optimizer": "sgd", "decay": "cosine", "learning_rate": 0.03},
        {"optimizer": "adamax", "clip": 0.0, "eval_every": 100},
        {"timing": "before", "window": 1, "cooldown": 0.0},
    ],
    ids=lambda flags: "-".join(map(str, flags.values())),
)
def test_every_way_of_training_ends_at_the_share(flags: dict[str, Any], tmp_path: Path) -> None:
    record = prune(tiny(**{"steps": 8, "warmup": 1.0, "cooldown": 3.0, **flags}), tmp_path / "run")
    total = record["parameters"]["prunable"]
    found = record["parameters"]["left"] - (record["parameters"]["all"] - total)
    if flags.get("scope") == "matrix":
        assert all(share == pytest.approx(0.1, abs=2e-4) for share in record["layers"].values())
    else:
        assert found == round(0.1 * total)


def test_evaluation_gives_the_record_again(finished: Path) -> None:
    record, results = evaluate_run(finished)
    assert record == read_record(finished)
    assert results == record["results"]


def test_fp16_run_is_measured_without_a_gpu(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    shutil.copytree(finished, tmp_path / "run")
    record = read_record(finished)
    record["settings"]["precision"] = {"value": "fp16", "source": "user"}
    write_json(tmp_path / "run" / RECORD, record)
    assert evaluate_run(tmp_path / "run")[1] == record["results"]


def test_reopening_does_not_read_the_training_rows(write_sst2: Write, tiny_bert: Path, tmp_path: Path) -> None:
    data = write_sst2()
    flags = {"task": "sst2", "model": str(tiny_bert), "data": str(data), "steps": 2, "cooldown": 1.0, "warmup": 0.0}
    resolved = resolve(flags={**TINY, **flags, "train_rows": None, "eval_rows": None})
    record = prune(resolved, tmp_path / "run")
    (data / "glue" / "sst2" / "train.parquet").unlink()
    assert len(reopen(tmp_path / "run").prepared.train) == 0
    assert len(reopen(tmp_path / "run").prepared.evaluation["validation"]) == 20
    assert len(reopen(tmp_path / "run", eval_rows=8).prepared.evaluation["validation"]) == 8
    assert evaluate_run(tmp_path / "run") == (record, record["results"])


# --- the best model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def made_scores(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Let the task's metric say these values, one an evaluation; gives what it was asked."""

    def make(*values: float) -> list[float]:
        left: Iterator[float] = iter(values)
        said: list[float] = []
        prepare = Task.prepare

        def score(split: str, predictions: Any, labels: Any) -> dict[str, float]:
            said.append(next(left))
            return {"accuracy": said[-1]}

        def changed(self: Task, request: Request) -> Prepared:
            return dataclasses.replace(prepare(self, request), score=score)

        monkeypatch.setattr(Task, "prepare", changed)
        return said

    return make


def test_better_score_before_the_target_share_never_counts(
    made_scores: Callable[..., list[float]], tmp_path: Path
) -> None:
    said = made_scores(0.9, 0.8, 0.7, 0.6, 0.25)  # at 3, 6, 9, 12, and of the model that was taken
    record = prune(tiny(), tmp_path / "run")
    assert record["best"] == {"step": 9, "value": 0.7, "kept": record["kept"]}  # the target is reached at 12 - 5 = 7
    assert record["results"] == {"validation": {"accuracy": 0.25}}
    assert len(said) == 5
    total = record["parameters"]["prunable"]
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "model")
    assert sum(int(m.count_nonzero()) for m in weights(model).matrices.values()) == round(0.1 * total)


def test_best_of_the_final_phase_is_the_one_saved(made_scores: Callable[..., list[float]], tmp_path: Path) -> None:
    made_scores(0.9, 0.9, 0.9, 0.8, 0.1, 0.8, 0.8)  # at 2, 4, 6, then at the target: 8, 10, 12
    seen: dict[str, bytes] = {}

    def look(model: Any, folder: Path) -> None:
        save_model(model, folder)
        seen[folder.name] = (folder / "model.safetensors").read_bytes()

    save_model = best_model.save_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platon.lab.best_model.save_model", look)
        record = prune(tiny(eval_every=2), tmp_path / "run")
    assert record["best"] == {"step": 8, "value": 0.8, "kept": record["kept"]}  # the first of equals
    assert list(seen) == ["best-8"]
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == seen["best-8"]
    assert not list((tmp_path / "run").glob("best-*"))


def test_without_an_evaluation_at_the_target_the_last_model_is_taken(
    made_scores: Callable[..., list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_scores(0.5, 0.25)
    monkeypatch.setattr(best_model.BestModelCallback, "on_evaluate", lambda *args, **kwargs: None)
    record = prune(tiny(eval_every=100), tmp_path / "run")
    assert record["best"] is None
    last = load_file(tmp_path / "run" / "checkpoints" / "checkpoint-12" / "model.safetensors")
    assert all(torch.equal(tensor, last[name]) for name, tensor in bits(tmp_path / "run").items())


# --- stop and resume --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As sudden as a kill, but for this process."""


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int, number: int | None = None) -> None:
    """Send a signal, or die, at a step."""
    done: list[int] = []
    step_end = StopCallback.on_step_end

    def stop(self: StopCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == at and not done:
            done.append(at)
            if number is None:
                raise Killed
            os.kill(os.getpid(), number)
        step_end(self, args, state, control, **kwargs)

    monkeypatch.setattr(StopCallback, "on_step_end", stop)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_the_run_goes_on_to_the_same_bits(
    number: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(number)
    interrupt(monkeypatch, 9, number)
    with pytest.raises(Interrupted) as caught:
        prune(tiny(), tmp_path / "run")
    assert (caught.value.number, caught.value.folder) == (number, tmp_path / "run")
    assert signal.getsignal(number) is before
    assert not (tmp_path / "run" / RECORD).exists()
    assert list(checkpoint.steps(tmp_path / "run" / "checkpoints")) == [8, 9]
    told: list[str] = []
    resolved = read_started(tmp_path / "run")
    assert resolved == tiny()
    record = prune(resolved, tmp_path / "run", resume=True, printer=Printer(told.append))
    assert told[0] == "resuming at step 9 of 12"
    compare(tmp_path / "run", plain)
    assert record["seconds"] > 0


def compare(folder: Path, other: Path) -> None:
    """The same result, bit for bit, however it was come by."""
    assert all(torch.equal(tensor, bits(other)[name]) for name, tensor in bits(folder).items())
    mine, theirs = read_record(folder), read_record(other)
    for key in ("results", "best", "kept", "layers", "parameters", "settings", "plan", "data"):
        assert mine[key] == theirs[key]
    # All but the mean loss of the line after a resumption, which is the mean of the steps since then.
    mine_lines, their_lines = ([{**line, "loss": 0} for line in read_history(f)] for f in (folder, other))
    assert mine_lines == their_lines


@pytest.mark.parametrize("at", [1, 7, 11])
def test_killed_at_a_step(at: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first checkpoint, after one in the middle of an epoch, and after one where an epoch ends."""
    interrupt(monkeypatch, at)
    with pytest.raises(Killed):
        prune(tiny(), tmp_path / "run")
    prune(tiny(), tmp_path / "run", resume=True)
    compare(tmp_path / "run", plain)


def test_killed_after_the_last_step(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 steps are an epoch and a half, so Trainer would go on with the second one."""

    def die(*args: Any) -> None:
        raise Killed

    for module, name in ((lab, "finish"), (finish, "write_json")):  # after training; with all but the record written
        with monkeypatch.context() as patch:
            patch.setattr(module, name, die)
            with pytest.raises(Killed):
                prune(tiny(), tmp_path / name)
        assert not (tmp_path / name / RECORD).exists()
        prune(tiny(), tmp_path / name, resume=True)
        compare(tmp_path / name, plain)


def test_killed_at_once(tmp_path: Path) -> None:
    """A start that left its lock, or half of its settings, does not bar the folder."""
    for name in (LOCK, f".{STARTED}.123"):
        (tmp_path / name).write_text("")
    prune(tiny(steps=2, warmup=0.0, cooldown=0.0), tmp_path)


def test_damaged_checkpoint_is_passed_over(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, 11)
    with pytest.raises(Killed):
        prune(tiny(), tmp_path / "run")
    places = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert list(places) == [4, 8]
    (places[8] / "optimizer.pt").write_bytes(b"")
    told: list[str] = []
    prune(tiny(), tmp_path / "run", resume=True, printer=Printer(told.append))
    assert told[:2] == [
        "passing over a checkpoint: checkpoint-8 is damaged: optimizer.pt is not what was written",
        "resuming at step 4 of 12",
    ]
    compare(tmp_path / "run", plain)


def test_resumed_run_sees_the_same_augmented_images(
    make_png: Png, tiny_vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, count in {"train": 8, "validation": 2}.items():
        for n in range(2 * count):
            place = tmp_path / "pets" / split / ("cat" if n % 2 else "dog")
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{n}.png").write_bytes(make_png(n, 12))
    flags = {"task": "images", "data": str(tmp_path / "pets"), "model": str(tiny_vit), "augment": True}
    resolved = resolve(flags={**TINY, **flags, "train_rows": None, "eval_rows": None, "batch": 4})
    prune(resolved, tmp_path / "whole")
    interrupt(monkeypatch, 10, signal.SIGTERM)  # the middle of the third epoch
    with pytest.raises(Interrupted):
        prune(resolved, tmp_path / "run")
    prune(resolved, tmp_path / "run", resume=True)
    compare(tmp_path / "run", tmp_path / "whole")


def test_stopping_the_twin_is_stopping_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, 2, signal.SIGTERM)
    resolved = tiny(dense="first", steps=4, warmup=0.0, cooldown=1.0)
    with pytest.raises(Interrupted) as caught:
        prune(resolved, tmp_path / "run")
    assert caught.value.folder == tmp_path / "run"  # whose --resume goes on with both
    assert prune(read_started(tmp_path / "run"), tmp_path / "run", resume=True)["dense"] is not None


def test_finished_run_returns_at_once(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(finished)
    monkeypatch.setattr(Task, "prepare", None)  # nothing is read, nothing is trained
    told: list[str] = []
    record = prune(read_started(finished), finished, resume=True, printer=Printer(told.append))
    assert record == read_record(finished)
    assert f"{finished} is finished" in told
    assert content(finished) == before


class Counter:
    """An attachment: counts forward passes of a training, and has a tensor."""

    def __init__(self, model: Any) -> None:
        self.count, self.sum, self.detached = 0, torch.zeros(2), 0
        self._hook = model.register_forward_hook(self._see)

    def _see(self, model: Any, inputs: Any, output: Any) -> None:
        if model.training:
            self.count += 1
            self.sum += output.logits.detach().sum()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensors": {"sum": self.sum}}

    def load_state_dict(self, state: Any) -> None:
        self.count, self.sum = state["count"], state["tensors"]["sum"]

    def detach(self) -> None:
        self._hook.remove()
        self.detached += 1


def test_attachments_are_in_checkpoints(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Counter] = []

    def attach(settings: Any, model: Any, prepared: Prepared) -> dict[str, Counter]:
        made.append(Counter(model))
        return {"counter": made[-1]}

    prune(tiny(), tmp_path / "whole", attach=attach)
    with monkeypatch.context() as patch:
        interrupt(patch, 9)
        with pytest.raises(Killed):
            prune(tiny(), tmp_path / "run", attach=attach)
    with pytest.raises(UserError, match=r"checkpoint-8' was trained with a counter"):
        prune(tiny(), tmp_path / "run", resume=True)
    prune(tiny(), tmp_path / "run", resume=True, attach=attach)
    whole, stopped, resumed = made
    assert (whole.count, stopped.count, resumed.count) == (12, 9, 12)
    assert torch.equal(whole.sum, resumed.sum)
    assert whole.detached
    assert resumed.detached
    compare(tmp_path / "run", plain)


# --- whose folder it is -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after three steps; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 3, signal.SIGTERM)
        with pytest.raises(Interrupted):
            prune(tiny(), folder)
    return folder


@pytest.fixture
def unfinished(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(stopped, tmp_path / "unfinished")


def test_folder_with_a_run_is_refused(finished: Path, unfinished: Path) -> None:
    for folder in (finished, unfinished):
        before = content(folder)
        with pytest.raises(UserError, match="holds a run already; continue it with --resume, or choose another"):
            prune(tiny(), folder)
        with pytest.raises(UserError, match=r"holds another run: its keep is 0\.15?, not 0\.3"):
            prune(tiny(keep=0.3), folder, resume=True)
        assert content(folder) == before


def test_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(UserError, match="is not empty and holds no run; choose another --output"):
            prune(tiny(), tmp_path, resume)
    with pytest.raises(UserError, match=r"thesis\.tex' is a file; choose another --output"):
        prune(tiny(), tmp_path / "thesis.tex")
    with pytest.raises(UserError, match=r"cannot write to .*thesis\.tex/run': Not a directory"):
        prune(tiny(), tmp_path / "thesis.tex" / "run")
    assert content(tmp_path) == {"thesis.tex": b"years of work"}
    with pytest.raises(UserError, match="holds no run; start one without --resume"):
        read_started(tmp_path)


def test_resuming_takes_what_is_not_said_from_the_run(unfinished: Path) -> None:
    """The command compares what it was given, not the defaults of what it was not."""
    asked = resolve(flags={"task": "sst2", "steps": 12})  # other defaults than those of the digits
    with pytest.raises(UserError, match=r"holds another run: its task is 'digits', not 'sst2'"):
        settings_to_resume(unfinished, asked)
    assert settings_to_resume(unfinished, resolve(flags={"steps": 12})) == tiny()
    assert settings_to_resume(unfinished / "none", asked) == asked
    arguments = ["prune", "--output", str(unfinished), "--resume"]
    with pytest.raises(UserError, match=r"holds another run: its learning_rate is 0\.0005, not 0\.1"):
        cli.app([*arguments, "--learning-rate", "0.1"], standalone_mode=False)
    with pytest.raises(UserError, match=r"holds another run: its batch is 16, not 8"):
        cli.app([*arguments, "--batch", "8", "--eval-rows", "40"], standalone_mode=False)


def changed(**values: Any) -> dict[str, Any]:
    """`run.json` with other values of settings."""
    plain = {"format": 1, "recipe": None, "settings": tiny().plain()}
    for name, value in values.items():
        plain["settings"][name] = {"value": value, "source": "user"}  # type: ignore[index]
    return plain


@pytest.mark.parametrize(
    ("started", "sentence"),
    [
        (changed(optimizer="adagrad"), "optimizer must be one of adamw, adamax, sgd, got 'adagrad'"),
        (changed(precision="fp8"), "precision must be one of float32, bf16, fp16, got 'fp8'"),
        (changed(batch="many"), "batch must be of type int, got 'many'"),
        (changed(batch=[16]), "batch must be of type int"),
        (changed(keep=None), "keep needs a value"),
        (changed(units="atoms"), "units must be one of"),
        (changed() | {"format": 99}, "has format 99, this version of platon reads 1"),
        (changed() | {"settings": [1]}, "is not what this version of platon writes"),
        (changed() | {"settings": {"keep": 0.1}}, "is not what this version of platon writes"),
        (changed() | {"settings": {"keep": {"value": 0.1, "source": "stars"}}}, "is not what this version of"),
        (changed() | {"recipe": 3}, "is not what this version of platon writes"),
    ],
)
def test_started_settings_are_checked_as_a_users_are(started: Any, sentence: str, tmp_path: Path) -> None:
    write_json(tmp_path / STARTED, started)
    with pytest.raises(UserError, match=sentence) as caught:
        read_started(tmp_path)
    assert str(tmp_path / STARTED) in str(caught.value)


@pytest.mark.parametrize("name", [HISTORY, PROBE])
def test_foreign_line_among_a_runs_own_is_refused(name: str, unfinished: Path) -> None:
    text = (unfinished / name).read_text()
    for line in ("[1, 2]", "hello", '{"loss": 1.0}', '{"step": "two"}', "{}"):
        (unfinished / name).write_text(text.replace("\n", f"\n{line}\n", 1))
        with pytest.raises(UserError, match=rf"{name}' is damaged: line 2 is not a JSON object with a step"):
            prune(tiny(), unfinished, resume=True)
    (unfinished / name).write_text(text)
    assert prune(tiny(), unfinished, resume=True)["kept"] == pytest.approx(0.1, abs=1e-5)


def test_settings_of_another_version_are_said_to_be_so(tmp_path: Path) -> None:
    for text in ("[]", "{}", '{"settings": {"new": {"value": 1, "source": "user"}}, "recipe": null}'):
        (tmp_path / STARTED).write_text(text)
        with pytest.raises(UserError, match=r"run\.json' is not what this version of platon writes"):
            read_started(tmp_path)


def test_one_process_at_a_time(unfinished: Path) -> None:
    with (unfinished / LOCK).open("w") as lock:  # flock knows open files, not processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process works on .*; wait for it or choose another --output"):
            prune(tiny(), unfinished, resume=True)
    assert prune(tiny(), unfinished, resume=True)["kept"] == pytest.approx(0.1, abs=1e-5)


def test_failed_start_does_not_keep_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corrected command must work in the same place, and without --resume."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    (tmp_path / "mine").mkdir()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"data": str(tmp_path)}, "digits brings its own data"),
        ({"warmup": 10.0}, r"warmup \+ cooldown must not exceed the 12 steps"),
        ({"batch": 15, "accumulate": 2}, "batch must be a multiple of accumulate"),
        ({"precision": "fp16"}, "precision fp16 needs a GPU, and there is none; choose bf16 or float32"),
        ({"report_to": "wandb"}, "report_to wandb needs a package: pip install wandb"),
        ({"beta1": 1.5}, r"beta1 must be in \[0, 1\), got 1.5"),
    ]
    for (flags, sentence), dense, folder in product(wrong, ("none", "first"), (tmp_path / "new", tmp_path / "mine")):
        with pytest.raises(UserError, match=sentence):
            prune(tiny(**flags, dense=dense), folder)
        assert folder.exists() == (folder.name == "mine")
        assert not list(folder.glob("*"))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"method": "platn"}, "no method is called 'platn'; nearest: 'platon'"),
        ({"keep": 80.0}, r"keep must be in \(0, 1\], got 80.0; write 0.8 for 80 %"),
        ({"keep": 0.0}, r"keep must be in \(0, 1\], got 0.0; give the share of weights that stays"),
        ({"beta2": -1.0, "dense": "first"}, r"beta2 must be in \[0, 1\), got -1.0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_done(
    flags: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "prepare", None)
    with pytest.raises(UserError, match=sentence):
        prune(tiny(**flags), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_folder_can_be_moved(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "elsewhere")
    assert evaluate_run(tmp_path / "elsewhere")[1] == read_record(plain)["results"]
    assert json.loads((tmp_path / "elsewhere" / RECORD).read_text()) == read_record(plain)
