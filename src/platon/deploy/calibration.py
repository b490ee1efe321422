"""Up to which density the sparse layer is the faster one, measured on this machine and remembered."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from platon.deploy import kernel

Make = Callable[[Tensor, Tensor | None], nn.Module]

# No higher: there the gain is gone on every machine seen, and a measurement that says otherwise was disturbed.
_DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)
_GAIN = 1.1  # a layer that gains less stays dense: the measurement is not finer than that
_SMALLEST = 4096  # weights; below, a call costs more than the product
_SECONDS = 0.05  # for one density
_ROUNDS = (3, 50)


def limit(make: Make, rows: int, columns: int, tokens: int) -> float:
    """The highest density at which `make(weight, bias)` beats a dense linear of this shape; 0: at none.

    Measured by bisection on random matrices, once a shape, number of tokens and of threads, then read from the cache.
    """
    if rows * columns < _SMALLEST:
        return 0.0
    path = kernel.cache_folder() / f"speed-{_machine()}.json"
    key = f"{make.__name__} {rows} x {columns}, {tokens} tokens, {torch.get_num_threads()} threads"
    known = _read(path)
    if key not in known:
        found = _measure(make, rows, columns, tokens)
        known = {**_read(path), key: found}  # read again: another process may have measured meanwhile
        _write(path, known)
    return known[key]


def _measure(make: Make, rows: int, columns: int, tokens: int) -> float:
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(rows, columns, generator=random), torch.randn(tokens, columns, generator=random)
    chance, bias = torch.rand(rows, columns, generator=random), torch.zeros(rows)
    low, high = 0, len(_DENSITIES)  # faster below low, not at or above high
    while low < high:
        middle = (low + high) // 2
        dense = nn.Linear(columns, rows, device="meta").to_empty(device="cpu").requires_grad_(False)
        dense.weight.copy_(weight.masked_fill(chance >= _DENSITIES[middle], 0))
        dense.bias.copy_(bias)
        sparse = make(dense.weight, bias)
        once = functools.partial(gain, functools.partial(dense, x), functools.partial(sparse, x))
        if once() >= _GAIN and once() >= _GAIN:  # twice, for the answer is remembered
            low = middle + 1
        else:
            high = middle
    return _DENSITIES[low - 1] if low else 0.0


def gain(dense: Callable[[], object], sparse: Callable[[], object]) -> float:
    """How many times faster the second is, by the best of interleaved rounds: noise only ever adds."""
    times: dict[Callable[[], object], list[float]] = {dense: [], sparse: []}
    least, most = _ROUNDS
    for function in times:
        function()
    end = time.perf_counter() + _SECONDS
    for number in range(most):
        if number >= least and time.perf_counter() > end:
            break
        for function, taken in times.items():
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return min(times[dense]) / min(times[sparse])


@functools.cache
def _machine() -> str:
    """Names what the measured times depend on besides the shape."""
    processor = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        lines = facts.read_text(errors="replace").splitlines()
        processor += next((line for line in lines if line.startswith("model name")), "")
    parts = (processor, str(os.cpu_count()), str(torch.__version__), kernel.source_digest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, float]:
    try:
        known = json.loads(path.read_text())
        return {str(key): float(value) for key, value in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # not there, or not ours: measured again


def _write(path: Path, known: dict[str, float]) -> None:
    """Through a name of its own. A folder that cannot be written costs the next process a measurement, nothing else."""
    made = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        made.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
