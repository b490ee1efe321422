"""Measures models beside each other: latency, throughput, size on disk, peak memory, and the task's metric.

Everything is measured on the CPU; nothing is estimated. The models take turns, so that other load on the machine
affects all of them alike. The first one is the reference that the others are compared with.

An engine here is an inference engine, as `platon speed --engine` names them: eager PyTorch, its compiler, ONNX Runtime,
or eager PyTorch with sparse layers.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from platon.deploy import onnx, storage
from platon.deploy.loading import load as opened
from platon.deploy.sparse import sparsify

FORMAT = 1
Batch = Mapping[str, Tensor]
Call = Callable[[Batch], Any]
InferenceEngine = Callable[[Callable[[], nn.Module], Batch, Path], Call]


def eager(open_model: Callable[[], nn.Module], batch: Batch, place: Path) -> Call:
    """PyTorch without compilation."""
    model = open_model()
    return lambda batch: model(**batch)


def compiled(open_model: Callable[[], nn.Module], batch: Batch, place: Path) -> Call:
    """`torch.compile`, once for every shape."""
    torch.compiler.reset()  # otherwise it stops compiling, without a message, after a few shapes of one function
    model = torch.compile(open_model(), dynamic=False)
    return lambda batch: model(**batch)


def onnx_runtime(open_model: Callable[[], nn.Module], batch: Batch, place: Path) -> Call:
    """ONNX Runtime, on a file in `place` that is exported and checked if it is not there yet."""
    path = place / "model.onnx"
    if not path.exists():
        onnx.export(open_model(), path, [batch])
    return onnx.Session(path)


def sparse(open_model: Callable[[], nn.Module], batch: Batch, place: Path) -> Call:
    """PyTorch with linear layers that skip zeros, where that is faster on this machine."""
    tokens = next(iter(batch.values()))
    model = sparsify(open_model(), tokens=max(1, tokens.shape[0] * (tokens.shape[1] if tokens.dim() == 2 else 1)))
    return lambda batch: model(**batch)


#: By the name that a user types. An engine gets a function that opens the model, a batch of at least two rows to trace
#: or compile with, and a folder for its files; it returns a function that runs a batch.
ENGINES: dict[str, InferenceEngine] = {"eager": eager, "compile": compiled, "onnx": onnx_runtime, "sparse": sparse}


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
        models = {name: opened(folder) for name, folder in folders.items()}
        metrics = {name: None if metric is None else metric(model) for name, model in models.items()}
        for model in models.values():
            model.cpu().eval()  # the metric may have moved it
        found: dict[str, Any] = {
            "format": FORMAT,
            "machine": _machine(),
            "rounds": setting.rounds,
            "models": {
                name: {
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "bytes": storage.size_on_disk(folders[name]),
                    "metrics": metrics[name],
                }
                for name, model in models.items()
            },
            "timings": [],
            "memory": [],
        }
        shapes, reference = _shapes(batch, setting), next(iter(folders))
        for engine in setting.engines:
            with TemporaryDirectory() as kept:
                places = {name: Path(kept) / str(number) for number, name in enumerate(folders)}
                for place in places.values():
                    place.mkdir()
                # The first model is the dense reference: the sparse engine is compared with ordinary, eager PyTorch.
                engines = dict.fromkeys(folders, engine) | ({reference: "eager"} if engine == "sparse" else {})
                for rows, length in shapes:
                    made = _timings(models, engines, batch, rows, length, places, setting.rounds)
                    found["timings"] += [{"engine": engine, "rows": rows, "length": length, **line} for line in made]
                    tell(_progress(engine, rows, length, made))
                inputs = shaped(batch, rows, length)
                with ThreadPoolExecutor() as pool:  # each waits for a process, whose peak others do not change
                    peaks = {
                        name: pool.submit(_memory, engines[name], folders[name], inputs, places[name])
                        for name in folders
                    }
                for name, one in peaks.items():
                    peak = one.result()
                    found["memory"].append({"engine": engine, "rows": rows, "length": length, "model": name} | peak)
                    shown = f"{peak['peak_bytes'] / 1e6:,.0f} MB" if "peak_bytes" in peak else peak["error"]
                    tell(f"{engine}, memory of the {name} model: {shown}")
        return found
    finally:
        torch.set_num_threads(before)


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
    text = any(tensor.ndim == 2 and not tensor.is_floating_point() for tensor in batch.values())
    return [(rows, length) for length in (setting.lengths if text else (None,)) for rows in setting.rows]


def _timings(
    models: Mapping[str, nn.Module],
    engines: Mapping[str, str],
    batch: Batch,
    rows: int,
    length: int | None,
    places: Mapping[str, Path],
    rounds: int,
) -> list[dict[str, Any]]:
    """The times of every model, or one entry with the error of an engine that fails."""
    example = shaped(batch, max(2, rows), length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler and the exporter
        try:
            with torch.no_grad():
                calls = {
                    name: ENGINES[engines[name]](partial(_given, model), example, places[name])
                    for name, model in models.items()
                }
            seconds = _take_turns(calls, shaped(batch, rows, length), rounds)
        except Exception as error:  # an engine that fails must not end the measurement of the others
            return [{"error": _sentence(error, length, next(iter(models.values())))}]
    return [{"model": name, **_numbers(times, rows)} for name, times in seconds.items()]


def _progress(engine: str, rows: int, length: int | None, lines: Sequence[Mapping[str, Any]]) -> str:
    shape = f"{rows} rows" if length is None else f"{rows} × {length} tokens"
    found = (line["error"] if "error" in line else f"{line['model']} {line['median_ms']:.3g} ms" for line in lines)
    return f"{engine}, {shape}: {', '.join(found)}"


def _given(model: nn.Module) -> nn.Module:
    return model


@torch.inference_mode()
def _take_turns(calls: Mapping[str, Callable[[Batch], Any]], batch: Batch, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
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


def _memory(engine: str, folder: Path, batch: Batch, place: Path) -> dict[str, Any]:
    """The peak memory of a process that only loads the model and runs it once."""
    file = place / "batch.safetensors"
    save_file(dict(batch), file)
    words = [engine, str(folder), str(file), str(place), str(torch.get_num_threads())]
    command = [sys.executable, "-m", "platon.deploy.memory", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": " ".join(done.stderr.strip().rpartition("\n")[2].split())[:200]}
    return {"peak_bytes": int(done.stdout.split()[-1])}


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
