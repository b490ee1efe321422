"""Checkpoints: what counts, what does not and why, and what is never removed."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from platon import Constant, Platon, Pruner
from platon.lab import checkpoint
from platon.lab.checkpoint import MARKER, NUMBERS, TENSORS
from platon.lab.errors import UserError

Make = Callable[[], nn.Module]


def pruned(net: nn.Module, steps: int = 3, score: Platon | None = None) -> Pruner:
    """A pruner that has seen some steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner = Pruner(net, optimizer, score=score, schedule=Constant(0.25))
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        net(torch.randn(8, 4, generator=random)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return pruner


def written(folder: Path, step: int) -> Path:
    """What Trainer leaves of a checkpoint: nobody has sealed it yet."""
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(bytes(range(200)))
    (place / "trainer_state.json").write_text("{}")
    return place


def sealed(folder: Path, *steps: int) -> list[Path]:
    places = [written(folder, step) for step in steps]
    for step, place in zip(steps, places, strict=True):
        checkpoint.write_state(place, step, None, {})
    return places


def numbers(folder: Path) -> list[int]:
    return list(checkpoint.steps(folder))


# --- states -----------------------------------------------------------------------------------------------------------


def test_state_and_extra_come_back(make_net: Make, tmp_path: Path) -> None:
    net = make_net()
    pruner = pruned(net)
    place = written(tmp_path, 3)
    checkpoint.write_state(place, 3, pruner, {"seconds": 1.5, "best": {"step": 2, "value": 0.5}})
    assert checkpoint.problem(place) is None
    assert set(json.loads((place / MARKER).read_text())["files"]) == {
        "model.safetensors",
        "trainer_state.json",
        NUMBERS,
        TENSORS,
    }
    twin = make_net()
    other = pruned(twin, steps=0)
    twin.load_state_dict(net.state_dict())
    assert checkpoint.read_state(place, other) == {"seconds": 1.5, "best": {"step": 2, "value": 0.5}}
    mine, theirs = pruner.state_dict(), other.state_dict()
    assert mine.pop("tensors").keys() == theirs["tensors"].keys()
    for name, tensor in pruner.state_dict()["tensors"].items():
        assert torch.equal(tensor, theirs["tensors"][name])
    assert {**mine, "tensors": 0} == {**theirs, "tensors": 0}


def test_without_a_pruner_there_is_extra_alone(tmp_path: Path) -> None:
    [place] = sealed(tmp_path, 4)
    assert checkpoint.read_state(place, None) == {}
    assert not (place / TENSORS).exists()


def test_weights_of_another_model_are_refused(make_net: Make, tmp_path: Path) -> None:
    net = make_net()
    place = written(tmp_path, 3)
    checkpoint.write_state(place, 3, pruned(net), {})
    twin = make_net()
    twin.load_state_dict(net.state_dict())
    with torch.no_grad():
        twin.blocks[1].up.weight[3, 4] += 1e-6  # type: ignore[index, union-attr]
    with pytest.raises(UserError, match="belongs to other weights than the model has; resume model and pruner from"):
        checkpoint.read_state(place, pruned(twin, steps=0))


def test_another_setting_or_model_is_refused_by_name(make_net: Make, tmp_path: Path) -> None:
    place = written(tmp_path, 3)
    checkpoint.write_state(place, 3, pruned(make_net()), {})
    with pytest.raises(ValueError, match=r"setting 'beta1' is 0.85 in the state and 0.5 in the pruner"):
        checkpoint.read_state(place, pruned(make_net(), steps=0, score=Platon(beta1=0.5)))
    wider = make_net()
    wider.blocks[0].up = nn.Linear(8, 20)  # type: ignore[index, union-attr]
    wider.blocks[0].down = nn.Linear(20, 8)  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match=r"parameter 'blocks.0.up.weight' is \[16, 8\] in the state and \[20, 8\]"):
        checkpoint.read_state(place, pruned(wider, steps=0))


def test_pruned_and_unpruned_do_not_mix(make_net: Make, tmp_path: Path) -> None:
    [dense] = sealed(tmp_path, 1)
    with pytest.raises(UserError, match="checkpoint-1' was trained without pruning"):
        checkpoint.read_state(dense, pruned(make_net(), steps=0))
    place = written(tmp_path, 2)
    checkpoint.write_state(place, 2, pruned(make_net()), {})
    with pytest.raises(UserError, match="checkpoint-2' was pruned"):
        checkpoint.read_state(place, None)


def test_fingerprint_tells_single_bits_and_types_apart() -> None:
    matrix = nn.Parameter(torch.zeros(3, 5))
    before = checkpoint.fingerprint([matrix])
    assert checkpoint.fingerprint([nn.Parameter(torch.zeros(5, 3).t())]) == before  # the order in memory is no matter
    assert checkpoint.fingerprint([nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16))]) != before
    with torch.no_grad():
        matrix[1, 1] = -0.0
    assert checkpoint.fingerprint([matrix]) != before


# --- what counts ------------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def newer(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    (MARKER, Path.unlink, "checkpoint-7 was not finished"),
    (MARKER, cut_short, "checkpoint-7 is damaged: its marker cannot be read"),
    (MARKER, lambda file: file.write_bytes(b"\xff\xfe"), "checkpoint-7 is damaged: its marker cannot be read"),
    (MARKER, lambda file: file.write_text("[]"), "checkpoint-7 is damaged: its marker cannot be read"),
    (MARKER, lambda file: file.write_text('{"format": 1}'), "checkpoint-7 is damaged: its marker cannot be read"),
    (MARKER, newer, "checkpoint-7 has format 2, this version of platon reads 1"),
    ("model.safetensors", flip, "checkpoint-7 is damaged: model.safetensors is not what was written"),
    ("model.safetensors", cut_short, "checkpoint-7 is damaged: model.safetensors is not what was written"),
    ("trainer_state.json", Path.unlink, "checkpoint-7 has lost trainer_state.json"),
    (NUMBERS, flip, f"checkpoint-7 is damaged: {NUMBERS} is not what was written"),
]


@pytest.mark.parametrize(("name", "damage", "sentence"), DAMAGE)
def test_damage_is_found_and_the_one_before_counts(
    name: str, damage: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    before, last = sealed(tmp_path, 5, 7)
    assert checkpoint.last_complete(tmp_path) == (last, [])
    damage(last / name)
    assert checkpoint.problem(last) == sentence
    assert checkpoint.last_complete(tmp_path) == (before, [sentence])


def test_damaged_state_behind_a_sound_marker_is_one_sentence(make_net: Make, tmp_path: Path) -> None:
    place = written(tmp_path, 3)
    checkpoint.write_state(place, 3, pruned(make_net()), {})
    cut_short(place / TENSORS)
    with pytest.raises(UserError, match=f"{TENSORS}' is damaged: "):
        checkpoint.read_state(place, pruned(make_net(), steps=0))
    save_file({"other": torch.zeros(1)}, place / TENSORS)
    with pytest.raises(ValueError, match=r"this state does not fit the pruner: tensor .* is missing in the state"):
        checkpoint.read_state(place, pruned(make_net(), steps=0))
    (place / NUMBERS).write_text("{")
    with pytest.raises(UserError, match=f"{NUMBERS}' is damaged: "):
        checkpoint.read_state(place, pruned(make_net(), steps=0))


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    for name in ("checkpoint-old", "checkpoint-", "checkpoint-3.bak", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-9").write_text("a file")
    sealed(tmp_path, 2, 10)
    assert numbers(tmp_path) == [2, 10]  # by number: 10 is after 2
    checkpoint.rotate(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-",
        "checkpoint-10",
        "checkpoint-3.bak",
        "checkpoint-9",
        "checkpoint-old",
        "runs",
    ]
    assert checkpoint.last_complete(tmp_path / "nothing") == (None, [])


def test_files_beside_those_that_were_sealed_do_no_harm(tmp_path: Path) -> None:
    [place] = sealed(tmp_path, 2)
    (place / "notes.txt").write_text("mine")
    (place / "folder").mkdir()
    assert checkpoint.problem(place) is None


# --- rotation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("complete", "unfinished", "keep", "left"),
    [
        ((1, 2, 3), (), 2, [2, 3]),
        ((1, 2, 3), (), 5, [1, 2, 3]),
        ((1, 2), (3,), 1, [2, 3]),  # killed between Trainer's own files and the marker: 2 is the last that counts
        ((1,), (2, 3, 4), 1, [1, 2, 3, 4]),
        ((1, 4), (2, 3), 1, [4]),  # what was left unfinished goes once something newer is complete
        ((2, 4), (1, 3), 2, [2, 3, 4]),
        ((), (1, 2), 1, [1, 2]),
    ],
)
def test_rotation(
    complete: Iterable[int], unfinished: Iterable[int], keep: int, left: list[int], tmp_path: Path
) -> None:
    sealed(tmp_path, *complete)
    for step in unfinished:
        written(tmp_path, step)
    last = checkpoint.last_complete(tmp_path)[0]
    checkpoint.rotate(tmp_path, keep)
    assert numbers(tmp_path) == left
    assert checkpoint.last_complete(tmp_path)[0] == last


def test_rotation_spares_what_it_is_told_to(tmp_path: Path) -> None:
    first, _, _ = sealed(tmp_path, 1, 2, 3)
    checkpoint.rotate(tmp_path, 1, spare=first)
    assert numbers(tmp_path) == [1, 3]


def test_discarding_takes_the_marker_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [place] = sealed(tmp_path, 1)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)  # killed before anything else went
    checkpoint.discard([place])
    assert checkpoint.problem(place) == "checkpoint-1 was not finished"


def test_sealing_again_replaces_the_marker(make_net: Make, tmp_path: Path) -> None:
    [place] = sealed(tmp_path, 3)
    flip(place / "model.safetensors")  # Trainer writes the same step once more
    assert checkpoint.problem(place) is not None
    pruner = pruned(make_net())
    checkpoint.write_state(place, 3, pruner, {})
    assert checkpoint.problem(place) is None
    assert load_file(place / TENSORS).keys() == pruner.state_dict()["tensors"].keys()
