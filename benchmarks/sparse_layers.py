"""Single sparse layers beside PyTorch's dense ones: the first part of benchmarks/sparse.py."""

import functools
import json
import time
from collections.abc import Callable

import torch
from torch import nn

import platon
from masks import minilm
from platon.deploy.layer import CsrLinear, SparseLinear
from platon.deploy.sparse_matrix import from_dense

KEEP = 0.1

Found = dict[str, object]


def interleaved(calls: dict[str, Callable[[], object]], rounds: int, pause: float = 0.0) -> dict[str, float]:
    """The best seconds of each call, timed when it has just run: caches and threads are its own by then."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(pause)
            call()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: min(taken) for name, taken in times.items()}


def ratios(times: dict[str, float]) -> Found:
    milliseconds = {name: round(1000 * value, 3) for name, value in times.items()}
    over = {name: round(times["dense"] / value, 2) for name, value in times.items() if name != "dense"}
    return {"milliseconds": milliseconds, "times_dense": over}


def layer(rows: int, columns: int, density: float) -> nn.Linear:
    made = nn.Linear(columns, rows).requires_grad_(False)
    made.weight[torch.rand(rows, columns) >= density] = 0
    return made


def measure_layers() -> list[Found]:
    found: list[Found] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows, columns in ((3072, 768), (768, 3072)):
            for density in (0.2, 0.1, 0.05):
                dense = layer(rows, columns, density)
                sparse, csr = (make(dense.weight, dense.bias) for make in (SparseLinear, CsrLinear))
                x = torch.randn(128, columns)
                calls = {"dense": dense, "sparse": sparse, "torch.sparse": csr}
                times = interleaved({name: functools.partial(call, x) for name, call in calls.items()}, 25)
                facts: Found = {"part": "layers", "rows": rows, "columns": columns, "kept": density, "tokens": 128}
                size = {"bytes_of_dense": round(from_dense(dense.weight).nbytes / dense.weight.nbytes, 3)}
                found.append({**facts, "threads": threads, **ratios(times), **size})
                print(json.dumps(found[-1]), flush=True)
    return found


def measure_tokens() -> list[Found]:
    """From one token up, at 10 %."""
    found: list[Found] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        dense = layer(3072, 768, KEEP)
        sparse = SparseLinear(dense.weight, dense.bias)
        for tokens in (1, 2, 8, 9, 33, 64, 65, 1024):
            x = torch.randn(tokens, 768)
            times = interleaved({"dense": functools.partial(dense, x), "sparse": functools.partial(sparse, x)}, 25)
            found.append({"part": "tokens", "tokens": tokens, "kept": KEEP, "threads": threads, **ratios(times)})
            print(json.dumps(found[-1]), flush=True)
    return found


def measure_densities() -> list[Found]:
    """What `sparsify` makes of a layer, from nearly empty to full: where sparse is not faster it stays dense."""
    found: list[Found] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for density in (0.02, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0):
            dense = layer(3072, 768, density)
            chosen = platon.sparsify(nn.Sequential(dense))
            x = torch.randn(128, 768)
            calls = {"dense": functools.partial(dense, x), "sparsified": functools.partial(chosen, x)}
            facts: Found = {"part": "densities", "kept": density, "threads": threads, "tokens": 128}
            sparse = isinstance(chosen[0], SparseLinear)
            found.append({**facts, "became_sparse": sparse, **ratios(interleaved(calls, 25))})
            print(json.dumps(found[-1]), flush=True)
    return found


def measure_rates() -> list[Found]:
    """The matrices of a pruned MiniLM one by one, 1024 tokens, one thread: how much of the dense layer's rate
    (products with non-zeros in a second) a sparse layer reaches, and what takes its time.

    A matrix with one non-zero in each row takes the time of what is not arithmetic: reading, transposing and writing.
    """
    torch.set_num_threads(1)
    found: list[Found] = []
    model = minilm(KEEP)
    for name, dense in model.encoder.named_modules():
        if not isinstance(dense, nn.Linear):
            continue
        rows, columns = dense.weight.shape
        single = torch.zeros(rows, columns)
        single[torch.arange(rows), torch.arange(rows) % columns] = 1.0
        sparse, moves = SparseLinear(dense.weight, dense.bias), SparseLinear(single, dense.bias)
        x = torch.randn(1024, columns)
        calls = {"dense": dense, "sparse": sparse, "moves": moves}
        times = interleaved({key: functools.partial(call, x) for key, call in calls.items()}, 7)
        kept = sparse.values.numel() / (rows * columns)
        share = kept * times["dense"] / times["sparse"]
        moving = times["moves"] / times["sparse"]
        bound = "reading, transposing and writing tokens" if moving > 0.5 else "a load for each product"
        facts: Found = {"part": "rates", "matrix": name, "kept": round(kept, 4), **ratios(times)}
        found.append({**facts, "share_of_dense_rate": round(share, 2), "moving": round(moving, 2), "bound": bound})
        print(json.dumps(found[-1]), flush=True)
    return found
