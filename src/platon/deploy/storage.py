"""Models in folders: configuration, weights, and a manifest of the shapes. docs/storage.md describes the format."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from platon.deploy import bitmask, rebuild, replacement, rounding, sentence, skeleton
from platon.deploy.collection import paused_collection
from platon.deploy.embedding import PackedEmbedding, packed_embeddings
from platon.deploy.manifest import (
    CONFIG,
    GENERATION,
    MANIFEST,
    SPARSE,
    WEIGHTS,
    Manifest,
    TensorType,
    attention_of,
    read_json,
    read_manifest,
    unchanged,
)
from platon.deploy.mapping import mapped
from platon.deploy.model_class import check_class, check_modules
from platon.deploy.place import place_of, swap
from platon.deploy.rounding import PRECISIONS

__all__ = ["CONFIG", "MANIFEST", "SPARSE", "WEIGHTS", "load", "save", "size_on_disk"]


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    sparse: bool = False,
    processor: Any = None,
    precision: str = "float32",
    embeddings: str | None = None,
) -> Path:
    """Write a model to a folder that `load` reads; the folder is complete or not there at all.

    Args:
        model: of transformers, or a `SentenceTransformer`; also what `platon.compact` or `platon.sparsify` made of one.
        folder: may hold a model that was saved before, which is replaced; a folder with other contents is refused. If
            it is a symbolic link, what it points to is replaced.
        sparse: write a tensor as bits and values where that takes fewer bytes: for unstructured pruning.
        processor: a tokenizer or image processor to save beside the model.
        precision: "float16" stores matrices in half the bytes; they are rounded, and computed with in float32.
        embeddings: "int8" stores embedding tables in a quarter of the bytes, with a scale for each row; they are
            rounded, stay in int8 in memory, and the model is for inference. Tables that the output layer shares are
            left as they are.
    """
    form = Form(sparse, precision, embeddings)
    if not isinstance(model, PreTrainedModel) and not sentence.is_one(model):
        raise TypeError(f"model must be a model of transformers or a SentenceTransformer, got {type(model).__name__}")
    folder = Path(folder)
    place = place_of(folder)
    temporary = place.with_name(f".{place.name}.{uuid4().hex}")
    try:
        if isinstance(model, PreTrainedModel):
            _write(temporary, model, processor, form)
        else:
            sentence.save(model, temporary, lambda inner, place: _write(place, inner, None, form))
        swap(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load(folder: str | Path) -> Any:
    """The model that `save` wrote, bit for bit, in evaluation mode; it can be trained and pruned like any other.

    A model that `platon.sparsify` made comes back sparse, for inference alone; its arrays are mapped from the file, and
    no dense matrix is made. Nothing in the folder is run: the class
    is one of transformers', the weights are plain tensors.
    """
    folder = Path(folder)
    if (folder / sentence.MODULES).exists():
        return sentence.load(folder, _load)
    return _load(folder)


def _load(folder: Path) -> PreTrainedModel:
    manifest = read_manifest(folder)
    with unchanged(manifest, folder), paused_collection():
        return _build(folder, manifest)


def _build(folder: Path, manifest: Manifest) -> PreTrainedModel:
    tensors = _read_tensors(folder, manifest)
    built = skeleton.build(manifest, folder)
    model = built.model.eval()
    _fill(model, tensors, manifest)
    skeleton.check_heads(manifest, model)
    if (folder / GENERATION).exists() and model.can_generate():
        settings = read_json(folder / GENERATION)
        try:
            model.generation_config = transformers.GenerationConfig.from_dict(settings)
        except Exception as error:  # transformers raises exceptions of many kinds
            raise ValueError(f"{str(folder / GENERATION)!r} is damaged: {' '.join(str(error).split())}") from error
    if manifest.replaced:
        replacement.finish(model)
    if manifest.replaced or not built.as_configured:
        save_with_manifest(model)
    return model


def size_on_disk(folder: str | Path) -> int:
    """The bytes of the weights in a folder, also in one that transformers wrote."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def save_with_manifest(model: nn.Module) -> None:
    """Make `save_pretrained`, which Trainer calls too, write a folder that `load` opens.

    For models that a configuration alone does not describe: transformers' own method would write a folder that nothing
    opens.
    """
    for inner in sentence.inner_models(model):
        inner.__dict__["save_pretrained"] = SavePretrained(inner)


class SavePretrained:
    """`save_pretrained` of a compact or sparsified model; an object, which is copied and pickled with the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Write the model beside whatever else is in the folder; other options of transformers change nothing."""
        if push_to_hub:
            raise ValueError("a compact or sparsified model is not pushed; save it, then upload the folder")
        if not is_main_process:
            return
        folder = Path(save_directory)
        temporary = folder / f".{uuid4().hex}"
        try:
            _write(temporary, self.model, None, Form(), state_dict)
            (folder / MANIFEST).unlink(missing_ok=True)  # comes back last: without it, nothing is read
            for file in sorted(temporary.iterdir(), key=lambda file: file.name == MANIFEST):
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How the numbers of a model are stored."""

    sparse: bool = False
    precision: str = PRECISIONS[0]
    embeddings: str | None = None

    def __post_init__(self) -> None:
        """Refuse what there is not."""
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be {' or '.join(map(repr, PRECISIONS))}, got {self.precision!r}")
        if self.embeddings not in (None, "int8"):
            raise ValueError(f"embeddings must be None or 'int8', got {self.embeddings!r}")


def _contents(
    model: PreTrainedModel, form: Form, state_dict: Mapping[str, Tensor] | None = None
) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest, and the tensors as they are stored; what `load` could not build again is refused."""
    name, config = type(model).__name__, model.config
    check_class(model)
    with torch.device("meta"):  # only the names and shapes count
        outline = type(model)(type(config).from_dict(config.to_dict()))
    modules = replacement.packed(model)
    if form.embeddings is not None:
        tables = packed_embeddings(model)
        if not tables and not any(module.kind == PackedEmbedding.kind for module in modules.values()):
            raise ValueError(
                f"{name} has no embedding table that can be stored in int8: its output layer shares the only one, or "
                "there is none"
            )
        modules |= tables
    state = skeleton.stored_tensors(model)
    tensors = {
        key: tensor if state_dict is None else state_dict.get(key, tensor)
        for key, tensor in state.items()
        if key.rpartition(".")[0] not in modules
    } | replacement.arrays(modules)
    manifest = Manifest(
        model_class=name,
        attention=attention_of(config),
        weights=SPARSE if form.sparse else WEIGHTS,
        tensors={key: TensorType.of(tensor) for key, tensor in tensors.items()},
        # Buffers that are computed and not stored follow the model into half precision.
        buffers={key: buffer.dtype for key, buffer in model.named_buffers() if key not in state},
        precision=form.precision,
        replaced=replacement.describe(model, outline, modules) if modules else {},
    )
    check_modules(model, outline, manifest.replaced)
    skeleton.cut_to_manifest(outline, manifest)
    skeleton.check_fit(manifest, outline, f"{name} as transformers builds it")
    stored = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    if form.precision != PRECISIONS[0]:
        stored = rounding.halve(stored, replacement.may_be_rounded(modules))
    return manifest, bitmask.compress(stored) if form.sparse else stored


def _write(
    folder: Path, model: PreTrainedModel, processor: Any, form: Form, state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model to a new folder."""
    manifest, stored = _contents(model, form, state_dict)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / manifest.weights, metadata={"format": "pt"})
    named = copy.copy(model.config)
    named.architectures = [manifest.model_class]  # which class to open it as, for those who do not read the manifest
    named.to_json_file(folder / CONFIG, use_diff=False)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.to_json_file(folder / GENERATION)
    if processor is not None:
        processor.save_pretrained(folder)
    manifest.write(folder)


# --- reading ----------------------------------------------------------------------------------------------------------


def _read_tensors(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of the file, once it is clear that they are those of the manifest."""
    path = folder / manifest.weights
    try:
        tensors = mapped(path)
    except FileNotFoundError:
        raise ValueError(f"there is no {path.name} in {str(folder)!r}") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {' '.join(str(error).split())}") from None
    if path.name == SPARSE:
        try:
            tensors = bitmask.decompress(tensors, {name: one.shape for name, one in manifest.tensors.items()})
        except ValueError as error:
            raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    if manifest.precision != PRECISIONS[0]:
        tensors = rounding.widen(tensors)
    there = {name: TensorType.of(tensor) for name, tensor in tensors.items()}
    for name in sorted(manifest.tensors.keys() | there.keys()):
        if manifest.tensors.get(name) != there.get(name):
            raise ValueError(
                f"{MANIFEST} does not fit {path.name} in {str(folder)!r}: {name!r} is "
                f"{manifest.tensors.get(name, 'missing')} in the one and {there.get(name, 'missing')} in the other"
            )
    return tensors


def _fill(model: nn.Module, tensors: dict[str, Tensor], manifest: Manifest) -> None:
    """Put the tensors in, with the file's precision; tied ones stay tied."""
    built = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in manifest.replaced:
            rebuild.check_choice(model, name, tensor)
    new = {id(built[name]): tensor for name, tensor in tensors.items()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                filled = nn.Parameter(new[id(parameter)], requires_grad=parameter.requires_grad)
                module._parameters[key] = made.setdefault(id(parameter), filled)
        for key, buffer in module._buffers.items():
            module._buffers[key] = new.get(id(buffer), buffer)
    for name, buffer in model.named_buffers():
        if name in manifest.buffers and name not in tensors:
            buffer.data = buffer.to(manifest.buffers[name])
