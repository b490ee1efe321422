"""Checkpoints: Trainer's own files, the state of the pruner and of attachments, and a marker that is written last.

A checkpoint counts only if its marker `complete.json` is there and every file has the digest that the marker lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from platon import deploy
from platon.engine.pruner import Pruner
from platon.lab.attachment import Attachment
from platon.lab.errors import UserError
from platon.lab.file import file_sha256, link_error, read_json, remove, sha256, write_json

MARKER, TENSORS, NUMBERS = "complete.json", "pruner.safetensors", "pruner.json"
FORMAT = 1


def fingerprint(parameters: Iterable[nn.Parameter]) -> str:
    """A digest of the weights' bytes, which shows that a pruner's state belongs to a model."""
    return sha256(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for p in parameters)


def write_state(
    folder: Path,
    step: int,
    pruner: Pruner | None,
    extra: dict[str, Any],
    attached: Mapping[str, Attachment] | None = None,
) -> None:
    """Add the states and `extra` (plain values) to a checkpoint that Trainer has written, then the marker."""
    if folder.is_symlink():
        raise link_error(folder)
    numbers: dict[str, Any] = {"extra": extra, "pruner": None, "weights": None}
    if pruner is not None:
        state = pruner.state_dict()
        _save_tensors(state.pop("tensors"), folder / TENSORS)
        numbers |= {"pruner": state, "weights": fingerprint(pruner.units.matrices.values())}
    if attached:
        states = {name: dict(one.state_dict()) for name, one in attached.items()}
        for name, state in states.items():
            _save_tensors(state.pop("tensors", {}), folder / attached_tensors(name))
        numbers["attached"] = states
    write_json(folder / NUMBERS, numbers)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MARKER)
    digests = {path.name: file_sha256(path) for path in files}
    write_json(folder / MARKER, {"format": FORMAT, "step": step, "files": digests})


def read_state(folder: Path, pruner: Pruner | None, attached: Mapping[str, Attachment] | None = None) -> dict[str, Any]:
    """Give the pruner and the attachments the states of a checkpoint; returns its `extra`."""
    numbers = read_numbers(folder)
    if (pruner is None) != (numbers["pruner"] is None):
        raise UserError(f"checkpoint {str(folder)!r} was {'pruned' if pruner is None else 'trained without pruning'}")
    states, attached = numbers.get("attached", {}), attached or {}
    if states.keys() != attached.keys():
        name = min(states.keys() ^ attached.keys())
        raise UserError(f"checkpoint {str(folder)!r} was trained {'with' if name in states else 'without'} a {name}")
    if pruner is not None:
        found = fingerprint(pruner.units.matrices.values())  # before loading: that draws random gates anew
        pruner.load_state_dict({**numbers["pruner"], "tensors": _load_tensors(folder / TENSORS)})
        if numbers["weights"] != found:
            raise UserError(
                f"the pruner's state in {str(folder)!r} belongs to other weights than the model has; "
                "resume model and pruner from the same checkpoint"
            )
    for name, one in attached.items():
        one.load_state_dict({**states[name], "tensors": _load_tensors(folder / attached_tensors(name))})
    extra: dict[str, Any] = numbers["extra"]
    return extra


def attached_tensors(name: str) -> str:
    """The file with the tensors of an attachment."""
    return f"attached-{name}.safetensors"


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{str(path)!r} is damaged: {error}") from None


def read_numbers(folder: Path) -> dict[str, Any]:
    """The plain values of a checkpoint, checked."""
    path = folder / NUMBERS
    numbers = read_json(path)
    if not isinstance(numbers, dict) or not {"extra", "pruner", "weights"} <= numbers.keys():
        raise UserError(f"{str(path)!r} is damaged: it is not what this version of platon writes")
    if not isinstance(numbers["extra"], dict) or not isinstance(numbers.get("attached", {}), dict):
        raise UserError(f"{str(path)!r} is damaged: it is not what this version of platon writes")
    checked_extra(folder, numbers["extra"])
    return numbers


def checked_extra(folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """`extra`, if a run can use it: the step of the best model becomes part of a path, so it must be a whole number."""
    best, seconds = extra.get("best"), extra.get("seconds", 0.0)
    if best is not None and (not isinstance(best, dict) or type(best.get("step")) is not int):
        found = best.get("step") if isinstance(best, dict) else best
        raise UserError(f"{str(folder / NUMBERS)!r} is damaged: its best step is {found!r}")
    if not isinstance(seconds, int | float):
        raise UserError(f"{str(folder / NUMBERS)!r} is damaged: its seconds are {seconds!r}")
    return extra


def load_weights(model: Any, folder: Path) -> None:
    """Load what `save_pretrained` wrote. Not by the file's names: some models (ViT) are saved under other names.

    A model that was trained from a compact folder has smaller matrices than its configuration says: platon loads it.
    What is attached to the model for the training alone, such as the projection of a teacher, stays as it is.
    """
    from platon.lab.tasks.model import quiet  # here, because it imports far more than callbacks need

    compact = (folder / deploy.MANIFEST).is_file()
    with quiet():
        saved = deploy.load(folder) if compact else type(model).from_pretrained(folder)
    model.load_state_dict({**model.state_dict(), **saved.state_dict()})


def complete_weights(model: Any, folder: Path) -> None:
    """Load the weights again if Trainer could not: it skips tensors whose name in the file is not one of the model."""
    files = [path for path in folder.glob("*.safetensors") if path.name != TENSORS]
    files = [path for path in files if not path.name.startswith("attached-")]
    names = {name for path in files for name in safe_open(path, "pt").keys()}  # noqa: SIM118  # it is no dict
    if isinstance(model, PreTrainedModel) and not names <= model.state_dict().keys():
        load_weights(model, folder)


def problem(folder: Path) -> str | None:
    """Why a checkpoint does not count; `None` if it does."""
    if folder.is_symlink():
        return f"{folder.name} is a symbolic link"
    if not (folder / MARKER).exists():
        return f"{folder.name} was not finished"
    try:
        marker = read_json(folder / MARKER)
        if marker["format"] != FORMAT:
            return f"{folder.name} has format {marker['format']}, this version of platon reads {FORMAT}"
        if any(name in ("", "..") or Path(name).name != name for name in marker["files"]):
            return f"{folder.name} is damaged: its marker cannot be read"  # it names files outside the checkpoint
        for name, digest in marker["files"].items():
            if not (folder / name).is_file():
                return f"{folder.name} has lost {name}"
            if file_sha256(folder / name) != digest:
                return f"{folder.name} is damaged: {name} is not what was written"
    except (UserError, KeyError, TypeError, AttributeError):
        return f"{folder.name} is damaged: its marker cannot be read"
    return None


def steps(folder: Path) -> dict[int, Path]:
    """All checkpoints in a folder, complete or not, by step. Links are none."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if path.is_dir() and not path.is_symlink() and number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def has_settings(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether a checkpoint is of a run with these settings; settings newer than the checkpoint are not compared."""
    theirs = read_numbers(folder)["extra"].get("settings", {})
    return isinstance(theirs, dict) and all(theirs.get(name, value) == value for name, value in settings.items())


def last_complete(folder: Path, settings: dict[str, Any] | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that counts, and a sentence for each newer one that does not.

    With `settings`, a checkpoint of a run with other settings does not count.
    """
    problems: list[str] = []
    for path in reversed(steps(folder).values()):
        found = problem(path)
        try:
            if found is None and settings is not None and not has_settings(path, settings):
                found = f"{path.name} is of a run with other settings"
        except UserError:
            found = f"{path.name} is damaged: {NUMBERS} cannot be read"
        if found is None:
            return path, problems
        problems.append(found)
    return None, problems


def discard(paths: Iterable[Path]) -> None:
    """Remove checkpoints, the marker first, so that a half-removed one does not count. Links are left alone."""
    for path in paths:
        if not path.is_symlink():
            (path / MARKER).unlink(missing_ok=True)
            remove(path)


def rotate(folder: Path, keep: int, spare: Path | None = None) -> None:
    """Keep the newest `keep` checkpoints that have a marker, and remove what is older, except `spare`."""
    marked = [path for path in steps(folder).values() if (path / MARKER).exists()]
    if len(marked) >= keep:
        oldest = int(marked[-keep].name.removeprefix("checkpoint-"))
        discard(path for step, path in steps(folder).items() if step < oldest and path != spare)
