"""Every method, every promise.

The file is also the script that a new process runs to resume: `python test_methods.py FOLDER`.
"""

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

import platon
from platon.engine.ranking import compiling

METHODS: dict[str, platon.Score] = {
    "platon": platon.Platon(window=1),
    "platon, before": platon.Platon(timing="before", window=1),
    "platon, window": platon.Platon(window=10),
    "platon, window, before": platon.Platon(window=10, timing="before", beta1=0.7, beta2=0.95),
    "platon, matrix": platon.Platon(scope="matrix", window=1),
    "magnitude": platon.Magnitude(),
    "magnitude, matrix": platon.Magnitude(scope="matrix"),
    "magnitude, row": platon.Magnitude(scope="row"),
    "wanda": platon.Wanda(),
    "wanda, global": platon.Wanda(scope="global"),
    "platon, exponent": platon.Platon(exponent=0.5, window=1),
    "sensitivity": platon.Sensitivity(window=1),
    "uncertainty": platon.Uncertainty(window=10),
    "ratio": platon.Ratio(window=1),
    "movement": platon.Movement(),
    "movement, global": platon.Movement(scope="global"),
    "soft movement": platon.SoftMovement(score_learning_rate=0.1),
    "soft movement, penalty": platon.SoftMovement(score_learning_rate=0.1, penalty=1.0, tau=0.45),
    "l0": platon.HardConcrete(score_init=0.5),
    "l0, penalty": platon.HardConcrete(penalty=1e-3, score_init=-2.3),
}
ON_GROUPS = {
    "platon on heads + neurons": platon.Platon(window=1),
    "platon, before on columns": platon.Platon(timing="before", window=5),
    "magnitude on blocks": platon.Magnitude(),
    "magnitude, matrix on columns": platon.Magnitude(scope="matrix"),
    "ratio on neurons": platon.Ratio(window=1),
    "movement on heads + neurons": platon.Movement(),
    "soft movement on heads + neurons": platon.SoftMovement(score_learning_rate=0.1),
    "l0 on heads + neurons": platon.HardConcrete(score_init=0.5),
    "l0, penalty on neurons": platon.HardConcrete(penalty=1e-3, score_init=-2.3),
}
METHODS |= ON_GROUPS
UNITS: dict[str, Callable[[nn.Module], platon.Units]] = {
    "heads + neurons": lambda model: platon.heads(model) + platon.neurons(model),
    "neurons": platon.neurons,
    "columns": platon.columns,
    "blocks": lambda model: platon.blocks(model, (8, 16)),
}
# Without a number of weights to keep, or with one in the final phase alone.
PENALISED = {
    name: score for name, score in METHODS.items() if isinstance(score, platon.SoftMovement | platon.HardConcrete)
}
# Each is dense first, goes down over several masks, and trains in the final phase; windows and checkpoints need the
# longer one.
EVERY_STEP = platon.Cubic(final=0.1, total=12, warmup=2, cooldown=3, every=1)
EVERY_FOURTH = platon.Cubic(final=0.1, total=21, warmup=3, cooldown=3, every=4)

each_method = pytest.mark.parametrize("method", METHODS)


def units_of(method: str, model: nn.Module) -> platon.Units:
    """What the method's name says it prunes."""
    return UNITS[method.partition(" on ")[2]](model) if method in ON_GROUPS else platon.weights(model)


def is_exact(score: platon.Score, schedule: platon.Constant | platon.Cubic, step: int) -> bool:
    """Whether exactly k are promised after this step."""
    if not isinstance(score, platon.SoftMovement | platon.HardConcrete):
        return True
    return score.penalty is None and (
        isinstance(schedule, platon.Constant) or step >= schedule.total - schedule.cooldown
    )


class Run:
    """A training with all that people have in theirs: dropout, clipping, decay, a learning rate that moves."""

    def __init__(self, config: BertConfig, method: str, schedule: platon.Schedule, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = BertForSequenceClassification(config).train()
        self.optimizer = AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 5))
        units = units_of(method, self.model)
        self.pruner = platon.Pruner(self.model, self.optimizer, score=METHODS[method], schedule=schedule, units=units)

    def backward(self) -> None:
        data = torch.Generator().manual_seed(self.pruner.step_count)
        tokens = torch.randint(0, self.model.config.vocab_size, (4, 8), generator=data)
        self.model(input_ids=tokens, labels=tokens[:, 0] % 2).loss.backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, until: int) -> "Run":
        while self.pruner.step_count < until:
            self.backward()
            self.update()
        return self

    def save(self, folder: Path) -> None:
        """As a checkpoint in safe formats; only the optimizer's own state goes through pickle."""
        folder.mkdir(parents=True)
        self.model.config.to_json_file(folder / "config.json")
        save_file(self.model.state_dict(), folder / "model.safetensors")
        save_state(self.pruner, folder)
        loop = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        torch.save(
            {name: part.state_dict() for name, part in loop.items()} | {"random": torch.get_rng_state()},
            folder / "loop.pt",
        )

    @classmethod
    def load(cls, folder: Path, method: str, schedule: platon.Schedule) -> "Run":
        # Another seed, so that nothing is equal by itself.
        run = cls(BertConfig.from_json_file(folder / "config.json"), method, schedule, seed=99)
        run.model.load_state_dict(load_file(folder / "model.safetensors"))
        run.pruner.load_state_dict(load_state(folder))
        loop = torch.load(folder / "loop.pt")
        run.optimizer.load_state_dict(loop["optimizer"])
        run.scheduler.load_state_dict(loop["scheduler"])
        torch.set_rng_state(loop["random"])
        return run

    def everything(self) -> dict[str, Tensor]:
        """All that a further step depends on."""
        state = self.pruner.state_dict()
        numbers = {key: value for key, value in state.items() if isinstance(value, int | float)}
        moments = {
            f"optimizer:{number}:{key}": value.clone()
            for number, own in self.optimizer.state_dict()["state"].items()
            for key, value in own.items()
        }
        return {
            **{name: value.clone() for name, value in self.model.state_dict().items()},
            **{f"pruner:{name}": value.clone() for name, value in state["tensors"].items()},
            **{f"pruner:{key}": torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()},
            **moments,
            "random": torch.get_rng_state(),
        }


def save_state(pruner: platon.Pruner, folder: Path) -> None:
    state = pruner.state_dict()
    save_file(state.pop("tensors"), folder / "pruner.safetensors")
    (folder / "pruner.json").write_text(json.dumps(state, allow_nan=False))


def load_state(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / "pruner.json").read_text()), "tensors": load_file(folder / "pruner.safetensors")}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor], where: str = "") -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other[name])]
        assert torch.equal(*bits), f"{where}{name} differs"


def assert_pruned(pruner: platon.Pruner, keep: float | None) -> None:
    """Exactly k stay (`None`: as many as the mask says), and what does not is zero."""
    masks, matrices = pruner.masks(), pruner.units.matrices
    assert list(masks) == list(matrices)
    if keep is not None and pruner.units.groups:
        assert_fits(pruner, keep)
    elif keep is not None and pruner.score.scope == "row":
        for mask in masks.values():
            assert (mask.sum(1) == round(keep * mask.shape[1])).all()
    elif keep is not None:
        scopes = [[name] for name in masks] if pruner.score.scope == "matrix" else [list(masks)]
        for names in scopes:
            count = sum(matrices[name].numel() for name in names)
            assert sum(int(masks[name].sum()) for name in names) == round(keep * count)
    with pruner.deterministic():
        for name, mask in masks.items():
            assert not matrices[name].detach()[~mask].any(), f"{name}: a pruned weight is not zero"
    assert pruner.kept() == sum(int(mask.sum()) for mask in masks.values()) / pruner.units.count


def assert_fits(pruner: platon.Pruner, keep: float) -> None:
    """As many groups as fit into k weights, or what is spared."""
    count, groups = pruner.units.count, pruner.units.groups
    kept = pruner.kept() * count
    spared = [own.spare * int(own.sizes.max()) for own in groups]
    own_pools = pruner.score.scope == "matrix"
    rooms = [int(own.sizes.sum()) for own in groups] if own_pools else [count]
    asides = spared if own_pools else [sum(spared)]
    largest = max(int(own.sizes.max()) for own in groups)
    assert keep * count - len(rooms) * (largest + 1) < kept
    assert kept <= sum(max(keep * room + 1, aside) for room, aside in zip(rooms, asides, strict=True))


SAVED_AT = (1, 7, 10, 19)  # in the warm-up; between masks and inside a window; at a fold; in the final phase
FULLY = (
    "platon",
    "platon, window",
    "movement",
    "l0",
)  # the others are saved twice, between masks and in the final phase


def saved_at(method: str) -> tuple[int, ...]:
    return SAVED_AT if method in FULLY else SAVED_AT[1::2]


class Finished:
    """A run to its end that left checkpoints in a folder with the method's name, and all that it ended with."""

    def __init__(self, config: BertConfig, folder: Path) -> None:
        self.folder, self.run = folder, Run(config, folder.name, EVERY_FOURTH)
        for step in saved_at(folder.name):
            self.run.train(step).save(folder / str(step))
        self.end = self.run.train(EVERY_FOURTH.total).everything()

    def assert_same_when_resumed(self) -> None:
        for step in saved_at(self.folder.name):
            resumed = load_file(self.folder / str(step) / "end.safetensors")
            assert_same_bits(self.end, resumed, f"{self.folder.name}, {step}: ")


Straight = Callable[[str], Finished]


@pytest.fixture(scope="module")
def straight(bert_config: BertConfig, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """The run of a method, trained when first asked for; tests leave it as it is."""
    place = tmp_path_factory.mktemp("straight")
    return cache(lambda method: Finished(bert_config, place / method))


@each_method
@pytest.mark.parametrize("schedule", [EVERY_STEP, EVERY_FOURTH], ids=["every step", "every fourth"])
def test_exactly_k_are_kept_after_every_mask_step(method: str, schedule: platon.Cubic, bert: PreTrainedModel) -> None:
    run = Run(bert.config, method, schedule)
    for step in range(1, schedule.total + 1):
        run.train(step)
        keep = schedule(step)
        if keep is not None:
            assert_pruned(run.pruner, keep if is_exact(METHODS[method], schedule, step) else None)
    assert run.pruner.keep == 0.1
    assert run.pruner.kept() < 1


@each_method
def test_pruned_weights_are_zero_in_what_is_saved(method: str, straight: Straight, tmp_path: Path) -> None:
    run = straight(method).run
    with run.pruner.deterministic():
        run.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    masks = run.pruner.masks()
    assert set(masks) < set(saved), "parameter names never change"
    zeros = sum(int((saved[name] == 0).sum()) for name in masks)
    sure = method not in ON_GROUPS and is_exact(METHODS[method], EVERY_FOURTH, EVERY_FOURTH.total)
    expected = 0.9 if sure else 1 - run.pruner.kept()
    assert zeros >= run.pruner.units.count * expected - len(masks)
    assert not any(saved[name][~mask].any() for name, mask in masks.items())


@each_method
@pytest.mark.parametrize("scale", [1.0, 0.1], ids=["keep 1", "dense warm-up"])
def test_nothing_to_prune_trains_as_without_a_pruner(method: str, scale: float, bert: PreTrainedModel) -> None:
    """Weights, data order and all three global random states, bit for bit."""
    if method in PENALISED and (scale == 1 or method.startswith("l0")):
        pytest.skip("a penalty knows no share that removes nothing, and random gates are never invisible")
    steps = 8
    schedule = platon.Cubic(final=scale, total=100, warmup=steps + 1 if scale < 1 else 2, cooldown=0, every=1)

    def train(pruned: bool) -> tuple[dict[str, Tensor], list[Tensor], tuple[Any, ...]]:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # the global state is what is looked at
        model = BertForSequenceClassification(bert.config).train()
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
        pruner = (
            platon.Pruner(model, optimizer, score=METHODS[method], schedule=schedule, units=units_of(method, model))
            if pruned
            else None
        )
        tokens = torch.randint(0, 99, (16, 8))
        data = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)
        order = []
        for _ in range(2):
            for (batch,) in data:
                order.append(batch)
                model(input_ids=batch, labels=batch[:, 0] % 2).loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert len(order) == steps
        assert pruner is None or (pruner.step_count == steps and pruner.kept() == 1)
        states = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
        return dict(model.state_dict()), order, states

    (weights, order, states), (plain_weights, plain_order, plain_states) = train(True), train(False)
    assert_same_bits(weights, plain_weights)
    assert all(map(torch.equal, order, plain_order))
    assert states == plain_states


@each_method
def test_state_round_trips_through_safetensors_and_json(method: str, bert: PreTrainedModel, tmp_path: Path) -> None:
    run = Run(bert.config, method, EVERY_FOURTH).train(13)
    save_state(run.pruner, tmp_path)
    other = Run(bert.config, method, EVERY_FOURTH, seed=1).pruner
    other.load_state_dict(load_state(tmp_path))
    mine, theirs = run.pruner.state_dict(), other.state_dict()
    assert_same_bits(mine.pop("tensors"), theirs.pop("tensors"))
    assert mine == theirs
    assert_same_bits(run.pruner.masks(), other.masks())
    assert (other.step_count, other.kept(), other.cut) == (13, run.pruner.kept(), run.pruner.cut)


def resume(folder: Path) -> None:
    """What the new process does: from each checkpoint below the folder to the end of the training."""
    for checkpoint in sorted(folder.glob("*/*/loop.pt")):
        place = checkpoint.parent
        run = Run.load(place, place.parent.name, EVERY_FOURTH).train(EVERY_FOURTH.total)
        save_file(run.everything(), place / "end.safetensors")


def in_new_process(folder: Path, *, fused: bool = False) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-W", "error::UserWarning:platon", __file__, str(folder), *["fused"] * fused]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_resumed_runs_are_bitwise_equal(straight: Straight) -> None:
    # All methods in one test, because starting a process takes longer than the runs in it.
    finished = [straight(method) for method in METHODS]
    in_new_process(finished[0].folder.parent)
    for one in finished:
        one.assert_same_when_resumed()


@each_method
@pytest.mark.parametrize("way", ["bf16 weights", "bf16 autocast"])
def test_half_precision_keeps_float32_scores_and_exact_k(method: str, way: str, bert: PreTrainedModel) -> None:
    schedule = platon.Cubic(final=0.1, total=10, warmup=2, cooldown=2, every=1)
    run = Run(bert.config, method, schedule)
    if way == "bf16 weights":
        run.model.bfloat16()
        run.optimizer = AdamW(run.model.parameters(), lr=3e-3)
        run.scheduler = LambdaLR(run.optimizer, lambda step: 1.0)
        units = units_of(method, run.model)
        run.pruner = platon.Pruner(run.model, run.optimizer, score=METHODS[method], schedule=schedule, units=units)
    for step in range(1, schedule.total + 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16 autocast"):
            run.backward()
        run.update()
        keep = schedule(step)
        if keep is not None:
            assert_pruned(run.pruner, keep if is_exact(METHODS[method], schedule, step) else None)
    tensors = run.pruner.state_dict()["tensors"]
    assert {t.dtype for name, t in tensors.items() if not name.endswith((":mask", ":full"))} <= {torch.float32}
    assert {t.dtype for name, t in tensors.items() if name.endswith(":mask")} == {torch.uint8}
    expected = torch.bfloat16 if way == "bf16 weights" else torch.float32
    assert {matrix.dtype for matrix in run.pruner.units.matrices.values()} == {expected}


@each_method
def test_same_seed_gives_the_same_masks(method: str, bert: PreTrainedModel) -> None:
    def masks(seed: int) -> list[dict[str, Tensor]]:
        run = Run(bert.config, method, EVERY_STEP, seed)
        return [run.train(step).pruner.masks() for step in (3, 10)]  # the first mask, and one of the final phase

    first, again, other = masks(0), masks(0), masks(1)
    for one, same in zip(first, again, strict=True):
        assert_same_bits(one, same)
    assert any(not torch.equal(first[-1][name], other[-1][name]) for name in other[-1])


@each_method
def test_accumulated_gradients_are_one_step(method: str, bert: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """Two halves with one optimizer step are the whole batch: t moves once, and the averages are those of the sum."""

    def train(parts: int) -> Run:
        run = Run(bert.config, method, EVERY_STEP)
        run.model.eval()  # halves draw other dropout masks than the whole
        for step in range(1, 6):
            for part in range(parts):
                half = {key: value.chunk(parts)[part] for key, value in batch.items()}
                (run.model(**half).loss / parts).backward()
            run.update()
            assert run.pruner.step_count == step
        return run

    whole, halves = train(1), train(2)
    for name, tensor in whole.pruner.state_dict()["tensors"].items():
        if name.endswith(("sensitivity", "window", "samples", "score")):
            # Adam's first steps are ±lr whatever the gradient, so rounding moves the tiny ones.
            other = halves.pruner.state_dict()["tensors"][name]
            one, two = (x.double().view(-1) for x in (tensor, other))
            assert one @ two > 0.999 * one.norm() * two.norm() or not one.any()
    same = [(mask == halves.pruner.masks()[name]).float().mean() for name, mask in whole.pruner.masks().items()]
    assert min(same) > (0.9 if method in ON_GROUPS else 0.98)  # a group is many bits


@each_method
def test_vit_is_pruned_alike(method: str, vit: PreTrainedModel, images: dict[str, Tensor]) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1, momentum=0.9)
    pruner = platon.Pruner(
        vit, optimizer, score=METHODS[method], schedule=platon.Constant(0.3), units=units_of(method, vit)
    )
    for _ in range(5):
        vit(**images).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_pruned(pruner, 0.3 if is_exact(METHODS[method], platon.Constant(0.3), 1) else None)


# Compiling takes longer than all the rest, so that most methods wait for `make check`.
COMPILED = [
    "platon",
    *(pytest.param(method, marks=pytest.mark.slow) for method in METHODS if method not in ("platon", *ON_GROUPS)),
]


@pytest.mark.parametrize("method", COMPILED)
def test_compiled_passes_keep_exactly_k(method: str, bert: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut is read from a few scores and met by all: every pass has to see the same bits in a score.

    The step size keeps the averages moving, so that each of the cuts falls elsewhere.
    """
    monkeypatch.setattr(compiling, "COMPILE_FROM", 1)
    schedule = platon.Cubic(final=0.1, total=80, cooldown=40, warmup=0, every=1)
    run = Run(bert.config, method, schedule)
    assert run.pruner._ranking.fused
    for step in range(1, schedule.total + 1):
        run.train(step)
        keep = schedule(step)
        if keep is not None:
            assert_pruned(run.pruner, keep if is_exact(METHODS[method], schedule, step) else None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["platon", "platon, window, before", "magnitude, matrix", "movement", "l0"])
def test_compiled_passes_resume_and_leave_the_random_states_alone(
    method: str, bert: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = Run(bert.config, method, EVERY_FOURTH).train(2).everything()
    monkeypatch.setattr(compiling, "COMPILE_FROM", 1)
    states = random.getstate(), str(np.random.get_state())
    run = Run(bert.config, method, EVERY_FOURTH)
    assert run.pruner._ranking.fused
    # The warm-up is dense, so that eager and compiled passes leave the same weights, and the same random state.
    # Hard concrete has gates from its first step on, and a compiled logarithm rounds in its own way.
    fused_start = run.train(2).everything()
    same = [name for name in start if not name.startswith("pruner:")] if method != "l0" else ["random"]
    assert_same_bits({name: start[name] for name in same}, {name: fused_start[name] for name in same})
    finished = Finished(bert.config, tmp_path / method)
    assert states == (random.getstate(), str(np.random.get_state()))
    in_new_process(tmp_path, fused=True)
    finished.assert_same_when_resumed()


if __name__ == "__main__":
    gc.freeze()  # what was imported
    if sys.argv[2:] == ["fused"]:
        compiling.COMPILE_FROM = 1
    resume(Path(sys.argv[1]))
