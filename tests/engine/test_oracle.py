"""The pruner against the oracle: the same training, told once in fused float32 and once in a plain float64 loop."""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import platon
from platon.engine.smoothed import Smoothed


def _load(name: str) -> ModuleType:
    # Test files are not importable by name, so that two folders may hold files of the same one.
    spec = importlib.util.spec_from_file_location(f"platon_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


oracle = _load("oracle")

CLOSE = 1e-5  # what float32 may differ by: in the averages, and in the distance of a score from the cut
PHASES = {"final": 0.2, "total": 48, "warmup": 7, "cooldown": 13}


# --- trainings --------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A model with its batches: `loss(t)` is a new mini-batch at every step, the same one for the same seed."""

    model: nn.Module
    units: platon.Units
    loss: Callable[[int], Tensor]


def train_mlp(widths: tuple[int, ...] = (6, 20, 11, 3), batch: int = 8) -> Training:
    torch.manual_seed(0)
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    names = [name for name, p in model.named_parameters() if p.dim() == 2][:-1]

    def loss(t: int) -> Tensor:
        source = torch.Generator().manual_seed(t)
        inputs = torch.randn(batch, widths[0], generator=source)
        return nn.functional.mse_loss(model(inputs), torch.randn(batch, widths[-1], generator=source))

    return Training(model, platon.Units({name: model.get_parameter(name) for name in names}), loss)


def train_bert() -> Training:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)  # at its own scale so small a model has gradients that hardly differ between batches

    def loss(t: int) -> Tensor:
        source = torch.Generator().manual_seed(t)
        tokens = torch.randint(0, 50, (4, 8), generator=source)
        labels = torch.randint(0, 2, (4,), generator=source)
        return model(input_ids=tokens, labels=labels).loss

    return Training(model, platon.weights(model), loss)


def make_sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def make_adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


RULES: dict[type[platon.Score], Callable[[float, float], float]] = {
    platon.Platon: lambda i, u: i * u,
    platon.Sensitivity: lambda i, u: i,
    platon.Uncertainty: lambda i, u: u,
    platon.Ratio: oracle.ratio,
}


class Witness:
    """What the oracle is told. Its hooks are registered first, so its last look comes before the pruner masks."""

    def __init__(self, optimizer: torch.optim.Optimizer, units: platon.Units) -> None:
        self.units = units
        self.before: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor | None] = {}
        self.after: dict[str, Tensor] = {}
        optimizer.register_step_pre_hook(self._look_before)
        optimizer.register_step_post_hook(self._look_after)

    def _look_before(self, *_: object) -> None:
        self.before = self._weights()
        self.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in self.units.matrices.items()}

    def _look_after(self, *_: object) -> None:
        self.after = self._weights()

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.units.matrices.items()}


def plain(tensors: dict[str, Tensor | None]) -> dict[str, list[float] | None]:
    return {name: None if t is None else t.double().flatten().tolist() for name, t in tensors.items()}


@dataclass
class Step:
    """One optimizer step, as the pruner made it and as the oracle tells it."""

    t: int
    pruner: platon.Pruner
    seen: Witness
    scores: dict[str, list[float]]


def run(
    training: Training,
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    score: platon.Score,
    schedule: platon.Schedule,
    steps: int,
    *,
    clip: float | None = None,
    absent: Callable[[int, str], bool] = lambda t, name: False,
    rule: Callable[[float, float], float] | None = None,
) -> Iterator[Step]:
    """Train under the pruner, and let the oracle follow."""
    optimizer = make_optimizer(training.model.parameters())
    seen = Witness(optimizer, training.units)
    pruner = platon.Pruner(training.model, optimizer, score=score, schedule=schedule, units=training.units)
    if isinstance(score, Smoothed):
        told = oracle.Platon(score.beta1, score.beta2, score.window, score.timing, rule or RULES[type(score)])
    else:
        told = oracle.Magnitude()
    for t in range(1, steps + 1):
        optimizer.zero_grad()
        training.loss(t).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(training.model.parameters(), clip)
        for name, parameter in training.units.matrices.items():
            if absent(t, name):
                parameter.grad = None
        optimizer.step()
        scores = told.step(t, plain(seen.before), plain(seen.gradients), plain(seen.after))
        step = Step(t, pruner, seen, scores)
        if isinstance(score, Smoothed):
            compare_averages(step, told)
        yield step


def compare_averages(step: Step, told: object) -> None:
    tensors = step.pruner.state_dict()["tensors"]
    for name, own in told.averages.items():  # type: ignore[attr-defined]
        pairs = {"sensitivity": own.sensitivity, "uncertainty": own.uncertainty}
        if own.samples:
            pairs["window"] = [mean * own.samples for mean in own.window]
            assert tensors[f"{name}:samples"] == own.samples
        for part, expected in pairs.items():
            found = tensors[f"{name}:{part}"]
            assert found.dtype == torch.float32
            np.testing.assert_allclose(found.double().numpy(), expected, rtol=CLOSE, err_msg=f"{name} {part} {step.t}")


def compare_mask(step: Step, keep: float, scope: str = "global") -> int:
    """Check masks and weights after a mask step; gives how many weights lay too close to the cut to tell."""
    told = oracle.select(step.scores, keep, scope)
    close = 0
    for name, mask in step.pruner.masks().items():
        score, cut = np.array(step.scores[name]), told.cut[name]
        # A score of exactly 0 is 0 in any precision, so there ties must be broken alike.
        unsure = (np.abs(score - cut) <= CLOSE * cut) & (score != 0)
        close += int(unsure.sum())
        agree = mask.flatten().numpy() == np.array(told.kept[name])
        assert (agree | unsure).all(), f"{name} at step {step.t}"
        weight = step.pruner.units.matrices[name].detach()
        assert torch.equal(weight, torch.where(mask, step.seen.after[name], 0)), f"{name} at step {step.t}"
    found = [int(mask.sum()) for mask in step.pruner.masks().values()]
    sizes = [mask.numel() for mask in step.pruner.masks().values()]
    if scope == "global":
        assert sum(found) == oracle.how_many(keep, sum(sizes))
    else:
        assert found == [oracle.how_many(keep, size) for size in sizes]
    assert step.pruner.kept() == sum(found) / sum(sizes)
    return close


def compare_run(
    steps: Iterator[Step], every: int = 1, scope: str = "global", phases: dict | None = None, few: float = 0.01
) -> None:
    phases = PHASES if phases is None else phases
    masks: dict[str, Tensor] = {}
    close = compared = 0
    for step in steps:
        keep = oracle.cubic(step.t, initial=1.0, **phases)
        if oracle.is_mask_step(step.t, total=phases["total"], cooldown=phases["cooldown"], every=every):
            close += compare_mask(step, keep, scope)
            compared += sum(mask.numel() for mask in step.pruner.masks().values())
        else:
            for name, weight in step.pruner.units.matrices.items():
                assert torch.equal(weight.detach(), step.seen.after[name]), f"{name} at step {step.t}"
                if masks:
                    assert torch.equal(step.pruner.masks()[name], masks[name])
        masks = step.pruner.masks()
        assert step.pruner.step_count == step.t
    assert compared
    # The cut is itself a score, so one weight a mask step is always close; more than a few would prove nothing.
    assert close <= few * compared


# --- the method -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_optimizer", [make_sgd, make_adamw])
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("window", [1, 3, 10])
@pytest.mark.parametrize("timing", ["after", "before"])
def test_platon_on_an_mlp(timing: str, window: int, every: int, make_optimizer: Callable) -> None:
    score = platon.Platon(beta1=0.85, beta2=0.7, window=window, timing=timing)
    steps = run(train_mlp(), make_optimizer, score, platon.Cubic(**PHASES, every=every), PHASES["total"] + 2)
    compare_run(steps, every)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("timing", ["after", "before"])
@pytest.mark.parametrize("method", [platon.Sensitivity, platon.Uncertainty, platon.Ratio])
def test_ablations(method: type[Smoothed], timing: str, window: int) -> None:
    score = method(beta1=0.85, beta2=0.7, window=window, timing=timing)
    # From step 3 on: after one step Ī / Ū is the same number for every weight, but for rounding.
    phases = {**PHASES, "warmup": max(PHASES["warmup"], 2 * window + 2)}
    steps = run(train_mlp(), make_sgd, score, platon.Cubic(**phases, every=1), phases["total"] + 2)
    # Weights that went together and stay at zero have one and the same ratio of two averages that both fade.
    compare_run(steps, phases=phases, few=0.1 if method is platon.Ratio else 0.01)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
def test_the_exponent_of_uncertainty(exponent: float) -> None:
    score = platon.Platon(beta2=0.7, exponent=exponent, window=1)
    steps = run(
        train_mlp(),
        make_sgd,
        score,
        platon.Cubic(**PHASES, every=1),
        PHASES["total"],
        rule=lambda i, u: i * u**exponent,
    )
    compare_run(steps)


@pytest.mark.parametrize("window", [1, 10])
@pytest.mark.parametrize("timing", ["after", "before"])
def test_platon_on_a_transformer(timing: str, window: int) -> None:
    every = window
    score = platon.Platon(window=window, timing=timing)
    schedule = platon.Cubic(**PHASES, every=every)
    compare_run(run(train_bert(), make_adamw, score, schedule, PHASES["total"], clip=1.0), every)


@pytest.mark.parametrize("timing", ["after", "before"])
def test_platon_where_selection_samples_and_brackets(timing: str) -> None:
    # Above 2¹⁶ weights the counts around the cut ride on the update, from pivots that a sample gave.
    training = train_mlp((60, 300, 200, 5), batch=16)
    assert training.units.count > 1 << 16
    phases = {"final": 0.1, "total": 8, "warmup": 2, "cooldown": 2}
    steps = run(training, make_sgd, platon.Platon(timing=timing, window=1), platon.Cubic(**phases, every=1), 8)
    compare_run(steps, phases=phases)


@pytest.mark.parametrize("window", [1, 3])
def test_a_step_without_a_gradient(window: int) -> None:
    """The averages of a matrix stay in steps that give it no gradient; others go on."""
    score = platon.Platon(window=window)
    training = train_mlp()
    first = next(iter(training.units.matrices))
    absent = lambda t, name: name == first and (t % 5 == 0 or 20 <= t < 27)  # noqa: E731
    compare_run(run(training, make_sgd, score, platon.Cubic(**PHASES, every=1), PHASES["total"], absent=absent))


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("make_optimizer", [make_sgd, make_adamw])
def test_magnitude(make_optimizer: Callable, every: int) -> None:
    schedule = platon.Cubic(**PHASES, every=every)
    compare_run(run(train_mlp(), make_optimizer, platon.Magnitude(), schedule, PHASES["total"]), every)


@pytest.mark.parametrize("score", [platon.Platon(scope="matrix", window=1), platon.Magnitude(scope="matrix")])
def test_scope_matrix_keeps_the_share_of_each_matrix(score: platon.Score) -> None:
    compare_run(run(train_mlp(), make_sgd, score, platon.Cubic(**PHASES, every=1), PHASES["total"]), scope="matrix")


@pytest.mark.parametrize("scope", ["global", "matrix"])
def test_at_least_one_weight_stays(scope: str) -> None:
    for step in run(train_mlp(), make_sgd, platon.Platon(scope=scope, window=1), platon.Constant(1e-6), 5):
        compare_mask(step, 1e-6, scope)
        assert sum(int(mask.sum()) for mask in step.pruner.masks().values()) == (1 if scope == "global" else 2)


def test_initial_below_one_prunes_from_the_start() -> None:
    phases = {"final": 0.3, "total": 12, "warmup": 4, "cooldown": 4}
    for step in run(train_mlp(), make_sgd, platon.Platon(window=1), platon.Cubic(**phases, every=1, initial=0.8), 12):
        compare_mask(step, oracle.cubic(step.t, initial=0.8, **phases))


def test_sensitivity_is_the_first_order_change_of_the_loss() -> None:
    """What the loss would change by if a weight went; the smaller the weight, the closer."""
    training = train_mlp()
    name, weight = next(iter(training.units.matrices.items()))
    index = (3, 2)
    for size in (1e-2, 1e-3):
        training.model.double()
        with torch.no_grad():
            weight[index] = size
        optimizer = torch.optim.SGD(training.model.parameters(), lr=0.0)
        pruner = platon.Pruner(
            training.model,
            optimizer,
            score=platon.Platon(beta1=0.0, timing="before", window=1),
            schedule=platon.Constant(1.0),
            units=training.units,
        )
        loss = _double_loss(training.model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.detach()
        found = pruner.state_dict()["tensors"][f"{name}:sensitivity"].view(weight.shape)[index].item()
        with torch.no_grad():
            weight[index] = 0.0
            change = abs(float(loss - _double_loss(training.model)))
        assert found == pytest.approx(change, rel=2 * size)


def _double_loss(model: nn.Module) -> Tensor:
    source = torch.Generator().manual_seed(5)
    inputs = torch.randn(64, 6, generator=source, dtype=torch.float64)
    return nn.functional.mse_loss(model(inputs), torch.randn(64, 3, generator=source, dtype=torch.float64))


# --- by hand ----------------------------------------------------------------------------------------------------------

# Three weights a, b, c; SGD with learning rate 1/2; β1 = β2 = 1/2; two of three stay; sensitivity "after" the step.
# Each row of each step is worked out on paper, and the same numbers stand in docs/paper.md.
HAND_START = (4, 2, 2)
HAND = [
    # gradient      w - g/2        I             Ī             Ū               S                kept      w
    [(-8, 8, 8), (8, -2, -2), (64, 16, 16), (32, 8, 8), (16, 4, 4), (512, 32, 32), "ab", (8, -2, 0)],
    [(4, -8, -4), (6, 2, 2), (24, 16, 8), (28, 12, 8), (10, 4, 2), (280, 48, 16), "ab", (6, 2, 0)],
    [(-4, 8, -8), (8, -2, 4), (32, 16, 32), (30, 14, 20), (6, 3, 7), (180, 42, 140), "ac", (8, 0, 4)],
    [(-2, 2, 4), (9, -1, 2), (18, 2, 8), (24, 8, 14), (6, 4.5, 6.5), (144, 36, 91), "ac", (9, 0, 2)],
    [(-2, -8, 8), (10, 4, -2), (20, 32, 16), (22, 20, 15), (4, 8.25, 3.75), (88, 165, 56.25), "ab", (10, 4, 0)],
]


class Three(nn.Module):
    """Three weights in one matrix."""

    def __init__(self, values: tuple[float, ...] = HAND_START) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([values], dtype=torch.float32))


def three(
    timing: str = "after", schedule: platon.Schedule | None = None
) -> tuple[Three, torch.optim.SGD, platon.Pruner]:
    model = Three()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pruner = platon.Pruner(
        model,
        optimizer,
        score=platon.Platon(beta1=0.5, beta2=0.5, timing=timing, window=1),
        schedule=platon.Constant(2 / 3),
        units=platon.Units({"weight": model.weight}),
    )
    return model, optimizer, pruner


def test_hand_example() -> None:
    model, optimizer, pruner = three()
    seen = Witness(optimizer, pruner.units)
    told = oracle.Platon(0.5, 0.5)
    start: tuple[float, ...] = HAND_START
    for t, (gradient, moved, _, sensitivity, uncertainty, score, kept, end) in enumerate(HAND, 1):
        model.weight.grad = torch.tensor([gradient], dtype=torch.float32)
        optimizer.step()
        tensors = pruner.state_dict()["tensors"]
        # Every number is a small multiple of a power of two: float32 must hold it exactly.
        assert tensors["weight:sensitivity"].tolist() == list(sensitivity)
        assert tensors["weight:uncertainty"].tolist() == list(uncertainty)
        assert pruner.masks()["weight"].tolist() == [[name in kept for name in "abc"]]
        assert model.weight.tolist() == [list(end)]
        averages = {name.split(":")[1]: tensor for name, tensor in tensors.items()}
        value = pruner.score.value(averages, model.weight)  # √Ī √Ū
        np.testing.assert_allclose(value.square().tolist(), score, rtol=1e-6)
        scores = told.step(t, {"weight": start}, {"weight": gradient}, {"weight": moved})
        assert scores["weight"] == list(score)
        selection = oracle.select(scores, 2 / 3)
        assert selection.kept["weight"] == [name in kept for name in "abc"]
        assert oracle.apply({"weight": moved}, selection)["weight"] == list(end)
        start = end
    assert seen.before["weight"].tolist() == [list(HAND[-2][-1])]


def test_hand_example_ties_go_to_the_first() -> None:
    score, kept = HAND[0][5], HAND[0][6]
    assert score[1] == score[2]
    assert kept == "ab"


def test_hand_example_before_never_brings_c_back() -> None:
    model, optimizer, pruner = three("before")
    for gradient, *_ in HAND:
        model.weight.grad = torch.tensor([gradient], dtype=torch.float32)
        optimizer.step()
        assert pruner.masks()["weight"].tolist() == [[True, True, False]]


# --- coming back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timing", "expected"), [("before", 0.0), ("after", 0.15 * 0.5 * 3 * 3)])
def test_sensitivity_of_a_weight_at_zero(timing: str, expected: float) -> None:
    model = Three((0.0, 1.0, 2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    units = platon.Units({"weight": model.weight})
    score = platon.Platon(timing=timing, window=1)
    pruner = platon.Pruner(model, optimizer, score=score, schedule=platon.Constant(1.0), units=units)
    model.weight.grad = torch.full((1, 3), -3.0)
    optimizer.step()
    assert pruner.state_dict()["tensors"]["weight:sensitivity"][0].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make_optimizer", [make_sgd, make_adamw])
def test_a_weight_that_comes_back_starts_from_zero(make_optimizer: Callable) -> None:
    """Its value is what the optimizer made of 0 in this one step, and nothing that it was before."""
    returned = 0
    masks: dict[str, Tensor] = {}
    for step in run(train_mlp(), make_optimizer, platon.Platon(beta1=0.3, window=1), platon.Constant(0.5), 60):
        for name, mask in step.pruner.masks().items():
            if name in masks:
                back = mask & ~masks[name]
                returned += int(back.sum())
                assert not step.seen.before[name][back].any()
                weight = step.pruner.units.matrices[name].detach()[back]
                assert torch.equal(weight, step.seen.after[name][back])
                if make_optimizer is make_sgd:
                    continue
                assert (weight.abs() < 0.1).all()  # a few learning rates at most, where the others are of order 1
        masks = step.pruner.masks()
    assert returned > 0


def count_returns(timing: str) -> int:
    """Returns of pruned weights on the problem "noisy linear teacher".

    A student matrix of 8 x 16 learns by SGD (learning rate 0.1, squared error, fresh batches of 32) from a random
    linear teacher whose answers carry noise of deviation 2; half of the weights stays; 300 steps, each with a mask.
    """
    source = torch.Generator().manual_seed(7)
    student = nn.Linear(16, 8, bias=False)
    teacher = 0.3 * torch.randn(8, 16, generator=source)
    with torch.no_grad():
        student.weight.copy_(0.25 * torch.randn(8, 16, generator=source))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    pruner = platon.Pruner(
        student,
        optimizer,
        score=platon.Platon(timing=timing, window=1),
        schedule=platon.Cubic(final=0.5, total=300, warmup=20, cooldown=100, every=1),
        units=platon.Units({"weight": student.weight}),
    )
    returns = 0
    for _ in range(300):
        inputs = torch.randn(32, 16, generator=source)
        answers = inputs @ teacher.T + 2 * torch.randn(32, 8, generator=source)
        optimizer.zero_grad()
        (student(inputs) - answers).square().sum(1).mean().backward()
        before = pruner.masks()["weight"]
        optimizer.step()
        returns += int((pruner.masks()["weight"] & ~before).sum())
    return returns


def test_before_hardly_ever_reactivates_under_sgd() -> None:
    after, before = count_returns("after"), count_returns("before")
    assert after >= 100
    assert before <= 0.02 * after
