"""Every method through `prune`: what it leaves, stopped and resumed; and what a run that did not converge leaves."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from platon.engine.methods import METHODS
from platon.lab import run as lab
from platon.lab.convergence import is_constant, why_not_converged
from platon.lab.finished import evaluate_run
from platon.lab.measure import Measure
from platon.lab.record import read_record
from platon.lab.run import prune
from platon.lab.settings import ResolvedSettings, resolve
from platon.lab.stop import Interrupted, StopCallback
from platon.lab.trainer import LabTrainer
from platon.lab.training import Training

TINY: dict[str, Any] = {"train_rows": 128, "eval_rows": 40, "batch": 16, "steps": 12, "eval_every": 3, "every": 2}
TINY |= {"log_every": 2, "checkpoint_every": 4, "warmup": 1.0, "cooldown": 5.0, "dense": "none", "keep": 0.2}
PENALTY = {
    "soft-movement": {"penalty": 1.0, "tau": 0.499, "score_learning_rate": 0.1, "min_keep_per_matrix": 0.01},
    "l0": {"penalty": 0.5, "score_init": -2.3},
}

learned = pytest.mark.parametrize("method", ["movement", "soft-movement", "l0"])


def tiny(**flags: Any) -> ResolvedSettings:
    settings = {**TINY, **flags}
    return resolve(flags={name: value for name, value in settings.items() if value is not None})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("dense", "hold", "platon", "magnitude")])
def test_every_method_ends_at_the_share(method: str, tmp_path: Path) -> None:
    record = prune(tiny(method=method), tmp_path / "run")
    parameters = record["parameters"]
    left = parameters["left"] - (parameters["all"] - parameters["prunable"])
    # In what is saved: not in the model that trained, and not in a mask. Each matrix, or each row, rounds its share.
    assert left == pytest.approx(0.2 * parameters["prunable"], abs={"movement": 12, "wanda": 512}.get(method, 1))
    assert record["kept"] == pytest.approx(left / parameters["prunable"], abs=1e-9)
    assert record["decided_by"] == "keep"
    assert evaluate_run(tmp_path / "run")[1] == record["results"]


@pytest.mark.parametrize("method", PENALTY)
def test_with_a_penalty_the_share_is_a_result(method: str, tmp_path: Path) -> None:
    record = prune(tiny(method=method, keep=None, **PENALTY[method]), tmp_path / "run")
    parameters = record["parameters"]
    left = parameters["left"] - (parameters["all"] - parameters["prunable"])
    assert record["decided_by"] == "penalty"
    assert 0 < left < parameters["prunable"]
    assert record["kept"] == pytest.approx(left / parameters["prunable"], abs=1e-9)


@learned
def test_stopped_and_resumed_to_the_same_bits(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = prune(tiny(method=method), tmp_path / "straight")
    step_end = StopCallback.on_step_end

    def stop(self: StopCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            self.signal = signal.SIGTERM
        step_end(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(StopCallback, "on_step_end", stop)
        with pytest.raises(Interrupted):
            prune(tiny(method=method), tmp_path / "run")
    resumed = prune(tiny(method=method), tmp_path / "run", resume=True)
    assert resumed["results"] == straight["results"]
    mine, theirs = weights(tmp_path / "run"), weights(tmp_path / "straight")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_evaluation_during_training_sees_settled_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = LabTrainer.measure
    seen: list[bool] = []

    def look(self: LabTrainer, *splits: Any) -> dict[str, dict[str, float]]:
        if splits == ({},):  # there is no test file to measure at the end
            return {}
        pruners = [c.pruner for c in self.callback_handler.callbacks if getattr(c, "pruner", None) is not None]
        seen.extend(pruner._settled for pruner in pruners)
        return measure(self, *splits)

    monkeypatch.setattr(LabTrainer, "measure", look)
    record = prune(tiny(method="l0"), tmp_path / "run")
    total = record["plan"]["total"]
    evaluations = -(-total // record["plan"]["eval_every"])
    assert len(seen) == evaluations + (record["best"]["step"] != total)  # the last model is not measured twice
    assert all(seen)


# --- N.A. -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predictions", "one"),
    [
        (np.array([[0.1, 0.9], [0.2, 0.3]]), True),
        (np.array([[0.1, 0.9], [0.4, 0.3]]), False),
        ((np.array([[0.1, 0.9], [0.4, 0.3]]), np.zeros((2, 5))), False),
        (np.array([[2.5], [2.5]]), True),
        (np.array([2.5, 2.6]), False),
        (np.array([[np.nan], [1.0]]), True),
        (np.array([[0.1, 0.9]]), False),
    ],
)
def test_one_answer(predictions: Any, one: bool) -> None:
    assert is_constant(predictions) is one


def test_the_rule_in_its_order() -> None:
    assert (
        why_not_converged("the loss was not finite at step 3", True, Measure("accuracy"), 0.1, 0.5)
        == "the loss was not finite at step 3"
    )
    assert (
        why_not_converged(None, True, Measure("accuracy"), 0.9, 0.5) == "the model gives the same answer to every row"
    )
    at_chance = "accuracy 50.00 is no better than the best constant answer, 50.00"
    assert why_not_converged(None, False, Measure("accuracy"), 0.5, 0.5) == at_chance
    assert why_not_converged(None, False, Measure("accuracy"), 0.51, 0.5) is None
    assert why_not_converged(None, False, Measure("perplexity"), 20.0, 300.0) is None
    too_high = "perplexity 1,300.00 is no better than the best constant answer, 300.00"
    assert why_not_converged(None, False, Measure("perplexity"), 1300.0, 300.0) == too_high


def poisoned(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the loss be infinite at a step, whatever the method."""
    loss = LabTrainer.compute_loss

    def changed(self: LabTrainer, *args: Any, **kwargs: Any) -> Any:
        found: Any = loss(self, *args, **kwargs)
        return found * float("inf") if self.state.global_step + 1 == at and self.model.training else found

    monkeypatch.setattr(LabTrainer, "compute_loss", changed)


@pytest.mark.parametrize("method", ["platon", "l0"])
def test_a_run_that_blows_up_is_recorded_as_such(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch, at=5)
    record = prune(tiny(method=method), tmp_path / "run")
    assert "is not finite" in record["not_converged"]
    assert record["not_converged"].endswith("at step 5")
    assert read_record(tmp_path / "run")["not_converged"] == record["not_converged"]


def test_a_dense_run_that_blows_up_is_recorded_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch, at=5)
    record = prune(tiny(method="dense", keep=None), tmp_path / "run")
    assert record["not_converged"] == "the loss was not finite at step 6"  # the line that is logged next


def test_a_run_that_learned_nothing_is_recorded_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_constant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    make_constant(monkeypatch)
    record = prune(tiny(), tmp_path / "run")
    assert record["not_converged"] == "the model gives the same answer to every row"


@pytest.fixture
def make_constant() -> Callable[[pytest.MonkeyPatch], None]:
    """Zero the head before the last measurement."""

    def make(monkeypatch: pytest.MonkeyPatch) -> None:
        finish = lab.finish

        def changed(training: Training, *others: Any) -> Any:
            training.checkpoints.extra.pop("best", None)
            with torch.no_grad():
                training.trainer.model.classifier.weight.zero_()  # type: ignore[union-attr]
            return finish(training, *others)

        monkeypatch.setattr(lab, "finish", changed)

    return make
