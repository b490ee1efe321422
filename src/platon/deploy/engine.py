"""Inference engines, as `platon speed --engine` names them: eager PyTorch, its compiler, sparse layers, and rivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from platon.deploy import onnx, rival, storage
from platon.deploy.sparse import sparsify

_PATCHES = 128  # about how many tokens an image becomes

Batch = Mapping[str, Tensor]
Call = Callable[[Batch], Any]  # the outputs by name


@dataclass(frozen=True)
class Subject:
    """What an engine is given.

    Args:
        open: opens the model.
        batch: at least two rows of the shape that is measured, to trace or compile with.
        rows: real rows, to calibrate with.
        place: a folder for the engine's files; files that are there already are used.
    """

    open: Callable[[], nn.Module]
    batch: Batch
    rows: Batch
    place: Path


class Ready(NamedTuple):
    """A model in an engine: how it is called, and the files that it runs from, where they are not the model's own."""

    call: Call
    files: tuple[Path, ...] = ()


Engine = Callable[[Subject], Ready]


def eager(subject: Subject) -> Ready:
    """PyTorch without compilation."""
    model = subject.open()
    return Ready(lambda batch: model(**batch))


def compiled(subject: Subject) -> Ready:
    """`torch.compile`, once for every shape."""
    torch.compiler.reset()  # otherwise it stops compiling, without a message, after a few shapes of one function
    model = torch.compile(subject.open(), dynamic=False)
    return Ready(lambda batch: model(**batch))


def sparse(subject: Subject) -> Ready:
    """PyTorch with linear layers that skip zeros, where that is faster on this machine, from a saved folder."""
    folder = subject.place / "fast"
    if not folder.exists():
        first = next(iter(subject.batch.values()))
        tokens = first.shape[0] * (first.shape[1] if first.dim() == 2 else _PATCHES)
        storage.save(sparsify(subject.open(), tokens=max(1, tokens)), folder)
    model = storage.load(folder)
    return Ready(lambda batch: model(**batch), tuple(folder.glob("*.safetensors")))


def onnx_runtime(subject: Subject) -> Ready:
    """ONNX Runtime in float32."""
    path = _onnx_file(subject)
    return Ready(rival.onnx_call(path), (path,))


def onnx_int8(subject: Subject) -> Ready:
    """ONNX Runtime with weights in int8 and activations quantised as they come (dynamic)."""
    path = rival.onnx_int8(_onnx_file(subject))
    return Ready(rival.onnx_call(path), (path,))


def openvino(subject: Subject) -> Ready:
    """OpenVINO in float32."""
    files = rival.openvino_files(_onnx_file(subject))
    return Ready(rival.openvino_call(files[0]), files)


def openvino_int8(subject: Subject) -> Ready:
    """OpenVINO in int8, by NNCF's quantisation after training, calibrated on real rows."""
    files = rival.openvino_int8(_onnx_file(subject), subject.rows)
    return Ready(rival.openvino_call(files[0]), files)


def torch_int8(subject: Subject) -> Ready:
    """PyTorch's own dynamic quantisation of linear layers."""
    model = rival.torch_int8(subject.open())
    path = subject.place / "torch-int8.pt"
    if not path.exists():
        torch.save(model.state_dict(), path)  # for its size; it is not read again
    return Ready(lambda batch: model(**batch), (path,))


def _onnx_file(subject: Subject) -> Path:
    path = subject.place / "model.onnx"
    if not path.exists():
        onnx.export(subject.open(), path, [subject.batch])
    return path


#: by the name that a user types
ENGINES: dict[str, Engine] = {
    "eager": eager,
    "compile": compiled,
    "sparse": sparse,
    "onnx": onnx_runtime,
    "onnx-int8": onnx_int8,
    "openvino": openvino,
    "openvino-int8": openvino_int8,
    "torch-int8": torch_int8,
}
