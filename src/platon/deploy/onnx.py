"""Models as ONNX files, checked against PyTorch in ONNX Runtime: dense with zeros, or compact."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NEEDED = ("onnx", "onnxscript", "onnxruntime")
LABELS = ("labels", "start_positions", "end_positions")  # keys of a batch that a deployed model does not take

# Largest difference from PyTorch, relative to the largest output: float32 kernels add in another order, and rounding
# errors grow over the layers.
LIMIT = 1e-4

_ONE_FILE = 1_900_000_000  # bytes of weights; an ONNX file has at most 2 GB


@dataclass(frozen=True)
class Exported:
    """An ONNX file and what its check found."""

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    difference: float  # the largest difference from PyTorch over all batches


def export(model: nn.Module, path: str | Path, batches: Sequence[Mapping[str, Tensor]]) -> Exported:
    """Write a model as ONNX with dynamic batch and length, and check it in ONNX Runtime before it is put in place.

    Args:
        model: of transformers, compact or not; it is exported as it evaluates.
        path: the file; weights of more than 2 GB go to a second file beside it.
        batches: real inputs; the file is traced with the first of them and checked with all, with one row, and with
            half the length. Labels are left out.

    Raises:
        ValueError: a package is missing, the exporter gives up, or ONNX Runtime computes something else.
    """
    require()
    path = Path(path)
    if not batches:
        raise ValueError("an ONNX file is checked on real inputs; give at least one batch")
    # A file that was traced with one row takes only one row.
    batches = [{name: t if len(t) > 1 else torch.cat([t, t]) for name, t in batch.items()} for batch in batches]
    was_training = model.training
    graph = _Graph(model.eval(), tuple(name for name in batches[0] if name not in LABELS))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        with torch.no_grad():
            _write(graph, batches[0], temporary / path.name)
            difference = _largest_difference(graph, temporary / path.name, _checks(batches))
        for file in temporary.iterdir():
            file.replace(path.with_name(file.name))
    finally:
        model.train(was_training)
        for file in temporary.iterdir():
            file.unlink()
        temporary.rmdir()
    return Exported(path, graph.names, graph.outputs, difference)


def require() -> None:
    """Refuse to go on without the packages of the extra `export`."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX needs {', '.join(missing)}: pip install 'platon[export]'")


class Session:
    """An ONNX file, loaded in ONNX Runtime."""

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        """Load it; `threads` is torch's number by default."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3
        # By default, idle threads spin and take cores from the model that is measured next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.names = tuple(one.name for one in self._session.get_inputs())
        self.outputs = tuple(one.name for one in self._session.get_outputs())

    def __call__(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs for a batch; inputs that the file does not have are left out."""
        found = self._session.run(None, {name: batch[name].numpy() for name in self.names})
        return [torch.from_numpy(one) for one in found]


class _Graph(nn.Module):
    """The model with positional inputs and a tuple of output tensors, as the exporter needs it."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.outputs: tuple[str, ...] = ()
        # An ONNX file cannot return a cache of keys and values.
        self.settings = {"use_cache": False} if getattr(model.config, "use_cache", False) else {}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**dict(zip(self.names, tensors, strict=True)), **self.settings)
        chosen = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        self.outputs = tuple(chosen)
        return tuple(chosen.values())


def _write(graph: _Graph, batch: Mapping[str, Tensor], path: Path) -> None:
    tensors = tuple(batch[name] for name in graph.names)
    graph(*tensors)  # sets the names of the outputs
    shapes = tuple(_dynamic(name, tensor) for name, tensor in zip(graph.names, tensors, strict=True))
    with _quiet():
        try:
            program: Any = torch.onnx.export(
                graph,
                tensors,
                dynamo=True,
                verbose=False,
                input_names=list(graph.names),
                output_names=list(graph.outputs),
                dynamic_shapes=(shapes,),
            )
        except Exception as error:  # the exporter wraps whatever went wrong
            said = " ".join(str(error).split())[:300]
            raise ValueError(f"torch cannot export {type(graph.model).__name__} to ONNX: {said}") from error
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # the Python source lines of each node, which are larger than a small model
    program.save(str(path), external_data=_bytes(graph) > _ONE_FILE)


def _bytes(graph: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in graph.parameters())


def _dynamic(name: str, tensor: Tensor) -> dict[int, Any]:
    """The dimensions that may change: the rows, and the length of a text."""
    free: dict[int, Any] = {0: torch.export.Dim("rows")}
    if tensor.ndim == 2 and not tensor.is_floating_point():
        free[1] = torch.export.Dim("length")
    return free


def _checks(batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """All batches, one row of the first, and the first at about half its length where it is text."""
    first = dict(batches[0])
    alone = {name: tensor[:1] for name, tensor in first.items()}
    short = {
        name: tensor[:, : max(1, tensor.shape[1] // 2 + 1)] if 1 in _dynamic(name, tensor) else tensor
        for name, tensor in first.items()
    }
    return [*(dict(batch) for batch in batches), alone, short]


def _largest_difference(graph: _Graph, path: Path, batches: Sequence[Mapping[str, Tensor]]) -> float:
    session = Session(path)
    largest = 0.0
    for batch in batches:
        expected = graph(*(batch[name] for name in graph.names))
        for name, ours, theirs in zip(graph.outputs, expected, session(batch), strict=True):
            difference = float((ours - theirs).abs().max())
            if not difference <= LIMIT * max(1.0, float(ours.abs().max())):
                rows = " × ".join(str(length) for length in batch[graph.names[0]].shape)
                raise ValueError(
                    f"the ONNX file of {type(graph.model).__name__} is not exact, so it is not written: {name} differs "
                    f"by {difference:.2g} on a batch of {rows}"
                )
            largest = max(largest, difference)
    return largest


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's progress messages and warnings; errors are raised as one sentence."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
