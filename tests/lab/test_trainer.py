"""The bridge to Trainer: a user's own Trainer prunes, logs, saves and resumes; and the order of rows in ours."""

import gc
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from platon import HardConcrete, Magnitude, Platon, weights
from platon.lab import checkpoint
from platon.lab.callback import PruningCallback
from platon.lab.errors import UserError
from platon.lab.order import RowOrder

STEPS, KEEP = 12, 0.2
Weights = dict[str, Tensor]


class Stop(TrainerCallback):
    """Ends the training at a step, as a kill would: without a word to anybody."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def build(base: Path, folder: Path, *callbacks: TrainerCallback, output: str = "out", **arguments: Any) -> Trainer:
    """A user's Trainer: a BERT with dropout, made data, batches of eight in an order that Trainer draws."""
    made = np.random.default_rng(0).integers(5, 90, (40, 6))
    rows: Any = [{"input_ids": torch.tensor(row), "labels": int(row.sum() % 2)} for row in made]
    model = AutoModelForSequenceClassification.from_pretrained(base)
    assert model.config.hidden_dropout_prob == 0.1
    plain: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "save_steps": 2, "learning_rate": 1e-2, "seed": 1}
    plain |= {"per_device_train_batch_size": 8, "output_dir": str(folder / output), "dataloader_pin_memory": False}
    plain |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    trained = TrainingArguments(**{**plain, **arguments})
    return Trainer(model, trained, train_dataset=rows, eval_dataset=rows[:8], callbacks=list(callbacks))


@pytest.fixture
def make(tiny_bert: Path, tmp_path: Path) -> Callable[..., Trainer]:
    """`build`, below the test's folder."""
    return partial(build, tiny_bert, tmp_path)


Make = Callable[..., Trainer]


def result(trainer: Trainer) -> Weights:
    assert trainer.model is not None
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def left(trainer: Trainer) -> tuple[int, int]:
    """Weights that are not zero, and all of them, in the prunable matrices."""
    assert trainer.model is not None
    matrices = weights(trainer.model).matrices.values()
    return sum(int(m.count_nonzero()) for m in matrices), sum(m.numel() for m in matrices)


def places(folder: Path) -> list[int]:
    return list(checkpoint.steps(folder))


@pytest.fixture(scope="module")
def undisturbed(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """What a training gives that nobody stops."""
    trainer = build(tiny_bert, tmp_path_factory.mktemp("undisturbed"), PruningCallback(KEEP))
    trainer.train()
    return result(trainer)


# --- pruning in a user's Trainer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({}, {}),
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}, {}),
        ({"bf16": True}, {}),
        ({}, {"score": Magnitude()}),
        ({}, {"score": Platon(window=3, timing="before"), "every": 3}),
    ],
    ids=["plain", "accumulate", "bf16", "magnitude", "before"],
)
def test_prunes_to_exactly_k_and_leaves(make: Make, arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    callback = PruningCallback(KEEP, **settings)
    trainer = make(callback, save_strategy="no", **arguments)
    trainer.train()
    kept, total = left(trainer)
    assert kept == round(KEEP * total)
    assert callback.pruner is not None
    assert callback.pruner.step_count == STEPS  # optimizer steps, however many batches each takes
    assert callback.pruner.kept() == kept / total
    assert trainer.optimizer is not None
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]  # as it was
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())  # type: ignore[union-attr]
    states = callback.pruner.state_dict()["tensors"].items()
    assert all(tensor.dtype == torch.float32 for name, tensor in states if not name.endswith(":mask"))


def test_accumulated_batches_prune_as_whole_ones(make: Make) -> None:
    """Without dropout two halves are one batch, but for rounding; so the shares per matrix agree closely."""
    shares = []
    for arguments in ({}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}):
        trainer = make(PruningCallback(KEEP), save_strategy="no", **arguments)
        for module in trainer.model.modules():  # type: ignore[union-attr]
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer.model.config.attention_probs_dropout_prob = 0.0  # type: ignore[union-attr]
        trainer.train()
        shares.append(
            [float(m.count_nonzero() / m.numel()) for m in weights(trainer.model).matrices.values()]  # type: ignore[arg-type]
        )
    assert shares[0] == pytest.approx(shares[1], abs=0.1)


def test_each_logged_line_has_the_pruners_numbers(make: Make) -> None:
    seen: list[dict[str, Any]] = []

    class Logger(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    trainer = make(PruningCallback(KEEP, warmup=2, cooldown=4, every=1), Logger())
    trainer.train()
    for lines in (seen, trainer.state.log_history):
        training = [line for line in lines if "loss" in line]
        assert len(training) == STEPS
        assert [line["keep"] for line in training[:2]] == [1.0, 1.0]
        assert [line["keep"] for line in training[-4:]] == [KEEP] * 4
        assert all(line["kept"] == pytest.approx(line["keep"], abs=3e-4) for line in training)
        assert all(a["kept"] >= b["kept"] for a, b in pairwise(training))
        assert "cut" not in training[0]  # nothing was cut yet
        assert all(line["cut"] > 0 for line in training[2:])
    assert "keep" not in trainer.state.log_history[-1]  # Trainer's summary is its own


def test_numbers_are_in_the_progress_bar(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make(PruningCallback(KEEP), disable_tqdm=False).train()
    assert "kept=0.2" in capsys.readouterr().err


def test_what_is_wrong_is_said_before_training(make: Make) -> None:
    with pytest.raises(ValueError, match=r"keep must be in \(0, 1\], got 80; write 0.8 for 80 %"):
        PruningCallback(80)
    with pytest.raises(ValueError, match=r"warmup \+ cooldown must not exceed total, got 10 \+ 4 > 12"):
        make(PruningCallback(KEEP, warmup=10)).train()


def test_units_can_be_chosen(make: Make) -> None:
    trainer = make(PruningCallback(KEEP, units=lambda model: weights(model, include="attention")))
    trainer.train()
    found = {name: int(m.count_nonzero()) for name, m in weights(trainer.model).matrices.items()}  # type: ignore[arg-type]
    inside = sum(count for name, count in found.items() if "attention" in name)
    assert inside == round(KEEP * 4 * 16 * 16)
    assert sum(found.values()) == inside + 2 * 16 * 32


def test_keeping_all_trains_as_if_it_were_not_there(make: Make) -> None:
    found = []
    for callbacks in ([], [PruningCallback(1.0)]):
        trainer = make(*callbacks, save_strategy="no")
        trainer.train()
        found.append((result(trainer), torch.get_rng_state()))
    assert same(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_hold_the_pruners_state(make: Make, tmp_path: Path) -> None:
    make(PruningCallback(KEEP)).train()
    assert places(tmp_path / "out") == [2, 4, 6, 8, 10, 12]
    for place in checkpoint.steps(tmp_path / "out").values():
        assert checkpoint.problem(place) is None
        assert {"pruner.json", "pruner.safetensors", "model.safetensors", "optimizer.pt"} <= {
            path.name for path in place.iterdir()
        }


@pytest.mark.parametrize("limit", [1, 2])
def test_limit_counts_complete_checkpoints(make: Make, tmp_path: Path, limit: int) -> None:
    seen: list[list[int]] = []

    class Look(TrainerCallback):
        """Looks where a kill would be worst: after Trainer's own files and rotation, before the marker is there."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            complete = [step for step in places(tmp_path / "out") if step < state.global_step]
            assert complete or state.global_step == 2
            assert checkpoint.last_complete(tmp_path / "out")[0] == (
                tmp_path / "out" / f"checkpoint-{complete[-1]}" if complete else None
            )
            seen.append(complete)

    trainer = make(Look(), PruningCallback(KEEP), save_total_limit=limit)
    trainer.train()
    assert seen == [list(range(2, step, 2))[-limit:] for step in range(2, STEPS + 1, 2)]
    assert places(tmp_path / "out") == list(range(2, STEPS + 1, 2))[-limit:]
    assert trainer.args.save_total_limit == limit  # as the user said


@pytest.mark.parametrize(("killed", "limit"), [(5, None), (7, 1), (11, 1)])
def test_resumes_to_the_same_bits(make: Make, undisturbed: Weights, killed: int, limit: int | None) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(PruningCallback(KEEP), Stop(killed), save_total_limit=limit).train()
    torch.manual_seed(99)  # a new process has another random state, and other weights to begin with
    again = make(PruningCallback(KEEP), seed=1, save_total_limit=limit)
    with torch.no_grad():
        for parameter in again.model.parameters():  # type: ignore[union-attr]
            parameter.add_(1)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS
    assert same(result(again), undisturbed)


def test_resumes_with_accumulation_and_a_window(make: Make) -> None:
    def callback() -> PruningCallback:
        return PruningCallback(KEEP, score=Platon(window=3), every=2)

    arguments = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "save_steps": 5}
    whole = make(callback(), output="whole", **arguments)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        make(callback(), Stop(8), **arguments).train()
    again = make(callback(), **arguments)
    again.train(resume_from_checkpoint=True)
    assert same(result(again), result(whole))


def test_resumes_from_elsewhere_when_told(make: Make, undisturbed: Weights, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(PruningCallback(KEEP), Stop(7)).train()
    place = tmp_path / "moved" / "the-sixth"
    place.parent.mkdir()
    (tmp_path / "out" / "checkpoint-6").rename(place)
    with pytest.raises(UserError, match=r"there is no .*elsewhere/checkpoint-6'; .*PruningCallback\(resume_from="):
        make(PruningCallback(KEEP), output="elsewhere").train(resume_from_checkpoint=str(place))
    again = make(PruningCallback(KEEP, resume_from=place), output="elsewhere")
    again.train(resume_from_checkpoint=str(place))
    assert same(result(again), undisturbed)


def test_unfinished_checkpoint_is_refused_and_the_last_complete_one_named(
    make: Make, undisturbed: Weights, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(PruningCallback(KEEP), Stop(7)).train()
    (tmp_path / "out" / "checkpoint-6" / checkpoint.MARKER).unlink()  # killed between Trainer's files and the marker
    with pytest.raises(UserError, match=r"checkpoint-6 was not finished; .*resume_from_checkpoint='.*checkpoint-4'"):
        make(PruningCallback(KEEP)).train(resume_from_checkpoint=True)
    again = make(PruningCallback(KEEP))
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert same(result(again), undisturbed)


def test_checkpoint_of_a_training_without_pruning_is_refused(make: Make) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(Stop(7)).train()
    with pytest.raises(UserError, match=r"checkpoint-6 was not finished; no checkpoint in .* is complete"):
        make(PruningCallback(KEEP)).train(resume_from_checkpoint=True)


def test_checkpoint_of_another_setting_or_model_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(PruningCallback(KEEP), Stop(7)).train()
    with pytest.raises(ValueError, match=r"setting 'beta1' is 0.85 in the state and 0.5 in the pruner"):
        make(PruningCallback(KEEP, score=Platon(beta1=0.5))).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"method is 'Platon' in the state and 'Magnitude' in the pruner"):
        make(PruningCallback(KEEP, score=Magnitude())).train(resume_from_checkpoint=True)
    # The pruner's state of one training with the model of another, which Trainer itself would take.
    with pytest.raises(KeyboardInterrupt):
        make(PruningCallback(KEEP), Stop(7), output="other", learning_rate=1e-3).train()
    other = tmp_path / "other" / "checkpoint-6"
    with pytest.raises(UserError, match="belongs to other weights than the model has"):
        make(PruningCallback(KEEP, resume_from=other)).train(resume_from_checkpoint=True)


def test_another_share_is_refused_on_resumption(make: Make) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(PruningCallback(KEEP), Stop(7)).train()
    again = make(PruningCallback(0.4))
    with pytest.raises(UserError, match=r"training that keeps 0.2 at its end, and this one keeps 0.4; give the same"):
        again.train(resume_from_checkpoint=True)
    assert not again.optimizer.optimizer._optimizer_step_post_hooks  # type: ignore[union-attr, attr-defined]


def test_can_train_twice(make: Make) -> None:
    """A second training starts afresh: with a new pruner, and without the first one on the optimizer."""
    callback = PruningCallback(KEEP)
    trainer = make(callback, save_total_limit=1)
    trainer.train()
    shutil.rmtree(trainer.args.output_dir)
    first = callback.pruner
    trainer.train()
    assert callback.pruner is not first
    assert callback.pruner is not None
    assert callback.pruner.step_count == STEPS
    assert left(trainer)[0] == round(KEEP * left(trainer)[1])


@pytest.mark.parametrize("limit", [None, 1])
def test_trainers_own_best_model_is_one_at_the_target_share(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """`load_best_model_at_end` would take a denser model, for it scores best; and the best checkpoint must stay."""
    worse = iter(range(100))

    def evaluate(self: Trainer, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval_loss": float(next(worse))}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    trainer = make(
        PruningCallback(KEEP, cooldown=5),
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=False,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=limit,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoint-8")  # the first of the final phase
    assert places(tmp_path / "out") == ([8, 12] if limit else [2, 4, 6, 8, 10, 12])
    assert left(trainer)[0] == round(KEEP * left(trainer)[1])


# --- random gates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [False, True], ids=["last model", "best model"])
def test_nothing_changes_the_weights_after_training(make: Make, best: bool) -> None:
    """ℓ0 trains with random gates. Freeing the callback must not write them into the finished weights."""
    callback = PruningCallback(KEEP, score=HardConcrete(), cooldown=5)
    more = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True} if best else {}
    trainer = make(callback, **more)
    trainer.train()
    finished = result(trainer)
    assert left(trainer)[0] == round(KEEP * left(trainer)[1])
    if best:
        saved = AutoModelForSequenceClassification.from_pretrained(trainer.state.best_model_checkpoint)
        assert same(finished, saved.state_dict())
    trainer.callback_handler.callbacks.clear()
    del callback
    gc.collect()
    assert same(result(trainer), finished)


def test_second_training_starts_from_the_finished_weights(make: Make) -> None:
    started: list[Weights] = []

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tensors = callback.pruner.state_dict()["tensors"]  # type: ignore[union-attr]
            started.append({name: tensors[f"{name}:full"].clone() for name in weights(kwargs["model"]).matrices})

    callback = PruningCallback(KEEP, score=HardConcrete())
    trainer = make(callback, Look(), save_strategy="no")
    trainer.train()
    finished = {name: m.detach().clone().view(-1) for name, m in weights(trainer.model).matrices.items()}  # type: ignore[arg-type]
    trainer.train()
    assert same(started[1], finished)


def test_script_ends_in_silence(tiny_bert: Path, tmp_path: Path) -> None:
    """The callback is freed when the interpreter shuts down, after torch: it must have nothing left to do then."""
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments\n"
        "import platon\n"
        "rows = [{'input_ids': torch.arange(5, 11), 'labels': n % 2} for n in range(8)]\n"
        f"model = AutoModelForSequenceClassification.from_pretrained({str(tiny_bert)!r})\n"
        "arguments = TrainingArguments(max_steps=3, use_cpu=True, save_strategy='no', report_to='none',\n"
        f"    dataloader_pin_memory=False, output_dir={str(tmp_path / 'out')!r})\n"
        "callback = platon.PruningCallback(keep=0.1, score=platon.HardConcrete())\n"
        "trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback])\n"
        "trainer.train()\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr


# --- the order of rows ------------------------------------------------------------------------------------------------


def order(epoch: int = 0, seed: int = 0, count: int = 1000, lengths: Any = None) -> list[int]:
    sampler = RowOrder(count, 8, seed, lengths)
    sampler.set_epoch(epoch)
    assert len(sampler) == count
    return list(sampler)


def made_lengths(count: int = 1000) -> list[int]:
    return np.random.default_rng(1).integers(3, 100, count).tolist()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 399, 400, 401, 1000])
def test_order_is_a_permutation_and_a_function_of_seed_and_epoch(grouped: bool, count: int) -> None:
    lengths = made_lengths(count) if grouped else None
    found = order(3, 5, count, lengths)
    assert sorted(found) == list(range(count))
    assert found == order(3, 5, count, lengths)
    if count > 8:
        assert found != order(4, 5, count, lengths)
        assert found != order(3, 6, count, lengths)


def test_order_can_be_read_twice() -> None:
    sampler = RowOrder(100, 8, 0, made_lengths(100))
    assert list(sampler) == list(sampler)


def test_like_lengths_share_a_batch() -> None:
    lengths = np.asarray(made_lengths())

    def padding(rows: list[int]) -> float:
        batches = [lengths[rows[at : at + 8]] for at in range(0, len(rows), 8)]
        return 1 - lengths.sum() / sum(int(batch.max()) * len(batch) for batch in batches)

    assert padding(order(lengths=lengths)) < 0.1 * padding(order())
    # Long and short batches come mixed: the first ten are not the ten longest.
    means = [float(lengths[order(lengths=lengths)[at : at + 8]].mean()) for at in range(0, 80, 8)]
    assert means != sorted(means, reverse=True)


def test_order_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    order(lengths=made_lengths())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]
    assert random.getstate() == before[2]
