"""manifest.json: the class of a saved model and the shape and precision of its tensors. docs/storage.md describes it.

What is read here may come from anyone: every value is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MANIFEST, CONFIG, GENERATION = "manifest.json", "config.json", "generation_config.json"
WEIGHTS, SPARSE = "model.safetensors", "sparse.safetensors"

FORMAT, FORMAT_FAST = 1, 2  # the second has sparse layers in it, which version 1 cannot read

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
}
_LARGEST = 1 << 48  # of a shape; a larger number is damage


@dataclass(frozen=True)
class TensorType:
    """Precision and shape of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> TensorType:
        return TensorType(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    model_class: str
    attention: str | None  # the implementation of attention, which decides about rounding
    heads: Any  # the number of heads of each attention; only compared
    weights: str  # the file that holds the tensors
    tensors: Mapping[str, TensorType]
    buffers: Mapping[str, torch.dtype]  # precision of the buffers that are computed and not stored
    sparse_layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by name; see sparse_layout.py
    merged: Sequence[str] = ()  # names of the activations that became part of a sparse layer

    def with_heads(self, heads: Any) -> Manifest:
        return replace(self, heads=heads)

    def write(self, folder: Path) -> None:
        content = {
            "format": FORMAT_FAST if self.sparse_layers else FORMAT,
            "class": self.model_class,
            "attention": self.attention,
            "heads": self.heads,
            "weights": self.weights,
            "tensors": {
                name: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape)}
                for name, one in self.tensors.items()
            },
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self.buffers.items()},
        }
        if self.sparse_layers:
            content |= {"sparse_layers": self.sparse_layers, "merged_activations": list(self.merged)}
        (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder; a damaged one is refused."""
    path = folder / MANIFEST
    content = read_json(path)
    version = content.get("format")
    if type(version) is not int or version not in (FORMAT, FORMAT_FAST):
        raise ValueError(f"{str(path)!r} has format {version!r}, this version reads {FORMAT} and {FORMAT_FAST}")
    weights = content.get("weights")
    if weights not in (WEIGHTS, SPARSE):
        raise ValueError(
            f"{str(path)!r} names the weights {weights!r}; only {WEIGHTS!r} or {SPARSE!r} beside it is read"
        )
    try:
        tensors = {
            name: TensorType(_dtype(one["dtype"]), _shape(one["shape"])) for name, one in _items(content["tensors"])
        }
        buffers = {name: _dtype(one) for name, one in _items(content.get("dtypes", {}))}
        layers = {name: dict(_items(one)) for name, one in _items(content.get("sparse_layers", {}))}
        merged = [str(name) for name in content.get("merged_activations", [])]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{str(path)!r} is damaged: its list of tensors cannot be read") from None
    attention = content.get("attention")
    return Manifest(
        model_class=content.get("class"),  # type: ignore[arg-type]  # checked where the class is looked up
        attention=attention if isinstance(attention, str) else None,
        heads=content.get("heads"),
        weights=weights,
        tensors=tensors,
        buffers=buffers,
        sparse_layers=layers,
        merged=merged,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{str(path.parent)!r} holds no saved model: there is no {path.name} in it") from None
    except RecursionError:
        raise ValueError(f"{str(path)!r} is damaged: its lists are nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} is damaged: it holds no object")
    return value


def _items(value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(value)
    return value.items()


def _dtype(name: Any) -> torch.dtype:
    dtype: torch.dtype = _DTYPES[name]
    return dtype


def _shape(lengths: Any) -> tuple[int, ...]:
    if not isinstance(lengths, list) or not all(type(one) is int and 0 <= one < _LARGEST for one in lengths):
        raise ValueError(lengths)
    return tuple(lengths)
