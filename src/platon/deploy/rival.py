"""What others make of a dense model: ONNX Runtime and OpenVINO in float32 and int8, and PyTorch's int8.

Each as its documentation recommends it for a transformer on a CPU, with torch's number of threads.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy import onnx

Batch = Mapping[str, Tensor]


def require(*packages: str) -> None:
    """Refuse to go on without these packages."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} is not installed: pip install 'platon[rivals]'")


def onnx_call(path: Path) -> Callable[[Batch], dict[str, Tensor]]:
    """ONNX Runtime on a file."""
    session = onnx.Session(path)
    return lambda batch: dict(zip(session.outputs, session(batch), strict=True))


def onnx_int8(path: Path) -> Path:
    """A file with the weights of matrix products in int8, made by ONNX Runtime's dynamic quantisation."""
    target = path.with_name("model-int8.onnx")
    if not target.exists():
        import onnx as package
        from onnxruntime.quantization import QuantType, quantize_dynamic

        model = package.load(path)
        # Shapes of the values in between, as torch's exporter writes them, which quantisation finds contradictory.
        del model.graph.value_info[:]
        bare = path.with_name("bare.onnx")
        package.save(model, bare)
        with _quiet():
            quantize_dynamic(bare, target, weight_type=QuantType.QInt8)
        bare.unlink()
    return target


def openvino_files(path: Path) -> tuple[Path, Path]:
    """An ONNX file as OpenVINO's own two files."""
    require("openvino")
    target = path.with_name("openvino.xml")
    if not target.exists():
        import openvino

        openvino.save_model(openvino.Core().read_model(path), target, compress_to_fp16=False)
    return target, target.with_suffix(".bin")


def openvino_int8(path: Path, rows: Batch) -> tuple[Path, Path]:
    """The same in int8: NNCF quantises weights and activations, calibrated on these rows, one at a time."""
    require("openvino", "nncf")
    target = path.with_name("openvino-int8.xml")
    if not target.exists():
        with _quiet():
            import nncf
            import openvino

            model = openvino.Core().read_model(path)
            names = [one.get_any_name() for one in model.inputs]
            count = len(rows[names[0]])
            each = [{name: rows[name][at : at + 1].numpy() for name in names} for at in range(count)]
            kind = nncf.ModelType.TRANSFORMER
            made = nncf.quantize(model, nncf.Dataset(each), model_type=kind, subset_size=count)
            openvino.save_model(made, target, compress_to_fp16=False)
    return target, target.with_suffix(".bin")


def openvino_call(path: Path) -> Callable[[Batch], dict[str, Tensor]]:
    """OpenVINO on its files, with the settings for one request at a time."""
    import openvino

    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(path, "CPU", settings)
    inputs = [one.get_any_name() for one in model.inputs]
    outputs = [one.get_any_name() for one in model.outputs]

    def call(batch: Batch) -> dict[str, Tensor]:
        found = model({name: batch[name].numpy() for name in inputs})
        return {name: torch.from_numpy(found[at]) for at, name in enumerate(outputs)}

    return call


def torch_int8(model: nn.Module) -> nn.Module:
    """A model whose linear layers have int8 weights and quantise their inputs as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return made.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and advice."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
