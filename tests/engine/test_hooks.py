"""What can come between an optimizer and its gradients, and the pruner that looks at them through the hooks."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn, optim
from torch.amp import GradScaler

import platon

Make = Callable[[], nn.Module]
HALF = platon.Constant(0.5)
DENSE = platon.Constant(1.0)


def loss_of(net: nn.Module, number: int = 0) -> Tensor:
    """The loss on batch `number`."""
    data = torch.Generator().manual_seed(number)
    x, y = torch.randn(6, 4, generator=data), torch.randint(0, 2, (6,), generator=data)
    return nn.functional.cross_entropy(net(x), y)


def train(net: nn.Module, optimizer: Any, steps: int, start: int = 0) -> None:
    for number in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(net, number).backward()
        optimizer.step()


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def state_of(pruner: platon.Pruner) -> dict[str, Any]:
    """A copy: `state_dict` gives the tensors themselves."""
    state = pruner.state_dict()
    return {**state, "tensors": {name: tensor.clone() for name, tensor in state["tensors"].items()}}


def moments_of(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{number}:{key}": torch.as_tensor(value).clone()
        for number, own in optimizer.state_dict()["state"].items()
        for key, value in own.items()
        if value is not None
    }


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{name} differs"


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert_equal(one["tensors"], other["tensors"])
    assert {**one, "tensors": None} == {**other, "tensors": None}


def averages(pruner: platon.Pruner) -> dict[str, Tensor]:
    return {name: t for name, t in state_of(pruner)["tensors"].items() if not name.endswith(":mask")}


# --- loops that people write ------------------------------------------------------------------------------------------


def test_several_parameter_groups(make_net: Make) -> None:
    """Groups with settings of their own, the pruned matrices spread over them: nothing changes for the pruner."""

    def pruned(groups: Callable[[nn.Module], list[Any]]) -> platon.Pruner:
        net = make_net()
        optimizer = optim.SGD(groups(net), lr=0.1)
        pruner = platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
        train(net, optimizer, 4)
        return pruner

    one = pruned(lambda net: list(net.parameters()))
    parts = pruned(
        lambda net: [
            {"params": list(net.blocks[1].parameters()), "lr": 0.1},
            {"params": [*net.inlet.parameters(), *net.blocks[0].parameters()]},
            {"params": list(net.head.parameters()), "weight_decay": 0.0},
        ]
    )
    assert_same_state(one.state_dict(), parts.state_dict())
    assert_equal(one.masks(), parts.masks())


def test_group_added_later(net: nn.Module) -> None:
    optimizer = optim.SGD(net.blocks.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
    optimizer.add_param_group({"params": list(net.head.parameters())})
    train(net, optimizer, 2)
    assert pruner.step_count == 2


def test_clipped_gradient_is_the_one_that_counts(net: nn.Module) -> None:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, score=platon.Platon(beta1=0, window=1), schedule=DENSE)
    loss_of(net).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
    optimizer.step()
    for name, matrix in pruner.units.matrices.items():
        expected = (matrix.detach() * matrix.grad).abs().view(-1)
        torch.testing.assert_close(averages(pruner)[f"{name}:sensitivity"], expected)
        assert expected.max() < 1e-2


def test_learning_rate_schedulers_do_not_notice(make_net: Make) -> None:
    def rates(pruned: bool) -> list[float]:
        net = make_net()
        optimizer = optim.AdamW(net.parameters(), lr=0.1)
        warm = optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        fall = optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        scheduler = optim.lr_scheduler.SequentialLR(optimizer, [warm, fall], [3])
        if pruned:  # after the scheduler, which wraps `optimizer.step`
            platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
        found = []
        for number in range(8):
            train(net, optimizer, 1, number)
            scheduler.step()
            found.append(scheduler.get_last_lr()[0])
        return found

    assert rates(True) == rates(False)


@pytest.mark.parametrize("timing", ["after", "before"])
@pytest.mark.parametrize("as_keyword", [False, True])
def test_closure(make_net: Make, timing: Any, as_keyword: bool) -> None:
    """The gradient is the closure's, it runs once, and its loss comes back."""
    pruners = []
    for closed in (False, True):
        net = make_net()
        optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        pruners.append(platon.Pruner(net, optimizer, score=platon.Platon(timing=timing, window=1), schedule=HALF))
        if not closed:
            train(net, optimizer, 3)
            continue
        calls = []
        for number in range(3):

            def closure(net: nn.Module = net, number: int = number, optimizer: Any = optimizer) -> Tensor:
                calls.append(number)  # noqa: B023  # one list is meant
                optimizer.zero_grad()
                loss = loss_of(net, number)
                loss.backward()
                return loss

            with torch.no_grad():
                expected = loss_of(net, number)
            loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
            assert torch.equal(loss, expected)
        assert calls == [0, 1, 2]
    assert_same_state(pruners[0].state_dict(), pruners[1].state_dict())


def test_accumulation_advances_once(net: nn.Module) -> None:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, score=platon.Platon(beta1=0, window=1), schedule=DENSE)
    for number in range(3):
        (loss_of(net, number) / 3).backward()
    assert pruner.step_count == 0
    optimizer.step()
    assert pruner.step_count == 1
    name, matrix = next(iter(pruner.units.matrices.items()))
    expected = (matrix.detach() * matrix.grad).abs().view(-1)
    torch.testing.assert_close(averages(pruner)[f"{name}:sensitivity"], expected)


def test_parameter_without_a_gradient_keeps_its_averages(net: nn.Module) -> None:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, schedule=DENSE, score=platon.Platon(window=1))
    train(net, optimizer, 2)
    before = averages(pruner)
    optimizer.zero_grad()
    loss_of(net, 2).backward()
    quiet = "blocks.0.up.weight"
    pruner.units.matrices[quiet].grad = None
    optimizer.step()
    for name, tensor in averages(pruner).items():
        assert torch.equal(tensor, before[name]) == name.startswith(quiet), name
    assert pruner.step_count == 3


@pytest.mark.parametrize("timing", ["after", "before"])
def test_parameter_without_a_gradient_in_a_whole_window(net: nn.Module, timing: Any) -> None:
    """A window in which a matrix had no gradient says nothing about it; one with some is the mean over those."""
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    score = platon.Platon(window=2, timing=timing)
    pruner = platon.Pruner(net, optimizer, score=score, schedule=DENSE)
    train(net, optimizer, 4)
    before = averages(pruner)
    quiet = "blocks.1.down.weight"
    for number in range(4, 8):
        optimizer.zero_grad()
        loss_of(net, number).backward()
        pruner.units.matrices[quiet].grad = None
        optimizer.step()
    after = averages(pruner)
    assert after[f"{quiet}:samples"] == 0
    assert before[f"{quiet}:samples"] == 1, "step 4 opened a window"
    # Step 6 folds that one sample; the window of steps 6 and 7 is empty, so step 8 folds nothing.
    sample, average = before[f"{quiet}:window"], before[f"{quiet}:sensitivity"]
    torch.testing.assert_close(after[f"{quiet}:sensitivity"], 0.85 * average + 0.15 * sample)
    assert all(tensor.isfinite().all() for tensor in after.values())


# --- GradScaler -------------------------------------------------------------------------------------------------------

SCALED = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.01),
    "adamw, fused": lambda parameters: optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd, fused": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}
each_scaled = pytest.mark.parametrize("build", SCALED.values(), ids=SCALED)


def scaled_step(net: nn.Module, optimizer: Any, scaler: GradScaler, number: int, clip: float | None = None) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(net, number)).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()


@each_scaled
@pytest.mark.parametrize("timing", ["after", "before"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clipped"])
def test_scaled_run_has_the_averages_of_an_unscaled_one(
    make_net: Make, build: Callable[..., Any], timing: Any, clip: float | None
) -> None:
    """The scale is a power of two, so the averages agree to the bit."""
    found = []
    for enabled in (False, True):
        net = make_net()
        optimizer = build(net.parameters())
        pruner = platon.Pruner(net, optimizer, score=platon.Platon(timing=timing, window=1), schedule=HALF)
        scaler = GradScaler("cpu", init_scale=2.0**12, enabled=enabled)
        for number in range(4):
            scaled_step(net, optimizer, scaler, number, clip)
        assert pruner.step_count == 4
        found.append((state_of(pruner), weights_of(net)))
    assert_same_state(found[0][0], found[1][0])
    assert_equal(found[0][1], found[1][1])


@each_scaled
@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clipped"])
def test_scaled_training_is_as_without_a_pruner(make_net: Make, build: Callable[..., Any], clip: float | None) -> None:
    def run(pruned: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        net = make_net()
        optimizer = build(net.parameters())
        pruner = platon.Pruner(net, optimizer, schedule=DENSE, score=platon.Platon(window=1)) if pruned else None
        # A scale that is no power of two, and that grows: division rounds, and has to round alike.
        scaler = GradScaler("cpu", init_scale=1000.0, growth_factor=1.7, growth_interval=2)
        for number in range(6):
            scaled_step(net, optimizer, scaler, number, clip)
        assert pruner is None or pruner.step_count == 6
        assert not hasattr(optimizer, "grad_scale")
        gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
        return weights_of(net), moments_of(optimizer), scaler.state_dict(), gradients

    with_pruner, without = run(True), run(False)
    assert_equal(with_pruner[0], without[0])
    assert_equal(with_pruner[1], without[1])
    assert with_pruner[2] == without[2]
    assert_equal(with_pruner[3], without[3])


@each_scaled
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_step_that_the_scaler_skips(make_net: Make, build: Callable[..., Any], on_nonfinite: Any) -> None:
    """It does not count, moves nothing, and is none of the pruner's own skipped steps."""
    net = make_net()
    optimizer = build(net.parameters())
    pruner = platon.Pruner(net, optimizer, schedule=HALF, on_nonfinite=on_nonfinite, score=platon.Platon(window=1))
    scaler = GradScaler("cpu", init_scale=2.0**10)
    for number in range(2):
        scaled_step(net, optimizer, scaler, number)
    state, weights, moments = state_of(pruner), weights_of(net), moments_of(optimizer)
    optimizer.zero_grad()
    scaler.scale(loss_of(net, 2)).backward()
    net.head.bias.grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert_same_state(state, pruner.state_dict())
    assert_equal(weights, weights_of(net))
    assert_equal(moments, moments_of(optimizer))
    assert (pruner.step_count, pruner.skipped_count) == (2, 0)
    scaled_step(net, optimizer, scaler, 3)
    assert pruner.step_count == 3


def test_scale_that_a_user_sets_for_good(make_net: Make) -> None:
    """Fused optimizers divide by their own `grad_scale`; it is still there after the step."""

    def run(pruned: bool) -> tuple[dict[str, Tensor], float]:
        net = make_net()
        optimizer = optim.AdamW(net.parameters(), lr=0.01, fused=True)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        if pruned:
            platon.Pruner(net, optimizer, schedule=DENSE, score=platon.Platon(window=1))
        train(net, optimizer, 3)
        return weights_of(net), float(optimizer.grad_scale)

    with_pruner, without = run(True), run(False)
    assert_equal(with_pruner[0], without[0])
    assert with_pruner[1] == without[1] == 8


# --- other people's wrappers ------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Callable[..., Accelerator]]:
    """Makes an accelerator; its process-wide state is gone afterwards."""

    def make(**settings: Any) -> Accelerator:
        return Accelerator(cpu=True, **settings)

    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    yield make
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


def test_accelerate(make_net: Make, accelerator: Callable[..., Accelerator]) -> None:
    """Its wrapper calls the optimizer inside, so that is hooked; accumulation advances t once."""
    plain = make_net()
    plain_optimizer = optim.AdamW(plain.parameters(), lr=0.01)
    plain_pruner = platon.Pruner(plain, plain_optimizer, schedule=HALF, score=platon.Platon(window=1))

    tool = accelerator(gradient_accumulation_steps=2)
    net = make_net()
    inner = optim.AdamW(net.parameters(), lr=0.01)
    net, optimizer = tool.prepare(net, inner)
    assert optimizer is not inner
    pruner = platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
    for number in range(6):
        (loss_of(plain, number) / 2).backward()
        if number % 2:
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        with tool.accumulate(net):
            tool.backward(loss_of(net, number))
            optimizer.step()
            optimizer.zero_grad()
        assert pruner.step_count == plain_pruner.step_count == (number + 1) // 2
    assert_same_state(pruner.state_dict(), plain_pruner.state_dict())
    assert_equal(weights_of(net), weights_of(plain))


def test_accelerate_in_half_precision(net: nn.Module, accelerator: Callable[..., Accelerator]) -> None:
    tool = accelerator(mixed_precision="bf16")
    net, optimizer = tool.prepare(net, optim.AdamW(net.parameters(), lr=0.01))
    pruner = platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
    for number in range(3):
        tool.backward(loss_of(net, number))
        tool.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert pruner.step_count == 3
    assert sum(int(mask.sum()) for mask in pruner.masks().values()) == pruner.units.count // 2


class Wrapper(nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: torch.compile(net, backend="eager"),
        Wrapper,
        lambda net: Wrapper(torch.compile(net, backend="eager")),
        lambda net: torch.compile(Wrapper(net), backend="eager"),
    ],
    ids=["compiled", "parallel", "parallel of compiled", "compiled parallel"],
)
def test_wrapped_model_has_the_state_of_the_plain_one(make_net: Make, wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain, wrapped = make_net(), wrap(make_net())
    pruners = []
    for net in (plain, wrapped):
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        pruners.append(platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1)))
        train(net, optimizer, 3)
    assert list(pruners[0].masks()) == list(pruners[1].masks())
    assert_same_state(pruners[0].state_dict(), pruners[1].state_dict())
    pruners[0].load_state_dict(pruners[1].state_dict())


# --- optimizers -------------------------------------------------------------------------------------------------------


def settings_of(kind: type[optim.Optimizer]) -> list[dict[str, Any]]:
    """Every way to build it on a CPU that takes another path through its code."""
    known = inspect.signature(kind).parameters
    ways = [{}, *({flag: True} for flag in ("foreach", "fused") if flag in known)]
    extras: list[dict[str, Any]] = [{}]
    extras += [{"weight_decay": 0.1}] if "weight_decay" in known else []
    extras += [{"maximize": True}] if "maximize" in known else []
    extras += [{"amsgrad": True}] if "amsgrad" in known else []
    if "momentum" in known:
        extras += [{"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1}]
        if "nesterov" in known:
            extras += [{"momentum": 0.9, "nesterov": nesterov} for nesterov in (True, False)]
    return [{**way, **extra} for way, extra in itertools.product(ways, extras)]


OPTIMIZERS = [
    (kind, settings)
    for _, kind in inspect.getmembers(optim, inspect.isclass)
    if issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
    for settings in settings_of(kind)
]


def optimizer_id(case: Any) -> str:
    return case.__name__ if isinstance(case, type) else ", ".join(f"{k}={v}" for k, v in case.items()) or "-"


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=optimizer_id)
def test_every_torch_optimizer_leaves_gradients_alone_or_is_refused(
    make_net: Make, kind: type[optim.Optimizer], settings: dict[str, Any]
) -> None:
    net = make_net()
    units = platon.weights(net)
    matrices = list(units.matrices.values())
    optimizer = kind(matrices, lr=0.01, **settings)
    if kind is optim.LBFGS or (kind is optim.SGD and settings.get("nesterov") and settings.get("foreach")):
        with pytest.raises(ValueError, match=f"{kind.__name__} .*; .*use|build"):
            platon.Pruner(net, optimizer, units=units, schedule=HALF, score=platon.Platon(window=1))
        return
    if kind is optim.SparseAdam:
        return  # takes no dense gradient, with a pruner or without
    pruner = platon.Pruner(net, optimizer, units=units, schedule=HALF, score=platon.Platon(window=1))
    for number in range(3):
        net.zero_grad()
        loss_of(net, number).backward()
        before = [matrix.grad.clone() for matrix in matrices]
        optimizer.step()
        assert all(torch.equal(matrix.grad, gradient) for matrix, gradient in zip(matrices, before, strict=True))
    assert pruner.step_count == 3
    assert sum(int(mask.sum()) for mask in pruner.masks().values()) == units.count // 2


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=optimizer_id)
def test_every_torch_optimizer_does_nothing_in_a_skipped_step(
    make_net: Make, kind: type[optim.Optimizer], settings: dict[str, Any]
) -> None:
    if kind in (optim.LBFGS, optim.SparseAdam):
        return
    net = make_net()
    units = platon.weights(net)
    optimizer = kind(list(units.matrices.values()), lr=0.01, **settings)
    score = platon.Platon(timing="before", window=1)  # takes every one of them
    pruner = platon.Pruner(net, optimizer, score=score, units=units, schedule=HALF, on_nonfinite="skip")
    train(net, optimizer, 2)
    weights, moments, state = weights_of(net), moments_of(optimizer), state_of(pruner)
    net.zero_grad()
    (loss_of(net, 3) * torch.inf).backward()
    optimizer.step()
    assert_equal(weights, weights_of(net))
    assert_equal(moments, moments_of(optimizer))
    assert_same_state({**state, "skipped_count": 1}, pruner.state_dict())


def test_lbfgs_is_refused_by_name(net: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"LBFGS takes many gradients in one step.*use AdamW or SGD"):
        platon.Pruner(net, optim.LBFGS(net.parameters()), schedule=HALF, score=platon.Platon(window=1))


def test_foreach_nesterov_is_refused_by_name(make_net: Make) -> None:
    def sgd(foreach: bool, timing: Any = "after") -> platon.Pruner:
        net = make_net()
        optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=foreach)
        pruner = platon.Pruner(net, optimizer, score=platon.Platon(timing=timing, window=1), schedule=HALF)
        train(net, optimizer, 3)
        return pruner

    with pytest.raises(ValueError, match=r"SGD with nesterov=True and foreach .*foreach=False, .*timing='before'"):
        sgd(foreach=True)
    assert sgd(foreach=False).step_count == 3
    looped, foreach = sgd(foreach=False, timing="before"), sgd(foreach=True, timing="before")
    for name, tensor in averages(looped).items():
        torch.testing.assert_close(averages(foreach)[name], tensor)


class Meddling(optim.SGD):
    """Writes to its gradients as old optimizers do, in the way that it is told."""

    def __init__(self, parameters: Any, meddle: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters, lr=0.1)
        self.meddle = meddle

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.meddle(parameter)
        return super().step(closure)


def add_decay(parameter: nn.Parameter) -> None:
    parameter.grad.add_(parameter.detach(), alpha=0.1)


def add_decay_to_data(parameter: nn.Parameter) -> None:
    parameter.grad.data.add_(parameter.data, alpha=0.1)


def replace(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 2


def remove(parameter: nn.Parameter) -> None:
    parameter.grad = None


@pytest.mark.parametrize("meddle", [add_decay, add_decay_to_data, replace, remove])
def test_optimizer_that_overwrites_gradients_is_caught(make_net: Make, meddle: Callable[[nn.Parameter], None]) -> None:
    net = make_net()
    optimizer = Meddling(net.parameters(), meddle)
    pruner = platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
    message = r"Meddling changed the gradient of 'blocks.0.query.weight' during its step.*use timing='before'"
    with pytest.raises(RuntimeError, match=message):
        train(net, optimizer, 1)
    pruner.detach()
    for score in (
        platon.Platon(timing="before", window=1),
        platon.Magnitude(),
    ):  # neither looks at gradients after the step
        pruner = platon.Pruner(net, optimizer, score=score, schedule=HALF)
        train(net, optimizer, 2)
        assert pruner.step_count == 2
        pruner.detach()


# --- gradients that are not finite ------------------------------------------------------------------------------------


def spoil(net: nn.Module, name: str, value: float) -> None:
    net.get_parameter(name).grad.view(-1)[0] = value


@pytest.mark.parametrize("timing", ["after", "before"])
@pytest.mark.parametrize("name", ["blocks.1.up.weight", "inlet.weight"], ids=["pruned", "not pruned"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_gradient_raises_before_anything_moves(net: nn.Module, timing: Any, name: str, value: float) -> None:
    optimizer = optim.AdamW(net.parameters(), lr=0.01)
    pruner = platon.Pruner(net, optimizer, score=platon.Platon(timing=timing, window=1), schedule=HALF)
    train(net, optimizer, 2)
    weights, moments, state = weights_of(net), moments_of(optimizer), state_of(pruner)
    optimizer.zero_grad()
    loss_of(net, 2).backward()
    spoil(net, name, value)
    with pytest.raises(RuntimeError, match=f"gradient of '{name}' is not finite .*weights are untouched.*'skip'"):
        optimizer.step()
    assert_equal(weights, weights_of(net))
    assert_equal(moments, moments_of(optimizer))
    assert_same_state(state, pruner.state_dict())
    train(net, optimizer, 1, start=3)
    assert (pruner.step_count, pruner.skipped_count) == (3, 0)


@pytest.mark.parametrize(
    "score", [platon.Platon(window=1), platon.Platon(timing="before", window=1), platon.Magnitude()], ids=str
)
def test_skipped_step(make_net: Make, score: platon.Score) -> None:
    """As if it had not been: the run goes on as one that never saw the bad gradient."""

    def run(disturbed: bool) -> tuple[nn.Module, optim.Optimizer, platon.Pruner]:
        net = make_net()
        optimizer = optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
        pruner = platon.Pruner(net, optimizer, score=score, schedule=HALF, on_nonfinite="skip")
        train(net, optimizer, 2)
        if disturbed:
            optimizer.zero_grad()
            loss_of(net, 2).backward()
            spoil(net, "blocks.0.out.bias", torch.nan)
            gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
            weights, moments = weights_of(net), moments_of(optimizer)
            optimizer.step()
            assert_equal(weights, weights_of(net))
            assert_equal(moments, moments_of(optimizer))
            assert all(parameter.grad is gradients[name] for name, parameter in net.named_parameters())
            assert (pruner.step_count, pruner.skipped_count) == (2, 1)
        train(net, optimizer, 2, start=3)
        assert (pruner.step_count, pruner.skipped_count) == (4, int(disturbed))
        return net, optimizer, pruner

    (net, optimizer, pruner), (calm_net, calm_optimizer, calm_pruner) = run(True), run(False)
    assert_equal(weights_of(net), weights_of(calm_net))
    assert_equal(moments_of(optimizer), moments_of(calm_optimizer))
    assert_same_state(pruner.state_dict(), {**calm_pruner.state_dict(), "skipped_count": 1})


def test_skipped_step_returns_the_loss_of_its_closure(net: nn.Module) -> None:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, schedule=HALF, on_nonfinite="skip", score=platon.Platon(window=1))

    def closure() -> Tensor:
        loss = loss_of(net) * torch.inf
        loss.backward()
        return loss

    assert optimizer.step(closure) == torch.inf
    assert (pruner.step_count, pruner.skipped_count) == (0, 1)


def test_finite_gradient_whose_sum_is_not(net: nn.Module) -> None:
    """Adding up is how a bad one is noticed; a good one that overflows there is looked at again, and passes."""
    optimizer = optim.SGD(net.parameters(), lr=1e-30)
    pruner = platon.Pruner(net, optimizer, schedule=DENSE, score=platon.Platon(window=1))
    loss_of(net).backward()
    net.inlet.weight.grad.fill_(3e38)
    net.head.weight.grad.fill_(-3e38)
    optimizer.step()
    assert pruner.step_count == 1


class Lookup(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.table(x.argmax(-1)))


def test_sparse_gradient_elsewhere(net: nn.Module) -> None:
    """An embedding's may be sparse: finite it passes, not finite it is named."""
    model = Lookup(net)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    pruner = platon.Pruner(model, optimizer, schedule=HALF, score=platon.Platon(window=1))
    train(model, optimizer, 2)
    assert pruner.step_count == 2
    optimizer.zero_grad()
    loss_of(model).backward()
    model.table.weight.grad.mul_(torch.inf)
    with pytest.raises(RuntimeError, match=r"gradient of 'table.weight' is not finite"):
        optimizer.step()


def test_nonfinite_gradient_outside_the_model(net: nn.Module) -> None:
    temperature = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([*net.parameters(), temperature], lr=0.1)
    platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
    loss_of(net).backward()
    temperature.grad = torch.full((3,), torch.nan)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(3,\) that is not in the model"):
        optimizer.step()


# --- the pruner leaves -----------------------------------------------------------------------------------------------


def test_detached_pruner_does_nothing(make_net: Make) -> None:
    net, plain = make_net(), make_net()
    optimizer, plain_optimizer = (optim.AdamW(each.parameters(), lr=0.01) for each in (net, plain))
    pruner = platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
    pruner.detach()
    pruner.detach()  # twice is once
    train(net, optimizer, 3)
    train(plain, plain_optimizer, 3)
    assert_equal(weights_of(net), weights_of(plain))
    assert pruner.step_count == 0
    loss_of(net, 3).backward()
    spoil(net, "head.bias", torch.nan)
    optimizer.step()  # no longer looked at
    assert pruner.masks().keys() == pruner.units.matrices.keys()


def test_detached_pruner_leaves_the_weights_as_they_are(net: nn.Module) -> None:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
    train(net, optimizer, 2)
    masks = pruner.masks()
    pruner.detach()
    assert not any(pruner.units.matrices[name].detach()[~mask].any() for name, mask in masks.items())
    train(net, optimizer, 1, start=2)
    assert any(pruner.units.matrices[name].detach()[~mask].any() for name, mask in masks.items()), "they grow again"
    assert_equal(masks, pruner.masks())


def test_two_pruners_share_an_optimizer(net: nn.Module) -> None:
    optimizer = optim.AdamW(net.parameters(), lr=0.01)
    first = platon.Pruner(
        net, optimizer, schedule=HALF, units=platon.weights(net, include="blocks.0"), score=platon.Platon(window=1)
    )
    second = platon.Pruner(
        net,
        optimizer,
        score=platon.Magnitude(),
        schedule=platon.Constant(0.25),
        units=platon.weights(net, include="blocks.1"),
    )
    train(net, optimizer, 3)
    for pruner, keep in ((first, 0.5), (second, 0.25)):
        assert pruner.kept() == keep
        assert pruner.step_count == 3


class Careful(optim.SGD):
    """An optimizer of one's own on top of another: torch puts the hooks around both steps."""

    def step(self, closure: Any = None) -> Any:
        if any(parameter.isnan().any() for group in self.param_groups for parameter in group["params"]):
            raise ArithmeticError("NaN among the weights")
        return super().step(closure)


@pytest.mark.parametrize(
    "score", [platon.Platon(window=1), platon.Platon(timing="before", window=1), platon.Magnitude()], ids=str
)
def test_step_inside_a_step_counts_once(make_net: Make, score: platon.Score) -> None:
    plain, own = [], []
    for kind, run in ((optim.SGD, plain), (Careful, own)):
        net = make_net()
        optimizer = kind(net.parameters(), lr=0.1)
        run += [net, optimizer, platon.Pruner(net, optimizer, score=score, schedule=HALF)]
        train(net, optimizer, 2)
    assert own[2].step_count == 2
    assert_same_state(plain[2].state_dict(), own[2].state_dict())


def test_step_that_raises_leaves_nothing_behind(make_net: Make) -> None:
    """The next one is not taken for a step inside it."""
    net = make_net()
    optimizer = Careful(net.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, schedule=HALF, score=platon.Platon(window=1))
    loss_of(net).backward()
    bias = net.head.bias.detach()
    good = bias.clone()
    bias[0] = torch.nan
    with pytest.raises(ArithmeticError):
        optimizer.step()
    bias.copy_(good)
    assert pruner.step_count == 0
    train(net, optimizer, 2)
    assert pruner.step_count == 2


def test_repr_is_the_configuration(net: nn.Module) -> None:
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, schedule=platon.Constant(0.5), score=platon.Platon(window=1))
    train(net, optimizer, 2)
    assert repr(pruner) == (
        "Pruner(score=Platon(scope='global', beta1=0.85, beta2=0.85, window=1, timing='after', exponent=1.0), "
        "schedule=Constant(keep=0.5), units=weights(768 in 8 matrices), step 2, kept 0.5000)"
    )
