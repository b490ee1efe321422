"""Checkpoints that count: Trainer's own files, the pruner's state, and a marker written last."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from platon.engine.pruner import Pruner
from platon.lab.errors import UserError
from platon.lab.record import file_sha256, read_json, sha256, write_json

MARKER, TENSORS, NUMBERS = "complete.json", "pruner.safetensors", "pruner.json"
FORMAT = 1


def fingerprint(parameters: Iterable[nn.Parameter]) -> str:
    """A digest of the weights' bytes: it ties a pruner's state to the model that it was taken with."""
    return sha256(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for p in parameters)


def seal(folder: Path, step: int, pruner: Pruner | None, extra: dict[str, Any]) -> None:
    """Add the pruner's state and `extra` to a checkpoint of Trainer's, then the marker that makes it count."""
    numbers: dict[str, Any] = {"extra": extra, "pruner": None, "weights": None}
    if pruner is not None:
        state = pruner.state_dict()
        save_file({name: tensor.contiguous() for name, tensor in state.pop("tensors").items()}, folder / TENSORS)
        numbers |= {"pruner": state, "weights": fingerprint(pruner.units.matrices.values())}
    write_json(folder / NUMBERS, numbers)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MARKER)
    digests = {path.name: file_sha256(path) for path in files}
    write_json(folder / MARKER, {"format": FORMAT, "step": step, "files": digests})


def unseal(folder: Path, pruner: Pruner | None) -> dict[str, Any]:
    """Give the pruner the state that a sealed checkpoint holds; returns the `extra` that was sealed with it."""
    numbers = read_json(folder / NUMBERS)
    if (pruner is None) != (numbers["pruner"] is None):
        raise UserError(f"checkpoint {str(folder)!r} was {'pruned' if pruner is None else 'trained without pruning'}")
    if pruner is not None:
        try:
            tensors = load_file(folder / TENSORS)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{str(folder / TENSORS)!r} is damaged: {error}") from None
        found = fingerprint(pruner.units.matrices.values())  # before the state brings random gates back
        pruner.load_state_dict({**numbers["pruner"], "tensors": tensors})
        if numbers["weights"] != found:
            raise UserError(
                f"the pruner's state in {str(folder)!r} belongs to other weights than the model has; "
                "resume model and pruner from the same checkpoint"
            )
    return checked_extra(folder, numbers["extra"])


def checked_extra(folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """What rides along; the step of the best model names a folder, so it must be a number."""
    best = extra.get("best")
    if best is not None and type(best.get("step")) is not int:
        raise UserError(f"{str(folder / NUMBERS)!r} is damaged: its best step is {best.get('step')!r}")
    return extra


def load_weights(model: Any, folder: Path) -> None:
    """Give the model the weights that `save_pretrained` wrote: some models (ViT) are saved under other names."""
    model.load_state_dict(type(model).from_pretrained(folder).state_dict())


def complete_weights(model: Any, folder: Path) -> None:
    """Load what Trainer could not: it looks for the file's names in the model, and passes over those it misses."""
    files = [path for path in folder.glob("*.safetensors") if path.name != TENSORS]
    names = {name for path in files for name in safe_open(path, "pt").keys()}  # noqa: SIM118  # it is no dict
    if isinstance(model, PreTrainedModel) and not names <= model.state_dict().keys():
        load_weights(model, folder)


def problem(folder: Path) -> str | None:
    """Why a checkpoint does not count; `None` if it does."""
    if not (folder / MARKER).exists():
        return f"{folder.name} was not finished"
    try:
        marker = read_json(folder / MARKER)
        if marker["format"] != FORMAT:
            return f"{folder.name} has format {marker['format']}, this version of platon reads {FORMAT}"
        if any(name in ("", "..") or Path(name).name != name for name in marker["files"]):
            return f"{folder.name} is damaged: its marker cannot be read"  # it names files elsewhere
        for name, digest in marker["files"].items():
            if not (folder / name).is_file():
                return f"{folder.name} has lost {name}"
            if file_sha256(folder / name) != digest:
                return f"{folder.name} is damaged: {name} is not what was written"
    except (UserError, KeyError, TypeError, AttributeError):
        return f"{folder.name} is damaged: its marker cannot be read"
    return None


def steps(folder: Path) -> dict[int, Path]:
    """All checkpoints of a folder, complete or not, by step."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if path.is_dir() and number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def is_of(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether a complete checkpoint belongs to a run with these settings; one that came later than it had no say."""
    extra = read_json(folder / NUMBERS).get("extra")
    theirs = extra.get("settings", {}) if isinstance(extra, dict) else {}
    return all(theirs.get(name, value) == value for name, value in settings.items())


def last_complete(folder: Path, settings: dict[str, Any] | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that counts, and a sentence for each newer one that does not.

    Where `settings` are given, one that was trained with others does not count.
    """
    problems: list[str] = []
    for path in reversed(steps(folder).values()):
        found = problem(path)
        if found is None and settings is not None and not is_of(path, settings):
            found = f"{path.name} is of a run with other settings"
        if found is None:
            return path, problems
        problems.append(found)
    return None, problems


def discard(paths: Iterable[Path]) -> None:
    """Remove checkpoints, the marker first, so that none is ever half there and marked."""
    for path in paths:
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def rotate(folder: Path, keep: int, spare: Path | None = None) -> None:
    """Keep the newest `keep` checkpoints that carry a marker, and remove what is older, except `spare`."""
    marked = [path for path in steps(folder).values() if (path / MARKER).exists()]
    if len(marked) >= keep:
        oldest = int(marked[-keep].name.removeprefix("checkpoint-"))
        discard(path for step, path in steps(folder).items() if step < oldest and path != spare)
