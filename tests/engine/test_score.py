"""Scores as functions: numbers that float32 can hardly hold, dtypes, windows, and steps without a gradient."""

import pytest
import torch
from torch import Tensor, nn

import platon
from platon.engine.score import State

CPU = torch.device("cpu")


def state_of(score: platon.Score, count: int, **tensors: Tensor) -> State:
    return {**score.init(count, CPU), **tensors}


def value(sensitivity: list[float], uncertainty: list[float]) -> Tensor:
    score = platon.Platon(window=1)
    state = {"sensitivity": torch.tensor(sensitivity), "uncertainty": torch.tensor(uncertainty)}
    return score.value(state, torch.zeros(len(sensitivity)))


# --- underflow --------------------------------------------------------------------------------------------------------


def test_products_too_small_for_float32_keep_their_order() -> None:
    tiny = [1e-30, 2e-30, 3e-30, 1e-25, 1e-20]
    assert not (torch.tensor(tiny[:4]) * torch.tensor(tiny[:4])).any()  # the plain product has no order left
    found = value(tiny, tiny)
    assert (found.diff() > 0).all()
    torch.testing.assert_close(found, torch.tensor(tiny))


def test_denormal_factors_keep_their_order() -> None:
    least = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps  # 1.4e-45
    found = value([least, 4 * least, 1e-40, 1e-38], [least] * 4)
    assert (found > 0).all()
    assert (found.diff() > 0).all()


def test_products_too_large_for_float32_keep_their_order() -> None:
    found = value([1e30, 2e30, 3e38], [1e30, 2e30, 3e38])
    assert found.isfinite().all()
    assert (found.diff() > 0).all()


def test_value_has_the_order_of_the_product() -> None:
    source = torch.Generator().manual_seed(0)
    a, b = (torch.exp(20 * torch.randn(1000, generator=source).clamp(-3, 3)) for _ in range(2))
    exact = (a.double() * b.double()).sort()
    found = platon.Platon(window=1).value({"sensitivity": a, "uncertainty": b}, a)[exact.indices]
    apart = exact.values[1:] > exact.values[:-1] * (1 + 1e-6)  # closer ones may round to either side
    assert (found.diff() > 0)[apart].all()


def test_value_is_the_log_form_with_c_of_one() -> None:
    """Its square, that is: a root changes no order."""
    sensitivity, uncertainty = torch.tensor([0.5, 2.0, 1e-6, 30.0]), torch.tensor([3.0, 1e-4, 1e-5, 7.0])
    found = platon.Platon(window=1).value({"sensitivity": sensitivity, "uncertainty": uncertainty}, sensitivity)
    expected = torch.exp(sensitivity.double().log() + 1.0 * uncertainty.double().log())
    torch.testing.assert_close(found.double().square(), expected, rtol=1e-6, atol=0)


def test_zero_factor_scores_zero() -> None:
    assert value([0.0, 0.0, 1.0], [0.0, 1.0, 0.0]).tolist() == [0.0, 0.0, 0.0]


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_state_and_arithmetic_are_float32_whatever_the_weights(dtype: torch.dtype, window: int) -> None:
    """Products that vanish in half precision count, and averages do not round to it."""
    model = nn.Linear(8, 4, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.fill_(2.0**-14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    units = platon.Units({"weight": model.weight})
    score = platon.Platon(window=window)
    pruner = platon.Pruner(model, optimizer, score=score, schedule=platon.Constant(0.5), units=units)
    for _ in range(2 * window):
        model.weight.grad = torch.full_like(model.weight, 2.0**-13)
        optimizer.step()
    tensors = pruner.state_dict()["tensors"]
    floats = {name: tensor for name, tensor in tensors.items() if not name.endswith(":mask")}
    assert {tensor.dtype for tensor in floats.values()} == {torch.float32}
    folds = 2
    # The later half was pruned at a step, so its |w g| is 0 since then; the first half's is 2⁻²⁷ at every step.
    expected = (1 - 0.85**folds) * 2.0**-27
    assert tensors["weight:sensitivity"][:16].tolist() == pytest.approx([expected] * 16, rel=1e-6)
    assert model.weight.dtype == dtype


def test_magnitude_is_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = platon.Magnitude().value({}, torch.tensor([-3.0, 2.0, 0.0], dtype=dtype))
        assert found.dtype == torch.float32
        assert found.tolist() == [3.0, 2.0, 0.0]


# --- averages ---------------------------------------------------------------------------------------------------------


def test_uncertainty_uses_the_new_average() -> None:
    score = platon.Platon(beta1=0.5, beta2=0.0, window=1)
    state = state_of(score, 1, sensitivity=torch.tensor([2.0]))
    state = score.update(state, torch.tensor([-6.0]), 0)
    assert state["sensitivity"].item() == 4.0
    assert state["uncertainty"].item() == 2.0  # |6 - 4|; with the old average it were |6 - 2|


def test_beta_zero_forgets_at_once() -> None:
    score = platon.Platon(beta1=0.0, beta2=0.0, window=1)
    state = score.update(state_of(score, 1, sensitivity=torch.tensor([9.0])), torch.tensor([5.0]), 0)
    assert state["sensitivity"].item() == 5.0
    assert state["uncertainty"].item() == 0.0


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("window", [1, 3])
def test_update_leaves_its_input_alone(window: int, phase: int) -> None:
    """`preview` scores a sample with it before the step is taken in."""
    score = platon.Platon(window=window)
    state = score.update(state_of(score, 2), torch.tensor([1.0, 2.0]), 0)
    copy = {name: tensor.clone() for name, tensor in state.items()}
    score.update(state, torch.tensor([3.0, 4.0]), phase)
    assert all(torch.equal(state[name], copy[name]) for name in copy)


def test_a_step_without_a_gradient_changes_nothing() -> None:
    score = platon.Platon(window=1)
    state = score.update(state_of(score, 2), torch.tensor([1.0, 2.0]), 0)
    after = score.update(state, None, 0)
    assert all(torch.equal(state[name], after[name]) for name in state)


# --- the window -------------------------------------------------------------------------------------------------------


def windowed(signals: list[float | None], window: int = 3) -> tuple[platon.Platon, State]:
    """The state after these |w g|, one a step from step 1; β1 = 1/2 and β2 = 0."""
    score = platon.Platon(beta1=0.5, beta2=0.0, window=window)
    state = score.init(1, CPU)
    for step, signal in enumerate(signals, 1):
        given = None if signal is None else torch.tensor([signal])
        state = score.update(state, given, score.phase(step))
    return score, state


def numbers(state: State) -> tuple[float, ...]:
    return tuple(state[name].item() for name in ("sensitivity", "uncertainty", "window", "samples"))


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        # Steps 1 and 2 are the first window; step 3 folds their mean and opens the next with its own.
        ([2, 4], (0, 0, 6, 2)),
        ([2, 4, 9], (1.5, 1.5, 9, 1)),
        ([2, 4, 9, 1], (1.5, 1.5, 10, 2)),
        ([2, 4, 9, 1, 5, 7], (3.25, 1.75, 7, 1)),
        # A step without a gradient is no sample.
        ([2, None, 9], (1, 1, 9, 1)),
        ([2, 4, 9, None, 5, 7], (4.25, 2.75, 7, 1)),
        # Where it closes a window, the window is folded all the same, and the next one waits for its first sample.
        ([2, 4, None], (1.5, 1.5, 0, 0)),
        ([2, 4, None, 8], (1.5, 1.5, 8, 1)),
        # A window without a single sample says nothing.
        ([2, 4, None, None, None, 8], (1.5, 1.5, 8, 1)),
        ([None, None, 9], (0, 0, 9, 1)),
        ([None, None, None], (0, 0, 0, 0)),
    ],
)
def test_window(signals: list[float | None], expected: tuple[float, ...]) -> None:
    _, state = windowed(signals)
    assert numbers(state) == pytest.approx(expected)


def test_window_phases_fall_on_its_multiples() -> None:
    assert [platon.Platon(window=3).phase(step) for step in range(1, 8)] == [0, 0, 1, 0, 0, 1, 0]
    assert [platon.Platon(window=1).phase(step) for step in range(1, 4)] == [0, 0, 0]


def test_state_is_no_larger_than_needed() -> None:
    assert {name: t.numel() for name, t in platon.Platon(window=1).init(7, CPU).items()} == {
        "sensitivity": 7,
        "uncertainty": 7,
    }
    assert {name: t.numel() for name, t in platon.Platon(window=2).init(7, CPU).items()} == {
        "sensitivity": 7,
        "uncertainty": 7,
        "window": 7,
        "samples": 1,
    }
    assert platon.Magnitude().init(7, CPU) == {}


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beta1": 1.0}, "beta1 must be in [0, 1), got 1.0"),
        ({"beta1": -0.1}, "beta1 must be in [0, 1), got -0.1"),
        ({"beta2": 85}, "beta2 must be in [0, 1), got 85"),
        ({"beta2": float("nan")}, "beta2 must be in [0, 1), got nan"),
        ({"beta2": None}, "beta2 must be in [0, 1), got None"),
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"window": 2.0}, "window must be a whole number of at least 1, got 2.0"),
        ({"timing": "during"}, "timing must be one of 'after', 'before', got 'during'"),
        ({"scope": "layer"}, "scope must be 'global', 'matrix', 'row', or a pattern such as '2:4'"),
    ],
)
def test_bad_settings(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        platon.Platon(**settings)
    assert str(error.value).startswith(sentence)


def test_reads() -> None:
    assert platon.Platon(window=1).reads == "after"
    assert platon.Platon(timing="before", window=1).reads == "before"
    assert platon.Magnitude().reads is None


@pytest.mark.parametrize(
    ("schedule", "window"),
    [
        (platon.Cubic(0.1, 1000), 10),
        (platon.Cubic(0.1, 1000, every=1), 10),
        (platon.Cubic(0.1, 100, warmup=4, every=1), 4),
        (platon.Cubic(0.1, 12, cooldown=5), 7),
        (platon.Cubic(0.1, 3), 2),
        (platon.Constant(0.5), 1),
        (lambda step: None, 10),
    ],
)
def test_the_default_window_ends_before_the_first_mask(schedule: platon.Schedule, window: int) -> None:
    assert platon.Platon().fitted(schedule) == platon.Platon(window=window)
    assert platon.Ratio(window=7).fitted(schedule).window == 7
