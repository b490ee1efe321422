"""Learned scores against autograd: the same network with the gate in its forward pass, and torch's own AdamW.

Nothing here is taken from the engine. The oracle keeps w and S as parameters, multiplies w by z(S) in the forward pass,
adds the penalty to the loss, and lets autograd do the rest; the ranking of scores is `sorted`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import platon
from platon.engine.learned import Learned
from platon.engine.ranking import noise as noises

BATCHES = 40
SIZES = ((6, 10), (10, 6))  # in a tanh network: two matrices of unlike shape


def batch(step: int) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(1000 + step)
    return torch.randn(16, 6, generator=data, dtype=torch.float64), torch.randn(16, 6, generator=data).double()


def start() -> list[Tensor]:
    data = torch.Generator().manual_seed(7)
    return [torch.randn(out, into, generator=data) / into**0.5 for into, out in SIZES]


class Network(nn.Module):
    """What the pruner gets: an ordinary module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(into, out, bias=False) for into, out in SIZES)
        with torch.no_grad():
            for layer, weight in zip((self.first, self.second), start(), strict=True):
                layer.weight.copy_(weight)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def units(model: Network) -> platon.Units:
    return platon.Units({"first.weight": model.first.weight, "second.weight": model.second.weight})


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.05),
}


def warm(step: int) -> float:
    """A learning rate that rises and falls, for both optimizers."""
    return min(1.0, (step + 1) / 5) * (1 - step / (2 * BATCHES))


class StraightThrough(torch.autograd.Function):
    """A mask forwards; backwards, what arrives goes on to the score."""

    @staticmethod
    def forward(context, score, mask):  # type: ignore[no-untyped-def]
        return mask

    @staticmethod
    def backward(context, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


@dataclass
class Oracle:
    """w and S trained together by autograd."""

    gate: Callable[[Tensor, int, int], Tensor]  # S, which matrix, step -> z
    penalty: Callable[[list[Tensor], int], Tensor]  # all S, step -> what is added to the loss
    optimizer: str
    score_rate: float
    score_init: float

    def run(self, steps: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """W and S of the two matrices after each step."""
        weights = [w.double().requires_grad_() for w in start()]
        scores = [torch.full_like(w, self.score_init).requires_grad_() for w in weights]
        own, other = OPTIMIZERS[self.optimizer](weights), AdamW(scores, lr=self.score_rate, weight_decay=0.0)
        schedules = [LambdaLR(own, warm), LambdaLR(other, warm)]
        seen: tuple[list[list[Tensor]], list[list[Tensor]]] = ([], [])
        for step in range(1, steps + 1):
            x, y = batch(step)
            first, second = (
                w * self.gate(s, index, step) for index, (w, s) in enumerate(zip(weights, scores, strict=True))
            )
            loss = F.mse_loss(F.linear(torch.tanh(F.linear(x, first)), second), y) + self.penalty(scores, step)
            loss.backward()
            for part in (own, other, *schedules):
                part.step()
            own.zero_grad()
            other.zero_grad()
            for history, now in zip(seen, (weights, scores), strict=True):
                history.append([tensor.detach().clone() for tensor in now])
        return seen


def nothing(scores: list[Tensor], step: int) -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def mean_of_means(values: list[Tensor]) -> Tensor:
    return torch.stack([value.mean() for value in values]).mean()


def compare(oracle: Oracle, score: Learned, schedule: platon.Cubic, steps: int) -> platon.Pruner:
    """Train with the pruner, and hold every step against the oracle's."""
    weights, scores = oracle.run(steps)
    model = Network()
    optimizer = OPTIMIZERS[oracle.optimizer](list(model.parameters()))
    scheduler = LambdaLR(optimizer, warm)
    pruner = platon.Pruner(model, optimizer, score=score, schedule=schedule, units=units(model))
    for step in range(1, steps + 1):
        x, y = batch(step)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state = pruner.state_dict()["tensors"]
        for index, name in enumerate(("first.weight", "second.weight")):
            expected = weights[step - 1][index]
            close = {"rtol": 2e-5, "atol": 2e-6}  # scores and gates are float32
            torch.testing.assert_close(state[f"{name}:full"].view_as(expected), expected, **close)
            torch.testing.assert_close(
                state[f"{name}:score"].double().view_as(expected), scores[step - 1][index], **close
            )
    return pruner


def top(scores: Tensor, share: float) -> Tensor:
    """The mask of the highest `share`; of equal scores the first."""
    flat = scores.detach().flatten().tolist()
    ranking = sorted(range(len(flat)), key=lambda place: (-flat[place], place))
    mask = torch.zeros(len(flat), dtype=scores.dtype)
    mask[ranking[: max(1, round(share * len(flat)))]] = 1
    return mask.view_as(scores)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_movement_is_autograd_straight_through(optimizer: str, every: int) -> None:
    schedule = platon.Cubic(final=0.3, total=BATCHES, warmup=4, cooldown=8, every=every)
    masks: dict[int, Tensor] = {}

    def gate(score: Tensor, index: int, step: int) -> Tensor:
        # The mask of step t-1 is in force during step t, and stays until the next one falls.
        share = schedule(step - 1) if step > 1 else None
        if step == 1:
            masks[index] = torch.ones_like(score)
        if share is not None:
            masks[index] = top(score, share)
        return StraightThrough.apply(score, masks[index])

    oracle = Oracle(gate, nothing, optimizer, score_rate=0.02, score_init=0.0)
    pruner = compare(oracle, platon.Movement(score_learning_rate=0.02), schedule, BATCHES)
    assert pruner.kept() == pytest.approx(0.3, abs=0.01)
    for name, mask in pruner.masks().items():
        assert int(mask.sum()) == 18  # 0.3 of 60, in each matrix
        assert not pruner.units.matrices[name].detach()[~mask].any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_soft_movement_is_autograd_straight_through(optimizer: str) -> None:
    schedule = platon.Cubic(final=0.5, total=BATCHES, warmup=4, cooldown=8, every=1)
    penalty, tau = 3.0, 0.45

    def gate(score: Tensor, index: int, step: int) -> Tensor:
        above = score.sigmoid() > tau * schedule.progress(step - 1)
        return StraightThrough.apply(score, above.to(score.dtype))

    def push(scores: list[Tensor], step: int) -> Tensor:
        return penalty * schedule.progress(step) * mean_of_means([score.sigmoid() for score in scores])

    oracle = Oracle(gate, push, optimizer, score_rate=0.02, score_init=0.0)
    score = platon.SoftMovement(score_learning_rate=0.02, penalty=penalty, tau=tau, min_keep_per_matrix=0.0)
    pruner = compare(oracle, score, schedule, BATCHES)
    assert 0 < pruner.kept() < 1, "the case must prune something, but not everything"


def uniform(index: int, step: int, seed: int) -> Tensor:
    """The draw of a matrix at a step, as documented: by position among all prunable weights."""
    noise = torch.empty(60)
    noises.draw(noise, seed, step, start=60 * index)
    return torch.sigmoid(noise.double()).view(SIZES[index][1], SIZES[index][0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hard_concrete_is_autograd_through_the_closed_form(optimizer: str) -> None:
    penalty, seed = 2.0, 5

    def gate(score: Tensor, index: int, step: int) -> Tensor:
        u = uniform(index, step, seed)
        s = torch.sigmoid((torch.log(u) - torch.log(1 - u) + score) / (2 / 3))
        return torch.clamp(s * 1.2 - 0.1, 0, 1)

    def push(scores: list[Tensor], step: int) -> Tensor:
        return penalty * mean_of_means([torch.sigmoid(score - 2 / 3 * math.log(0.1 / 1.1)) for score in scores])

    oracle = Oracle(gate, push, optimizer, score_rate=0.05, score_init=0.5)
    score = platon.HardConcrete(score_learning_rate=0.05, score_init=0.5, penalty=penalty, seed=seed)
    pruner = compare(oracle, score, platon.Cubic(final=0.5, total=BATCHES, warmup=4, cooldown=8, every=1), BATCHES)
    state = pruner.state_dict()["tensors"]
    with pruner.deterministic():
        for name, weight in pruner.units.matrices.items():
            settled = torch.clamp(torch.sigmoid(state[f"{name}:score"].double()) * 1.2 - 0.1, 0, 1).view_as(weight)
            expected = settled * state[f"{name}:full"].view_as(weight)
            torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-7)
            assert torch.equal(pruner.masks()[name], settled > 0)


@given(score=st.floats(-8, 8), u=st.floats(1e-4, 1 - 1e-4), signal=st.floats(-3, 3), penalty=st.floats(0, 5))
def test_hard_concrete_gradient_is_autograds(score: float, u: float, signal: float, penalty: float) -> None:
    s = torch.tensor([score], dtype=torch.float64, requires_grad=True)
    z = torch.clamp(torch.sigmoid((math.log(u) - math.log1p(-u) + s) / (2 / 3)) * 1.2 - 0.1, 0, 1)
    loss = signal * z + penalty * torch.sigmoid(s - 2 / 3 * math.log(0.1 / 1.1))
    loss.sum().backward()
    method = platon.HardConcrete()
    state = {
        "score": s.detach(),
        "noise": torch.tensor([math.log(u) - math.log1p(-u)], dtype=torch.float64),
        "penalty": torch.tensor(penalty, dtype=torch.float64),
        "least": torch.tensor(0.0, dtype=torch.float64),
    }
    torch.testing.assert_close(method.gate(state, settled=False), z.detach())
    found = method.gradient(state, torch.tensor([signal], dtype=torch.float64))
    assert s.grad is not None
    torch.testing.assert_close(found, s.grad, rtol=1e-9, atol=1e-12)


# --- the draws --------------------------------------------------------------------------------------------------------


def drawn(count: int, seed: int = 0, step: int = 1, start: int = 0) -> Tensor:
    noise = torch.empty(count)
    noises.draw(noise, seed, step, start)
    return noise


def test_draws_are_logistic_and_independent() -> None:
    noise = drawn(200_000)
    assert stats.kstest(noise.numpy(), "logistic").pvalue > 1e-3
    for other in (drawn(200_000, step=2), drawn(200_000, seed=1), drawn(200_001)[1:]):
        correlation = np.corrcoef(torch.sigmoid(noise).numpy(), torch.sigmoid(other).numpy())[0, 1]
        assert abs(correlation) < 5 / 200_000**0.5


@given(start=st.integers(0, 1 << 40), count=st.integers(1, 300), cut=st.integers(0, 300), step=st.integers(1, 10**6))
def test_draws_follow_position_not_tensor(start: int, count: int, cut: int, step: int) -> None:
    cut = min(cut, count)
    if (start >> 32) != ((start + count) >> 32):
        return
    whole = drawn(count, 3, step, start)
    assert torch.equal(torch.cat([drawn(cut, 3, step, start), drawn(count - cut, 3, step, start + cut)]), whole)
    assert bool(whole.isfinite().all())


# --- the share where sparsity is a result -----------------------------------------------------------------------------


def trained(
    score: platon.Score, keep: float, steps: int = 300, each: Callable[[platon.Pruner], None] = lambda pruner: None
) -> tuple[platon.Pruner, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = AdamW(model.parameters(), lr=3e-3)
    schedule = platon.Cubic(final=keep, total=300, warmup=20, cooldown=60, every=1)
    pruner = platon.Pruner(
        model, optimizer, score=score, schedule=schedule, units=platon.Units({"0.weight": model[0].weight})
    )
    data = torch.Generator().manual_seed(1)
    x = torch.randn(256, 20, generator=data)
    y = x[:, :3].argmax(1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        each(pruner)
    return pruner, model


@pytest.mark.parametrize("keep", [0.5, 0.1])
@pytest.mark.parametrize("method", [platon.SoftMovement, platon.HardConcrete])
def test_a_share_is_met_exactly(method: type[Learned], keep: float) -> None:
    pruner, model = trained(method(score_learning_rate=0.1), keep)
    assert pruner.kept() == keep
    with pruner.deterministic():
        assert int(model[0].weight.count_nonzero()) == round(keep * 800)


@pytest.mark.parametrize("method", [platon.SoftMovement, platon.HardConcrete])
def test_steering_brings_the_share_near_before_the_final_phase(method: type[Learned]) -> None:
    shares: list[float] = []
    trained(method(score_learning_rate=0.1), 0.2, steps=239, each=lambda pruner: shares.append(pruner.kept()))
    assert shares[19] == 1, "nothing goes before the descent"
    assert shares[-1] == pytest.approx(0.2, abs=0.1)


@pytest.mark.parametrize("method", [platon.SoftMovement, platon.HardConcrete])
def test_steering_is_patient_with_scores_that_have_a_long_way_to_go(method: type[Learned]) -> None:
    """They fall below the opening late in the descent; a penalty that had grown all the while would take them all."""
    seen: list[tuple[float, float | None]] = []
    trained(method(score_learning_rate=0.02), 0.2, steps=239, each=lambda p: seen.append((p.kept(), p.penalty)))
    assert seen[119][0] > 0.95, "halfway nearly every score is still above it"
    assert max(penalty for _, penalty in seen if penalty is not None) < 100
    assert seen[-1][0] > 0.15


@pytest.mark.parametrize("method", [platon.SoftMovement, platon.HardConcrete])
def test_a_larger_penalty_keeps_less(method: type[Learned]) -> None:
    shares = [trained(method(score_learning_rate=0.1, penalty=p), 0.5)[0].kept() for p in (0.0, 1.0, 30.0)]
    assert shares[0] > shares[1] > shares[2]


def test_a_matrix_keeps_its_least_share() -> None:
    pruner, _ = trained(platon.SoftMovement(score_learning_rate=0.5, penalty=1e4, min_keep_per_matrix=0.4), 0.5)
    assert pruner.kept() == 0.4


def test_gates_of_training_and_of_evaluation() -> None:
    pruner, model = trained(platon.HardConcrete(penalty=1.0), 0.5, steps=10)
    drawn_now = model[0].weight.detach().clone()
    with pruner.deterministic():
        settled = model[0].weight.detach().clone()
        with pruner.deterministic():
            assert torch.equal(model[0].weight, settled)
        assert torch.equal(model[0].weight, settled)
    assert torch.equal(model[0].weight, drawn_now)
    assert not torch.equal(settled, drawn_now)
    pruner.detach()
    assert torch.equal(model[0].weight, settled)


def test_a_step_inside_deterministic_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    pruner = platon.Pruner(
        model,
        optimizer,
        schedule=platon.Constant(0.5),
        units=platon.Units({"0.weight": model[0].weight}),
        score=platon.Platon(window=1),
    )
    model(torch.randn(3, 4)).sum().backward()
    with pruner.deterministic(), pytest.raises(RuntimeError, match="train outside"):
        optimizer.step()


def test_a_penalty_needs_a_ramp() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(TypeError, match=r"SoftMovement needs a schedule .* as platon\.Cubic does"):
        platon.Pruner(
            model,
            SGD(model.parameters(), lr=0.1),
            score=platon.SoftMovement(),
            schedule=lambda step: 0.5,
            units=platon.Units({"0.weight": model[0].weight}),
        )


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        (platon.Movement, {"score_learning_rate": 0}, "score_learning_rate must be above 0, got 0"),
        (platon.Movement, {"score_init": float("nan")}, "score_init must be a number, got nan"),
        (platon.SoftMovement, {"penalty": -1.0}, "penalty must be at least 0, got -1.0"),
        (platon.SoftMovement, {"tau": 1.0}, "tau must be between 0 and 1, got 1.0"),
        (platon.SoftMovement, {"min_keep_per_matrix": 2}, r"min_keep_per_matrix must be in \[0, 1\], got 2"),
        (platon.Platon, {"exponent": -1}, r"exponent must be in \[0, 64\), got -1"),
    ],
)
def test_bad_settings_are_refused(method: type[platon.Score], settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        method(**settings)
