"""Models in folders: configuration, weights, and a manifest of the shapes. docs/storage.md is the format."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from platon.deploy import bits, rebuild
from platon.engine.family import heads

FORMAT = 1
MANIFEST, CONFIG, GENERATION = "manifest.json", "config.json", "generation_config.json"
WEIGHTS, SPARSE = "model.safetensors", "sparse.safetensors"


def save(model: nn.Module, folder: str | Path, *, sparse: bool = False, processor: Any = None) -> Path:
    """Write a model, compact or not, to a folder that `load` reads; the folder is there whole or not at all.

    Args:
        model: a transformers model; what `platon.compact` made of one, too.
        folder: it may hold a model that was saved before, which is replaced; anything else in it is refused.
        sparse: write a tensor as bits and values where that takes fewer bytes: for unstructured pruning.
        processor: a tokenizer or image processor to save beside the model.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and ((folder / MANIFEST).exists() or not any(folder.iterdir()))):
        raise ValueError(f"{str(folder)!r} holds something else than a saved model; choose another folder")
    tensors = {name: tensor.cpu() for name, tensor in _tensors(model).items()}
    manifest = {
        "format": FORMAT,
        "class": type(model).__name__,
        "attention": getattr(model.config, "_attn_implementation", None),
        "heads": _heads(model),
        "weights": SPARSE if sparse else WEIGHTS,
        "tensors": {name: {"dtype": _name(t.dtype), "shape": list(t.shape)} for name, t in tensors.items()},
        # Buffers that are made and not stored follow the model into half precision.
        "dtypes": {name: _name(b.dtype) for name, b in model.named_buffers() if name not in tensors},
    }
    with torch.device("meta"):  # only the names and shapes count
        skeleton = _class(manifest)(type(model.config).from_dict(model.config.to_dict()))
    rebuild.cut_to(skeleton, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    _check_names(manifest, skeleton, f"{type(model).__name__} as transformers builds it")
    place = folder.absolute()
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        stored = bits.squeeze(tensors) if sparse else {name: t.contiguous() for name, t in tensors.items()}
        save_file(stored, temporary / str(manifest["weights"]), metadata={"format": "pt"})
        model.config.to_json_file(temporary / CONFIG, use_diff=False)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.to_json_file(temporary / GENERATION)
        if processor is not None:
            processor.save_pretrained(temporary)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _swap(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load(folder: str | Path) -> PreTrainedModel:
    """The model that `save` wrote, bit for bit, ready to evaluate; training and pruning go on as with any model.

    Nothing in the folder is run: the class is one of transformers', the weights are plain tensors.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    tensors = _read_tensors(folder, manifest)
    skeleton = _skeleton(manifest, _read_config(folder, manifest))
    _check_names(manifest, skeleton, f"the {CONFIG} beside it")
    _fill(skeleton, tensors, manifest["dtypes"])
    if _heads(skeleton) != manifest.get("heads"):  # the same matrices can be cut into fewer or more
        raise ValueError(f"{MANIFEST} does not fit the {CONFIG} beside it: the numbers of heads differ")
    if (folder / GENERATION).exists() and skeleton.can_generate():
        skeleton.generation_config = transformers.GenerationConfig.from_dict(_read_json(folder / GENERATION))
    return skeleton.eval()


def size_on_disk(folder: str | Path) -> int:
    """The bytes of the weights in a folder, whoever wrote it."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers under their first names; what is tied appears once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def _heads(model: nn.Module) -> dict[str, int]:
    """How many heads, or groups of them, each attention has, where that is known."""
    try:
        return {family.name: family.count for family in heads(model)}
    except ValueError:
        return {}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype


def _swap(new: Path, folder: Path) -> None:
    """Put the new folder in the place of the old one, which is gone only when the new one is there."""
    old = new.with_name(f"{new.name}.old")
    with suppress(FileNotFoundError):
        folder.replace(old)
    new.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    manifest = _read_json(path)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} has format {manifest.get('format')!r}, this version reads {FORMAT}")
    weights = manifest.get("weights")
    if weights not in (WEIGHTS, SPARSE):
        raise ValueError(
            f"{str(path)!r} names the weights {weights!r}; only {WEIGHTS!r} or {SPARSE!r} beside it is read"
        )
    try:
        for one in manifest["tensors"].values():
            one["shape"] = tuple(int(length) for length in one["shape"])
            one["dtype"] = str(one["dtype"])
        manifest["dtypes"] = {name: _dtype(one) for name, one in manifest.get("dtypes", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{str(path)!r} is damaged: its list of tensors cannot be read") from None
    return manifest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{str(path.parent)!r} holds no saved model: there is no {path.name} in it") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} is damaged: it holds no object")
    return value


def _read_config(folder: Path, manifest: dict[str, Any]) -> Any:
    kind, config = _class(manifest).config_class, _read_json(folder / CONFIG)
    if config.get("model_type") != kind.model_type:
        raise ValueError(
            f"{MANIFEST} does not fit {CONFIG} in {str(folder)!r}: the one names {manifest['class']}, the other is of "
            f"{config.get('model_type')!r}"
        )
    try:
        return kind.from_dict(config)
    except Exception as error:  # transformers checks with exceptions of many kinds
        raise ValueError(f"{str(folder / CONFIG)!r} is damaged: {' '.join(str(error).split())}") from error


def _class(manifest: dict[str, Any]) -> Any:
    name = manifest.get("class")
    found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(f"the manifest names the class {name!r}, which is no model of transformers")
    return found


def _read_tensors(folder: Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the file, once it is clear that they are those of the manifest."""
    path = folder / manifest["weights"]
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    except FileNotFoundError:
        raise ValueError(f"there is no {path.name} in {str(folder)!r}") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {' '.join(str(error).split())}") from None
    wanted = manifest["tensors"]
    try:
        tensors = (
            bits.unsqueeze(stored, {name: one["shape"] for name, one in wanted.items()})
            if path.name == SPARSE
            else stored
        )
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    for name in sorted(wanted.keys() | tensors.keys()):
        said = (wanted[name]["dtype"], wanted[name]["shape"]) if name in wanted else None
        there = (_name(tensors[name].dtype), tuple(tensors[name].shape)) if name in tensors else None
        if said != there:
            raise ValueError(
                f"{MANIFEST} does not fit {path.name} in {str(folder)!r}: {name!r} is {_shown(said)} in the one and "
                f"{_shown(there)} in the other"
            )
    return tensors


def _shown(said: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if said is None else f"{said[0]} {list(said[1])}"


# --- building ---------------------------------------------------------------------------------------------------------


def _skeleton(manifest: dict[str, Any], config: Any) -> PreTrainedModel:
    """The class built from its configuration and cut to the manifest's shapes; the weights are still any."""
    if manifest.get("attention") in ("eager", "sdpa"):  # others depend on the machine
        config._attn_implementation = manifest["attention"]
    # Without memory for the weights, which are replaced; a full-size copy would be the peak of loading a small model.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = _class(manifest)(config)
    model.tie_weights()  # being made empty unties
    rebuild.cut_to(model, {name: one["shape"] for name, one in manifest["tensors"].items()})
    return model


def _check_names(manifest: dict[str, Any], skeleton: nn.Module, other: str) -> None:
    wanted = {name: tuple(one["shape"]) for name, one in manifest["tensors"].items()}
    built = {name: tuple(tensor.shape) for name, tensor in _tensors(skeleton).items()}
    for name in sorted(wanted.keys() | built.keys()):
        if wanted.get(name) != built.get(name):
            said = [("missing" if name not in names else str(list(names[name]))) for names in (wanted, built)]
            raise ValueError(
                f"the manifest does not fit {other}: {name!r} is {said[0]} in the one and {said[1]} in the other"
            )


def _fill(model: nn.Module, tensors: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> None:
    """Put the tensors in, with the file's precision; what is tied to one of them stays tied."""
    own = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        rebuild.check_choice(model, name, tensor)
    new = {id(own[name]): tensor for name, tensor in tensors.items()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                filled = nn.Parameter(new[id(parameter)], requires_grad=parameter.requires_grad)
                module._parameters[key] = made.setdefault(id(parameter), filled)
        for key, buffer in module._buffers.items():
            module._buffers[key] = new.get(id(buffer), buffer)
    for name, buffer in model.named_buffers():
        if name in dtypes and name not in tensors:
            buffer.data = buffer.to(dtypes[name])
