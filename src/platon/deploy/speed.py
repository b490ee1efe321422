"""Measures models beside each other: latency, throughput, size on disk, memory, and the task's metric.

Everything is measured on the CPU; nothing is estimated. All models in all engines (engine.py) take turns, so that other
load on the machine affects all of them alike. The first model in eager PyTorch is what the others are compared with.
"""

from __future__ import annotations

import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from platon.deploy import memory, onnx, storage
from platon.deploy.engine import ENGINES, Batch, Call, Subject
from platon.deploy.loading import opened

FORMAT = 2
LIMIT = 64  # real rows that engines calibrate with

# Engines that gain nothing from zeros: they are measured with the dense model alone, unless the pruned one is smaller.
_DENSE = ("compile", "onnx", "onnx-int8", "openvino", "openvino-int8", "torch-int8")


@dataclass(frozen=True)
class Setting:
    """What is measured: engines, rows in a batch, tokens in a row (for texts), and how often."""

    engines: tuple[str, ...] = ("eager",)
    rows: tuple[int, ...] = (1, 8)
    lengths: tuple[int, ...] = (128,)
    rounds: int = 20
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be measured."""
        for name in self.engines:
            if name not in ENGINES:
                raise ValueError(f"no engine is called {name!r}; there are {', '.join(ENGINES)}")
        for what, values in {"batch": self.rows, "length": self.lengths, "rounds": (self.rounds,)}.items():
            if not values or min(values) < 1:
                raise ValueError(f"{what} must be at least 1, got {', '.join(map(str, values)) or 'none'}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")


def measure(
    folders: Mapping[str, Path],
    batch: Batch,
    setting: Setting,
    metric: Callable[[nn.Module], Any] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure saved models against each other.

    Args:
        folders: a name for each model, and where it is saved, by `platon.save` or by `save_pretrained`; the first is
            what the others are compared with.
        batch: real inputs, of which batches of all sizes are made: rows and tokens are repeated or left out.
        setting: what to measure.
        metric: measures a model on its task.
        tell: is called with a line of text after each measurement.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads or before)
    try:
        with TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of compilers and exporters
            return _measure(folders, batch, setting, metric, tell, Path(place))
    finally:
        torch.set_num_threads(before)


def _measure(
    folders: Mapping[str, Path],
    batch: Batch,
    setting: Setting,
    metric: Callable[[nn.Module], Any] | None,
    tell: Callable[[str], None],
    place: Path,
) -> dict[str, Any]:
    models = {name: opened(folder) for name, folder in folders.items()}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    found: dict[str, Any] = {
        "format": FORMAT,
        "machine": _machine(),
        "rounds": setting.rounds,
        "models": {name: {"parameters": sizes[name], "bytes": storage.size_on_disk(folders[name])} for name in folders},
        "contenders": [],
        "timings": [],
    }
    contenders = _contenders(setting.engines, sizes)
    shapes = _shapes(batch, setting)
    for rows, length in shapes:
        example, inputs = shaped(batch, max(2, rows), length), shaped(batch, rows, length)
        real = {name: tensor[:LIMIT] for name, tensor in batch.items() if name not in onnx.LABELS}
        calls: dict[Contender, Call] = {}
        for one in contenders:
            own = place / f"{one.model}-{'onnx' if one.engine.startswith(('onnx', 'openvino')) else one.engine}"
            own.mkdir(exist_ok=True)
            subject = Subject(partial(_given, models[one.model]), example, real, own)
            first = (rows, length) == shapes[0]
            try:
                with torch.no_grad():
                    ready = ENGINES[one.engine](subject)
                    ready.call(inputs)
            except Exception as error:  # an engine that fails must not end the measurement of the others
                said = _sentence(error, length, models[one.model])
                found["timings"].append({**one._asdict(), "rows": rows, "length": length, "error": said})
                tell(f"{one}, {_shape(rows, length)}: {said}")
                continue
            calls[one] = ready.call
            if first:
                line = {**one._asdict(), "bytes": sum(path.stat().st_size for path in ready.files)}
                line["bytes"] = line["bytes"] or found["models"][one.model]["bytes"]
                line["metrics"] = None if metric is None else _metric(metric, one, ready.call, models[one.model])
                found["contenders"].append(line | {"place": own})
                tell(f"{one}: {line['bytes'] / 1e6:.2f} MB{_told(line['metrics'])}")
        for one, seconds in take_turns(calls, inputs, setting.rounds).items():
            line = {**one._asdict(), "rows": rows, "length": length, **_numbers(seconds, rows)}
            found["timings"].append(line)
            tell(f"{one}, {_shape(rows, length)}: {line['median_ms']:.3g} ms")
    lines = found["contenders"]
    for name, one in found["models"].items():
        one["metrics"] = next((line["metrics"] for line in lines if line["model"] == name), None)
    peaks = memory.measure(
        [(line["engine"], folders[line["model"]], line.pop("place")) for line in lines], inputs, torch.get_num_threads()
    )
    for line, peak in zip(lines, peaks, strict=True):
        line |= {"added_bytes": peak.get("added_bytes"), "peak_bytes": peak.get("peak_bytes")}
    return found


class Contender(NamedTuple):
    """A model in an engine."""

    engine: str
    model: str

    def __str__(self) -> str:
        return f"{self.engine}, {self.model}"


def _contenders(engines: Sequence[str], sizes: Mapping[str, int]) -> list[Contender]:
    """Who takes part: first the reference, which is the first model in eager PyTorch."""
    reference, *others = sizes
    found = [Contender("eager", reference)]
    for engine in engines:
        smaller = [name for name in others if engine not in _DENSE or sizes[name] != sizes[reference]]
        found += [Contender(engine, name) for name in ([] if engine == "sparse" else [reference]) + smaller]
    return list(dict.fromkeys(found))


class _Answers(nn.Module):
    """An engine as a module, for those who evaluate modules."""

    def __init__(self, call: Call, model: Any) -> None:
        super().__init__()
        self.call, self.config, self.main_input_name = call, model.config, model.main_input_name

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        found = self.call({name: tensor for name, tensor in batch.items() if name not in onnx.LABELS})
        return {"loss": torch.zeros(()), **{name: one for name, one in found.items() if isinstance(one, Tensor)}}


def _metric(metric: Callable[[nn.Module], Any], one: Contender, call: Call, model: nn.Module) -> Any:
    """Measured through the engine; of `compile` through the model, for it would compile every shape."""
    return metric(model if one.engine in ("eager", "compile") else _Answers(call, model))


def _told(metrics: Any) -> str:
    flat = [f", {name} {value:.4g}" for split in (metrics or {}).values() for name, value in split.items()]
    return flat[0] if flat else ""


def _shape(rows: int, length: int | None) -> str:
    return f"{rows} rows" if length is None else f"{rows} × {length} tokens"


def shaped(batch: Batch, rows: int, length: int | None) -> dict[str, Tensor]:
    """A batch of this many rows and tokens: what there is, repeated or cut; every token counts."""
    made = {}
    for name, tensor in batch.items():
        if name in onnx.LABELS:
            continue
        grown = tensor[torch.arange(rows) % len(tensor)]
        if length is not None and tensor.ndim == 2 and not tensor.is_floating_point():
            grown = grown[:, torch.arange(length) % tensor.shape[1]]
            grown = torch.ones_like(grown) if name == "attention_mask" else grown
        made[name] = grown.contiguous()
    return made


def _shapes(batch: Batch, setting: Setting) -> list[tuple[int, int | None]]:
    return [(rows, length) for length in (setting.lengths if is_text(batch) else (None,)) for rows in setting.rows]


def is_text(batch: Batch) -> bool:
    """Whether a batch has rows of tokens, which can be made shorter or longer."""
    return any(tensor.ndim == 2 and not tensor.is_floating_point() for tensor in batch.values())


def _given(model: nn.Module) -> nn.Module:
    return model


@torch.inference_mode()
def take_turns(calls: Mapping[Any, Call], batch: Batch, rounds: int) -> dict[Any, list[float]]:
    """The seconds of each call in each round, after two rounds that are not counted."""
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(2):  # warm-up: compiles, allocates, fills caches
        for call in calls.values():
            call(batch)
    for number in range(rounds):
        order = list(calls)[
            :: 1 if number % 2 == 0 else -1
        ]  # alternating, so that no model always runs after the same one
        for name in order:
            start = time.perf_counter()
            calls[name](batch)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _numbers(seconds: Sequence[float], rows: int) -> dict[str, float]:
    """Median and quartiles in milliseconds, and rows a second at the median."""
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else 3 * [seconds[0]]
    numbers = {"median_ms": 1e3 * middle, "low_ms": 1e3 * low, "high_ms": 1e3 * high, "per_second": rows / middle}
    return {name: round(value, 4) for name, value in numbers.items()}


def _sentence(error: Exception, length: int | None, model: Any) -> str:
    most = getattr(model.config, "max_position_embeddings", None)
    if length is not None and most is not None and length > most:
        return f"the model takes at most {most} tokens, got {length}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": name or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "system": platform.system(),
    }
