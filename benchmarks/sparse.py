"""How fast a pruned model is on a CPU when its zeros are skipped: layer by layer, and whole encoders.

    python benchmarks/sparse.py                      everything; about ten minutes on two cores
    python benchmarks/sparse.py --parts layers       linear layers against PyTorch's dense ones: a minute
    python benchmarks/sparse.py --parts minilm       an encoder of MiniLM's size (bert: of BERT-base's) against dense
                                                     eager PyTorch, torch.compile and ONNX Runtime

All that is compared is timed in one run, its rounds interleaved, so that a noisy machine disturbs it all alike. A time
is the best of its rounds, because noise only adds. Weights are random, since time does not depend on their values.
Encoders keep 10 % of the weights in their blocks, spread as a global ranking spreads them: unevenly over matrices, and
over the rows and columns of a matrix.
Prints one JSON object a measurement and, last, the bars that the project sets itself.
"""

import argparse
import functools
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import platon
from platon.deploy import sparse_kernel
from platon.deploy.layer import CsrLinear, SparseLinear
from platon.deploy.sparse_matrix import from_dense

CONFIGS = {
    "minilm": BertConfig(num_hidden_layers=6, hidden_size=384, intermediate_size=1536, num_attention_heads=12),
    "bert": BertConfig(),
}
BATCHES = ((1, 128), (8, 128), (32, 32))
KEEP = 0.1
PAUSE = 0.02  # seconds: the threads of one engine go on spinning for a while after a call, and would disturb the next

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


# --- layers -----------------------------------------------------------------------------------------------------------


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


# --- encoders ---------------------------------------------------------------------------------------------------------


def prune_unevenly(model: BertModel) -> float:
    """10 % of all weights in the blocks stay. Matrices differ by e^±0.6, rows and columns by e^±0.5. The share kept."""
    weights = [weight for name, weight in model.encoder.named_parameters() if weight.ndim == 2]
    random = torch.Generator().manual_seed(1)

    def factor(size: int, spread: float) -> Tensor:
        return torch.exp(torch.randn(size, generator=random) * spread)

    matrix = factor(len(weights), 0.6)
    chances = [
        matrix[i] * factor(w.shape[0], 0.5)[:, None] * factor(w.shape[1], 0.5)[None] for i, w in enumerate(weights)
    ]
    low, high, total = 0.0, 10.0, sum(w.numel() for w in weights)
    for _ in range(40):
        middle = (low + high) / 2
        expected = sum(float((chance * middle).clamp(max=1).sum()) for chance in chances)
        low, high = (low, middle) if expected > KEEP * total else (middle, high)
    for weight, chance in zip(weights, chances, strict=True):
        weight[torch.rand(weight.shape, generator=random) >= chance * low] = 0
    return sum(int(w.count_nonzero()) for w in weights) / total


def onnx_session(model: BertModel, ids: Tensor, folder: Path) -> Callable[[], object] | None:
    """The dense model in ONNX Runtime, on as many threads; `None` where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    path = folder / f"{ids.shape[0]}x{ids.shape[1]}.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()  # the exporter's, about operators of packages that are not installed
        torch.onnx.export(model, (ids,), path, input_names=["ids"], dynamo=True, verbose=False)
        logging.disable(logging.NOTSET)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"ids": ids.numpy()}
    return lambda: session.run(None, feed)


def measure_encoder(name: str, rounds: int) -> list[Found]:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = BertModel(CONFIGS[name], add_pooling_layer=False).eval().requires_grad_(False)
    kept = prune_unevenly(model)
    start = time.perf_counter()
    fast = platon.sparsify(model)
    seconds = time.perf_counter() - start
    layers = [module for module in fast.modules() if isinstance(module, SparseLinear)]
    shares = sorted(one.values.numel() / (one.in_features * one.out_features) for one in layers)
    found: list[Found] = []
    for batch, length in BATCHES:
        ids = torch.randint(1000, 20000, (batch, length))
        compiled = torch.compile(model, dynamic=False)
        with tempfile.TemporaryDirectory() as folder:
            session = onnx_session(model, ids, Path(folder))
        calls: dict[str, Callable[[], object]] = {
            "dense": functools.partial(model, ids),
            "sparse": functools.partial(fast, ids),
            "compiled": functools.partial(compiled, ids),
            **({"onnx": session} if session else {}),
        }
        times = interleaved(calls, rounds if batch == 1 else max(3, rounds // 2), PAUSE)
        want, got = model(ids).last_hidden_state, fast(ids).last_hidden_state
        found.append(
            {
                "part": name,
                "batch": f"{batch} x {length}",
                "threads": torch.get_num_threads(),
                "kept": round(kept, 4),
                "kept_by_matrix": [round(shares[0], 3), round(shares[-1], 3)],
                "sparse_layers": len(layers),
                "sparsify_seconds": round(seconds, 2),
                **ratios(times),
                "relative_error": float((got - want).abs().max() / want.abs().max()),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


# --- bars -------------------------------------------------------------------------------------------------------------


def pick(found: list[Found], over: str, of: str = "sparse", **facts: object) -> list[float]:
    """How many times faster `of` is than `over`, in the measurements with these facts."""
    chosen = [one["milliseconds"] for one in found if all(one.get(key) == value for key, value in facts.items())]
    return [times[over] / times[of] for times in chosen if over in times]  # type: ignore[operator, index]


def bars(found: list[Found]) -> None:
    wanted: list[tuple[str, list[float], float]] = []
    for threads, tenth, twentieth in ((1, 4.0, 7.0), (2, 3.5, 6.0)):
        for kept, bar in ((0.1, tenth), (0.05, twentieth), (0.2, 2.0)):
            name = f"layers, {threads} thread(s), {kept:.0%} kept: times dense"
            wanted.append((name, pick(found, "dense", part="layers", threads=threads, kept=kept), bar))
    wanted.append(("any density: times dense", pick(found, "dense", "sparsified", part="densities"), 0.95))
    wanted.append(("any number of tokens: times dense", pick(found, "dense", part="tokens"), 0.95))
    for name, bar in (("bert", 2.6), ("minilm", 2.2)):
        for over, least in (("dense", bar), ("compiled", 1.0), ("onnx", 1.0)):
            wanted.append((f"{name}: times {over}", pick(found, over, part=name), least))
    for name, values, bar in wanted:
        if values:
            met = "met " if min(values) >= bar else "MISS"
            print(f"{met}  {name}: {min(values):.2f} to {max(values):.2f}, at least {bar}")
    sizes = [float(str(one["bytes_of_dense"])) for one in found if one.get("kept") == KEEP and "bytes_of_dense" in one]
    if sizes:
        print(f"{'met ' if max(sizes) <= 0.25 else 'MISS'}  bytes at 10 % kept: {max(sizes)} of dense, at most 0.25")
    errors = [float(str(one["relative_error"])) for one in found if "relative_error" in one]
    if errors:
        print(f"{'met ' if max(errors) <= 1e-4 else 'MISS'}  relative error: {max(errors):.1e}, at most 1e-4")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["layers", *CONFIGS], choices=["layers", *CONFIGS])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    engine = sparse_kernel.find()
    if isinstance(engine, str):
        raise SystemExit(f"there is nothing to measure: {engine}")
    print(json.dumps({"kernel": sparse_kernel.LEVELS[engine.level], "torch": str(torch.__version__)}))
    found: list[Found] = []
    for part in arguments.parts:
        if part == "layers":
            found += [*measure_layers(), *measure_tokens(), *measure_densities()]
        else:
            found += measure_encoder(part, arguments.rounds)
    bars(found)


if __name__ == "__main__":
    main()
