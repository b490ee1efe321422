"""What users read from a pruner, and which states it takes back."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import platon

Make = Callable[[], nn.Module]


def loss_of(net: nn.Module, number: int = 0) -> Tensor:
    """The loss on batch `number`."""
    data = torch.Generator().manual_seed(number)
    x, y = torch.randn(6, 4, generator=data), torch.randint(0, 2, (6,), generator=data)
    return nn.functional.cross_entropy(net(x), y)


def train(pruner: platon.Pruner, net: nn.Module, optimizer: optim.Optimizer, until: int) -> None:
    while pruner.step_count < until:
        optimizer.zero_grad()
        loss_of(net, pruner.step_count).backward()
        optimizer.step()


def built(
    net: nn.Module,
    schedule: platon.Schedule,
    score: platon.Score | None = None,
    units: platon.Units | None = None,
    until: int = 0,
) -> tuple[platon.Pruner, optim.Optimizer]:
    """A pruner on plain SGD, trained for some steps."""
    optimizer = optim.SGD(net.parameters(), lr=0.5)
    pruner = platon.Pruner(net, optimizer, score=score or platon.Platon(window=1), schedule=schedule, units=units)
    train(pruner, net, optimizer, until)
    return pruner, optimizer


def grown(pruner: platon.Pruner) -> int:
    """How many weights that the last selection removed are not zero."""
    matrices = pruner.units.matrices
    return sum(int(matrices[name].detach()[~mask].count_nonzero()) for name, mask in pruner.masks().items())


# --- what users read --------------------------------------------------------------------------------------------------


def test_before_the_first_selection_all_is_kept(net: nn.Module) -> None:
    pruner, optimizer = built(net, platon.Cubic(final=0.2, total=10, warmup=4, cooldown=0, every=1))
    for step in (0, 3):
        train(pruner, net, optimizer, step)
        assert (pruner.step_count, pruner.kept(), pruner.keep, pruner.cut) == (step, 1.0, 1.0, None)
        assert all(mask.all() for mask in pruner.masks().values())


@pytest.mark.parametrize(
    "score", [platon.Platon(window=1), platon.Magnitude(), platon.Platon(scope="matrix", window=1)], ids=str
)
def test_masks_are_the_pattern_of_the_weights(net: nn.Module, score: platon.Score) -> None:
    pruner, _ = built(net, platon.Constant(0.3), score, until=4)
    masks = pruner.masks()
    assert list(masks) == list(pruner.units.matrices)
    for name, matrix in pruner.units.matrices.items():
        mask = masks[name]
        assert (mask.dtype, mask.shape, mask.device) == (torch.bool, matrix.shape, matrix.device)
        # Every weight here has a gradient, so none that is kept is zero, and the two patterns are one.
        assert torch.equal(mask, matrix.detach() != 0)
    assert sum(int(mask.sum()) for mask in masks.values()) / pruner.units.count == pruner.kept()


def test_masks_are_the_callers_own(net: nn.Module) -> None:
    pruner, _ = built(net, platon.Constant(0.3), until=1)
    for mask in pruner.masks().values():
        mask.fill_(True)
    assert not all(mask.all() for mask in pruner.masks().values())


@pytest.mark.parametrize("keep", [0.5, 1 / 3, 0.001, 1e-9])
def test_kept_is_exact(net: nn.Module, keep: float) -> None:
    pruner, _ = built(net, platon.Constant(keep), until=2)
    assert pruner.kept() == max(1, round(keep * 768)) / 768
    assert pruner.keep == keep


def test_kept_with_a_count_for_each_matrix(net: nn.Module) -> None:
    """Rounding happens a matrix at a time, and `kept` tells what came out."""
    pruner, _ = built(net, platon.Constant(0.01), platon.Platon(scope="matrix", window=1), until=2)
    counts = [int(mask.sum()) for mask in pruner.masks().values()]
    assert counts == [1] * 8, "1 % of 64 or 128 weights"
    assert pruner.kept() == 8 / 768


def test_cut_is_the_lowest_score_that_stays(net: nn.Module) -> None:
    pruner, _ = built(net, platon.Constant(0.25), platon.Magnitude(), until=3)
    kept = torch.cat(
        [m.detach()[mask] for m, mask in zip(pruner.units.matrices.values(), pruner.masks().values(), strict=True)]
    )
    assert pruner.cut == float(kept.abs().min())
    other, _ = built(net, platon.Constant(0.25), platon.Magnitude(scope="matrix"), until=3)
    assert other.cut is None, "each matrix has its own"


def test_ramp_of_the_schedule(net: nn.Module) -> None:
    schedule = platon.Cubic(final=0.1, total=12, warmup=2, cooldown=3, every=1)
    pruner, optimizer = built(net, schedule)
    for step in range(1, 13):
        train(pruner, net, optimizer, step)
        keep = schedule(step)
        assert pruner.step_count == step
        if keep is not None:
            assert pruner.keep == keep
            assert pruner.kept() == round(keep * 768) / 768
    assert pruner.keep == 0.1


def test_between_masks_zeroed_weights_grow(net: nn.Module) -> None:
    """`masks` and `kept` speak of the last selection meanwhile."""
    schedule = platon.Cubic(final=0.2, total=20, warmup=0, cooldown=5, every=4)
    pruner, optimizer = built(net, schedule, until=4)
    masks, kept = pruner.masks(), pruner.kept()
    assert grown(pruner) == 0
    assert kept == round(schedule(4) * 768) / 768
    for step in (5, 6, 7):
        train(pruner, net, optimizer, step)
        assert grown(pruner) > 0
        assert (pruner.kept(), pruner.keep) == (kept, schedule(4))
        assert all(torch.equal(mask, masks[name]) for name, mask in pruner.masks().items())
    train(pruner, net, optimizer, 8)
    assert grown(pruner) == 0
    assert pruner.kept() < kept
    for step in range(15, 21):  # the final phase: a mask at every step
        train(pruner, net, optimizer, step)
        assert (grown(pruner), pruner.keep) == (0, 0.2)


def test_pruned_weight_comes_back_from_zero(net: nn.Module) -> None:
    """What the optimizer gives it in that one step is all it has."""
    pruner, optimizer = built(net, platon.Constant(0.5), until=1)
    for step in range(2, 30):
        before = pruner.masks()
        train(pruner, net, optimizer, step)
        for name, mask in pruner.masks().items():
            back = mask & ~before[name]
            if back.any():
                matrix = pruner.units.matrices[name]
                torch.testing.assert_close(matrix.detach()[back], -0.5 * matrix.grad[back])
                return
    pytest.fail("no weight ever came back")


def test_tied_weights_count_once(net: nn.Module) -> None:
    net.blocks[1].up.weight = net.blocks[0].up.weight
    pruner, _ = built(net, platon.Constant(0.5), until=3)
    assert len(pruner.masks()) == 7
    assert pruner.units.count == 768 - 128
    assert sum(int(mask.sum()) for mask in pruner.masks().values()) == 320
    assert net.blocks[1].up.weight is net.blocks[0].up.weight


def test_frozen_weights_are_left_out(net: nn.Module) -> None:
    net.blocks[0].requires_grad_(False)
    frozen = {name: parameter.clone() for name, parameter in net.blocks[0].named_parameters()}
    pruner, _ = built(net, platon.Constant(0.1), until=3)
    assert all(name.startswith("blocks.1.") for name in pruner.masks())
    assert all(torch.equal(parameter, frozen[name]) for name, parameter in net.blocks[0].named_parameters())


def test_single_weight() -> None:
    """The smallest model that there is: N = 1, so k = 1."""
    layer = nn.Linear(1, 1)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    pruner = platon.Pruner(
        layer,
        optimizer,
        schedule=platon.Constant(0.1),
        units=platon.Units({"w": layer.weight}),
        score=platon.Platon(window=1),
    )
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert (pruner.kept(), pruner.step_count) == (1.0, 1)
    assert layer.weight.item() != 0


def test_weights_may_be_of_several_types(net: nn.Module) -> None:
    """Double and half precision side by side; the state is float32 for both."""
    net.blocks[0].double()
    net.blocks[1].bfloat16()
    optimizer = optim.SGD(net.blocks.parameters(), lr=0.1)
    pruner = platon.Pruner(net, optimizer, schedule=platon.Constant(0.5), score=platon.Platon(window=1))
    for parameter in net.blocks.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert sum(int(mask.sum()) for mask in pruner.masks().values()) == 384
    assert grown(pruner) == 0
    state = pruner.state_dict()["tensors"]
    assert {tensor.dtype for tensor in state.values()} == {torch.float32, torch.uint8}


# --- checkpoints ------------------------------------------------------------------------------------------------------


def copied(pruner: platon.Pruner) -> dict[str, Any]:
    state = pruner.state_dict()
    return {**state, "tensors": {name: tensor.clone() for name, tensor in state["tensors"].items()}}


def assert_unchanged(pruner: platon.Pruner, before: dict[str, Any]) -> None:
    now = pruner.state_dict()
    for name, tensor in before["tensors"].items():
        assert torch.equal(tensor, now["tensors"][name]), name
    assert {**before, "tensors": None} == {**now, "tensors": None}


def test_state_is_lean(net: nn.Module) -> None:
    """Two float32 and a bit a weight; one float32 more with a window."""
    for score, floats in ((platon.Platon(window=1), 2), (platon.Platon(window=10), 3), (platon.Magnitude(), 0)):
        pruner, _ = built(net, platon.Constant(0.5), score)
        size = sum(tensor.nbytes for tensor in pruner.state_dict()["tensors"].values())
        assert size - (4 * 768 * floats + 768 // 8) <= 4 * 8, "and a number a matrix"


def test_state_is_plain_numbers_and_tensors(net: nn.Module) -> None:
    pruner, _ = built(net, platon.Constant(0.5), until=3)
    state = pruner.state_dict()
    tensors = state.pop("tensors")
    assert all(type(tensor) is Tensor and tensor.is_contiguous() for tensor in tensors.values())
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    assert state["step_count"] == 3
    assert state["method"] == "Platon"


def test_loading_copies(make_net: Make) -> None:
    """What was loaded goes its own way."""
    net = make_net()
    source, optimizer = built(net, platon.Constant(0.5), until=2)
    target, _ = built(make_net(), platon.Constant(0.5))
    target.load_state_dict(source.state_dict())
    before = copied(target)
    train(source, net, optimizer, 4)
    assert_unchanged(target, before)


def test_own_state_loads(net: nn.Module) -> None:
    pruner, _ = built(net, platon.Constant(0.5), until=2)
    before = copied(pruner)
    pruner.load_state_dict(pruner.state_dict())
    assert_unchanged(pruner, before)


def other_model(state: dict[str, Any]) -> None:
    state["shapes"] = {name.replace("blocks", "layers"): shape for name, shape in state["shapes"].items()}


def wider_model(state: dict[str, Any]) -> None:
    state["shapes"] = {name: [2 * size for size in shape] for name, shape in state["shapes"].items()}


def more_matrices(state: dict[str, Any]) -> None:
    state["shapes"] = {**state["shapes"], "blocks.2.query.weight": [8, 8]}


def fewer_matrices(state: dict[str, Any]) -> None:
    state["shapes"] = {name: shape for name, shape in state["shapes"].items() if "down" not in name}


def other_method(state: dict[str, Any]) -> None:
    state.update(method="Magnitude", settings={"scope": "global"})


def other_setting(state: dict[str, Any]) -> None:
    state["settings"] = {**state["settings"], "beta2": 0.5}


def unknown_setting(state: dict[str, Any]) -> None:
    state["settings"] = {**state["settings"], "beta3": 0.5}


def other_format(state: dict[str, Any]) -> None:
    state["format"] = 1
    del state["kept_count"]


def no_count(state: dict[str, Any]) -> None:
    del state["step_count"]


def no_tensor(state: dict[str, Any]) -> None:
    del state["tensors"]["blocks.1.out.weight:uncertainty"]


def short_tensor(state: dict[str, Any]) -> None:
    state["tensors"]["blocks.1.out.weight:mask"] = torch.zeros(3, dtype=torch.uint8)


def half_tensor(state: dict[str, Any]) -> None:
    state["tensors"]["blocks.0.up.weight:sensitivity"] = torch.zeros(128, dtype=torch.float16)


def list_for_a_tensor(state: dict[str, Any]) -> None:
    state["tensors"]["blocks.0.up.weight:sensitivity"] = [0.0] * 128


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_model, "parameter 'blocks.0.query.weight' is only in the pruner"),
        (wider_model, "parameter 'blocks.0.query.weight' is [16, 16] in the state and [8, 8] in the pruner"),
        (more_matrices, "parameter 'blocks.2.query.weight' is only in the state"),
        (fewer_matrices, "parameter 'blocks.0.down.weight' is only in the pruner"),
        (other_method, "method is 'Magnitude' in the state and 'Platon' in the pruner"),
        (other_setting, "setting 'beta2' is 0.5 in the state and 0.85 in the pruner"),
        (unknown_setting, "setting 'beta3' is only in the state"),
        (other_format, "its format is 1, this version of platon reads 2"),
        (no_count, "it has no 'step_count', so it is not a whole pruner state"),
        (no_tensor, "tensor 'blocks.1.out.weight:uncertainty' is missing in the state"),
        (short_tensor, "tensor 'blocks.1.out.weight:mask' is torch.uint8 (3,) in the state and torch.uint8 (8,)"),
        (half_tensor, "tensor 'blocks.0.up.weight:sensitivity' is torch.float16 (128,) in the state"),
        (list_for_a_tensor, "tensor 'blocks.0.up.weight:sensitivity' is missing in the state"),
        (dict.clear, "it has no 'format', so it is not a whole pruner state"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_state_of_something_else_is_refused(
    make_net: Make, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    """One sentence with the first difference, and the pruner is as before."""
    source, _ = built(make_net(), platon.Constant(0.5), until=3)
    state = copied(source)
    change(state)
    net = make_net()
    pruner, optimizer = built(net, platon.Constant(0.5), until=1)
    before = copied(pruner)
    with pytest.raises(ValueError, match=r"^this state does not fit the pruner: ") as refusal:
        pruner.load_state_dict(state)
    assert str(refusal.value).startswith(f"this state does not fit the pruner: {sentence}")
    assert "\n" not in str(refusal.value)
    assert_unchanged(pruner, before)
    train(pruner, net, optimizer, 2)


def test_state_of_a_real_other_method_is_refused(make_net: Make) -> None:
    magnitude, _ = built(make_net(), platon.Constant(0.5), platon.Magnitude(), until=1)
    pruner, _ = built(make_net(), platon.Constant(0.5))
    with pytest.raises(ValueError, match="method is 'Magnitude' in the state and 'Platon' in the pruner"):
        pruner.load_state_dict(magnitude.state_dict())


def test_state_of_other_units_is_refused(make_net: Make) -> None:
    net = make_net()
    part, _ = built(net, platon.Constant(0.5), units=platon.weights(net, exclude="up"), until=1)
    pruner, _ = built(make_net(), platon.Constant(0.5))
    with pytest.raises(ValueError, match=r"parameter 'blocks.0.up.weight' is only in the pruner"):
        pruner.load_state_dict(part.state_dict())
