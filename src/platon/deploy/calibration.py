"""The highest density at which a sparse layer is faster than a dense one, measured on this machine and cached."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from platon.deploy import sparse_kernel

LayerClass = Callable[[Tensor, Tensor | None], nn.Module]

# No higher: on every machine tried the gain is gone there, so a measurement that shows one was disturbed.
_DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)
_GAIN = 1.1  # a layer that gains less stays dense: smaller gains are within the error of the measurement
_SMALLEST = 4096  # weights; in smaller layers the call costs more than the product
_SECONDS = 0.05  # for the measurement of one density
_ROUNDS = (3, 50)
_FEW = 8  # tokens; with so few, as when text is generated, the weights come from memory and not from a cache
_COLD = 64 << 20  # bytes of dense weights that no cache holds


def limit(make: LayerClass, rows: int, columns: int, tokens: int) -> float:
    """The highest density at which the layer `make(weight, bias)` is faster than `nn.Linear` of this shape, or 0.

    Measured by bisection on random matrices, once for each shape, number of tokens and number of threads; after that
    it is read from the cache.
    """
    if rows * columns < _SMALLEST:
        return 0.0
    path = sparse_kernel.cache_folder() / f"speed-{_machine()}.json"
    key = f"{make.__name__} {rows} x {columns}, {tokens} tokens, {torch.get_num_threads()} threads"
    known = _read(path)
    if key not in known:
        found = _measure(make, rows, columns, tokens)
        known = {**_read(path), key: found}  # read again: another process may have measured meanwhile
        _write(path, known)
    return known[key]


def _measure(make: LayerClass, rows: int, columns: int, tokens: int) -> float:
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(rows, columns, generator=random), torch.randn(tokens, columns, generator=random)
    chance, bias = torch.rand(rows, columns, generator=random), torch.zeros(rows)
    low, high = 0, len(_DENSITIES)  # sparse is faster at the densities before `low`, not at those from `high` on
    while low < high:
        middle = (low + high) // 2
        dense = nn.Linear(columns, rows, device="meta").to_empty(device="cpu").requires_grad_(False)
        dense.weight.copy_(weight.masked_fill(chance >= _DENSITIES[middle], 0))
        dense.bias.copy_(bias)
        sparse = make(dense.weight, bias)
        copies = -(-_COLD // dense.weight.nbytes) if tokens <= _FEW else 1
        once = functools.partial(gain, _call(dense, x, copies), _call(sparse, x, copies))
        if once() >= _GAIN and once() >= _GAIN:  # twice, because the result is cached
            low = middle + 1
        else:
            high = middle
    return _DENSITIES[low - 1] if low else 0.0


def _call(layer: nn.Module, x: Tensor, copies: int) -> Callable[[], object]:
    """A call of the layer or, if there are copies, of one after the other."""
    if copies == 1:
        return functools.partial(layer, x)
    made = [copy.deepcopy(layer) for _ in range(copies)]
    for one in made:
        one(x)  # the first call of a sparse layer checks its buffers
    layers = itertools.cycle(made)
    return lambda: next(layers)(x)


def gain(dense: Callable[[], object], sparse: Callable[[], object]) -> float:
    """How many times faster the second is: the ratio of the shortest times, because noise only makes times longer."""
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
    """A digest of everything besides the shape that the measured times depend on."""
    processor = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        lines = facts.read_text(errors="replace").splitlines()
        processor += next((line for line in lines if line.startswith("model name")), "")
    parts = (processor, str(os.cpu_count()), str(torch.__version__), sparse_kernel.source_digest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, float]:
    try:
        known = json.loads(path.read_text())
        return {str(key): float(value) for key, value in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # missing or unreadable: everything is measured again


def _write(path: Path, known: dict[str, float]) -> None:
    """Write a temporary file and rename it. If the folder cannot be written, the next process measures again."""
    made = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        made.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
