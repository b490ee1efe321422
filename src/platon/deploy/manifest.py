"""manifest.json: the class of a saved model and the shape and precision of its tensors. docs/storage.md describes it.

What is read here may come from anyone: every value is checked before it is used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from platon.deploy.checksum import crc32
from platon.deploy.rounding import PRECISIONS

MANIFEST, CONFIG, GENERATION = "manifest.json", "config.json", "generation_config.json"
WEIGHTS, SPARSE = "model.safetensors", "sparse.safetensors"

FORMAT, FORMAT_PACKED = 1, 2  # the second has packed modules or half precision, which version 1 cannot read

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
}
_LARGEST = 1 << 48  # of a shape; a larger number is damage
# Keys of a configuration that change no number of the model.
_DESCRIPTIVE = ("id2label", "label2id", "architectures", "transformers_version", "_name_or_path", "problem_type")


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


# The implementation of attention; by the name of an inner configuration where they differ, under "" for the rest.
Attention = str | dict[str, "Attention"] | None


def attention_of(config: Any) -> Attention:
    """The implementations that a configuration, and those inside it, name."""
    own: str | None = getattr(config, "_attn_implementation", None)
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", ())}
    inner = {key: attention_of(one) for key, one in parts.items() if one is not None}
    return own if all(one == own for one in inner.values()) else {"": own, **inner}


def _portable(attention: Any, depth: int = 0) -> Attention:
    """Implementations that do not depend on the machine; others are left to transformers."""
    if isinstance(attention, dict) and depth < 8:
        named = {key: _portable(one, depth + 1) for key, one in attention.items()}
        return {key: one for key, one in named.items() if isinstance(one, str if key == "" else str | dict)}
    return attention if attention in ("eager", "sdpa") else None


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    model_class: str
    attention: Attention  # which decides about rounding
    weights: str  # the file that holds the tensors
    tensors: Mapping[str, TensorType]
    buffers: Mapping[str, torch.dtype]  # precision of the buffers that are computed and not stored
    precision: str = "float32"  # float16: matrices are stored in it, and computed with in float32
    replaced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by name; see replacement.py
    heads: Any = None  # of each attention, in folders without checksums; only compared
    checksums: Mapping[str, Any] = field(default_factory=dict)  # of the files, by name; only compared

    def write(self, folder: Path) -> None:
        content = {
            "format": FORMAT if not self.replaced and self.precision == PRECISIONS[0] else FORMAT_PACKED,
            "class": self.model_class,
            "attention": self.attention,
            "weights": self.weights,
            "tensors": {
                name: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape)}
                for name, one in self.tensors.items()
            },
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self.buffers.items()},
        }
        if self.precision != PRECISIONS[0]:
            content["precision"] = self.precision
        if self.replaced:
            content["replaced"] = self.replaced
        content["checksums"] = checksums(folder, self.weights)
        (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder; a damaged one is refused."""
    path = folder / MANIFEST
    content = read_json(path)
    version = content.get("format")
    if type(version) is not int or version not in (FORMAT, FORMAT_PACKED):
        raise ValueError(f"{str(path)!r} has format {version!r}, this version reads {FORMAT} and {FORMAT_PACKED}")
    weights = content.get("weights")
    if weights not in (WEIGHTS, SPARSE):
        raise ValueError(
            f"{str(path)!r} names the weights {weights!r}; only {WEIGHTS!r} or {SPARSE!r} beside it is read"
        )
    precision = content.get("precision", PRECISIONS[0])
    if precision not in PRECISIONS:
        raise ValueError(
            f"{str(path)!r} names the precision {precision!r}, this version reads {' and '.join(PRECISIONS)}"
        )
    try:
        tensors = {
            name: TensorType(_dtype(one["dtype"]), _shape(one["shape"])) for name, one in _items(content["tensors"])
        }
        buffers = {name: _dtype(one) for name, one in _items(content.get("dtypes", {}))}
        replaced = {name: dict(_items(one)) for name, one in _items(content.get("replaced", {}))}
        sums = dict(_items(content.get("checksums", {})))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{str(path)!r} is damaged: its list of tensors cannot be read") from None
    return Manifest(
        model_class=content.get("class"),  # type: ignore[arg-type]  # checked where the class is looked up
        attention=_portable(content.get("attention")),
        weights=weights,
        tensors=tensors,
        buffers=buffers,
        precision=precision,
        replaced=replaced,
        heads=content.get("heads"),
        checksums=sums,
    )


def checksums(folder: Path, weights: str) -> dict[str, int]:
    """CRC-32 of the weights, and of what the configuration says about the model: names may be edited."""
    config = {key: value for key, value in read_json(folder / CONFIG).items() if key not in _DESCRIPTIVE}
    return {weights: crc32(folder / weights), CONFIG: zlib.crc32(json.dumps(config, sort_keys=True).encode())}


@contextmanager
def unchanged(manifest: Manifest, folder: Path) -> Iterator[None]:
    """Refuse a folder whose files are not those that were saved, by accident or by an editor.

    The checksums are computed by a thread beside what is done with the folder meanwhile, and compared at the end.
    """
    if not manifest.checksums:  # an older folder
        yield
        return
    with ThreadPoolExecutor(1) as beside:
        found = beside.submit(checksums, folder, manifest.weights)
        yield
    for name, one in found.result().items():
        if manifest.checksums.get(name) != one:
            raise ValueError(
                f"{name} in {str(folder)!r} was changed after the model was saved; copy the folder again, and to "
                "change a model load it, change it and save it"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_float)
    except FileNotFoundError:
        raise ValueError(f"{str(path.parent)!r} holds no saved model: there is no {path.name} in it") from None
    except RecursionError:
        raise ValueError(f"{str(path)!r} is damaged: its lists are nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} is damaged: it holds no object")
    return value


def _float(value: dict[str, Any]) -> Any:
    """Infinity and NaN as transformers writes them in a configuration, since JSON has no such numbers."""
    said = value.get("__float__")
    return float(said) if len(value) == 1 and said in ("Infinity", "-Infinity", "NaN") else value


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
