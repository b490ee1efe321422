"""How fast a pruned model is on a CPU when its zeros are skipped: layer by layer, whole encoders, and a decoder.

    python benchmarks/sparse.py                              everything; some twenty minutes on two cores
    python benchmarks/sparse.py --parts layers               linear layers against PyTorch's dense ones
    python benchmarks/sparse.py --parts rates                the matrices of MiniLM: rate, and what bounds it
    python benchmarks/sparse.py --parts minilm --keep 0.1    an encoder (bert: of BERT-base's size) against dense eager
                                                             PyTorch and ONNX Runtime with weights in int8
    python benchmarks/sparse.py --parts others               encoders of other architectures against eager PyTorch
    python benchmarks/sparse.py --parts decoder              tokens a second in generate(), at 50 and 80 % zeros

All that is compared is timed in one run, its rounds interleaved, so that a noisy machine disturbs it all alike. A time
is the best of its rounds, because noise only adds. Encoders are pruned as unevenly as PLATON does (masks.py).
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
from typing import Any

import torch
from torch import Tensor, nn

import masks
import platon
from platon.deploy import sparse_kernel
from sparse_layers import Found, interleaved, measure_densities, measure_layers, measure_rates, measure_tokens, ratios

ENCODERS = {"minilm": masks.minilm, "bert": masks.bert}
BATCHES = ((1, 16), (1, 128), (8, 128), (32, 32))
KEEPS = (0.1, 0.05)
PAUSE = 0.02  # seconds: the threads of one engine go on spinning for a while after a call, and would disturb the next
NEW_TOKENS, PROMPT = 32, 128


# --- encoders ---------------------------------------------------------------------------------------------------------


def int8_engine(model: nn.Module, folder: Path) -> Path | None:
    """The model for ONNX Runtime with its matrices in int8, for any batch; `None` where it is not installed."""
    try:
        import onnxruntime.quantization as quantization
    except ImportError:
        return None
    whole, small = folder / "whole.onnx", folder / "int8.onnx"
    ids = torch.randint(1000, 20000, (2, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()  # the exporter's, about operators of packages that are not installed
        shapes = ({0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=512)},)
        torch.onnx.export(model, (ids,), whole, input_names=["ids"], dynamic_shapes=shapes, dynamo=True, verbose=False)
        quantization.quantize_dynamic(whole, small, weight_type=quantization.QuantType.QInt8)
        logging.disable(logging.NOTSET)
    return small


def int8_call(path: Path, ids: Tensor) -> Callable[[], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"ids": ids.numpy()}
    return lambda: session.run(None, feed)


def measure_encoder(name: str, keep: float, rounds: int) -> list[Found]:
    model = ENCODERS[name](keep)
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = platon.compact(model)  # gives the model back where there is nothing to remove
        int8 = int8_engine(model, Path(folder))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            start = time.perf_counter()
            fast = platon.sparsify(model)
            seconds = time.perf_counter() - start
            engines: dict[str, Any] = {"dense": model, "sparse": fast}
            if small is not model:
                engines["compact"] = platon.sparsify(small)
            for batch, length in BATCHES:
                ids = torch.randint(1000, 20000, (batch, length))
                calls: dict[str, Callable[[], object]] = {
                    key: functools.partial(one, ids) for key, one in engines.items()
                }
                if int8:
                    calls["int8"] = int8_call(int8, ids)
                times = interleaved(calls, rounds if batch == 1 else max(3, rounds // 3), PAUSE)
                want, got = model(ids).last_hidden_state, fast(ids).last_hidden_state
                facts: Found = {"part": name, "kept": keep, "batch": f"{batch} x {length}", "threads": threads}
                facts |= {"tokens": batch * length, "sparsify_seconds": round(seconds, 2), **ratios(times)}
                found.append({**facts, "relative_error": float((got - want).abs().max() / want.abs().max())})
                print(json.dumps(found[-1]), flush=True)
    return found


def measure_others() -> list[Found]:
    """Other architectures at 10 %, one thread."""
    found: list[Found] = []
    torch.set_num_threads(1)
    for name, model in masks.others(0.1).items():
        fast = platon.sparsify(model)
        for batch, length in BATCHES[:3]:
            ids = torch.randint(1000, 20000, (batch, length))
            calls = {"dense": functools.partial(model, ids), "sparse": functools.partial(fast, ids)}
            times = interleaved(calls, 5, PAUSE)
            want, got = model(ids).last_hidden_state, fast(ids).last_hidden_state
            facts: Found = {"part": "others", "model": name, "batch": f"{batch} x {length}", **ratios(times)}
            found.append({**facts, "relative_error": float((got - want).abs().max() / want.abs().max())})
            print(json.dumps(found[-1]), flush=True)
    return found


# --- a decoder --------------------------------------------------------------------------------------------------------


def measure_decoder() -> list[Found]:
    """A decoder of the size of SmolLM-135M: tokens a second, one at a time after 16 others, and a longer prompt."""
    found: list[Found] = []
    models: dict[float, Any] = {zeros: masks.decoder(1 - zeros) for zeros in (0.5, 0.8)}
    ids, long = torch.randint(0, 49152, (1, 16)), torch.randint(0, 49152, (1, PROMPT))
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    settings["attention_mask"] = torch.ones_like(ids)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        engines = {"dense": models[0.5]}
        engines |= {f"{zeros:.0%} zeros": platon.sparsify(model, tokens=1) for zeros, model in models.items()}
        times = interleaved(
            {name: functools.partial(one.generate, ids, **settings) for name, one in engines.items()}, 3, PAUSE
        )
        rate = {name: round(NEW_TOKENS / seconds, 1) for name, seconds in times.items()}
        found.append({"part": "decoder", "threads": threads, "tokens_a_second": rate, **ratios(times)})
        print(json.dumps(found[-1]), flush=True)
        times = interleaved({name: functools.partial(one.model, long) for name, one in engines.items()}, 5, PAUSE)
        found.append({"part": "prompt", "tokens": PROMPT, "threads": threads, **ratios(times)})
        print(json.dumps(found[-1]), flush=True)
    return found


# --- bars -------------------------------------------------------------------------------------------------------------


def pick(found: list[Found], over: str, of: str = "sparse", **facts: object) -> list[float]:
    """How many times faster `of` is than `over`, in the measurements with these facts."""
    chosen: list[Any] = [
        one["milliseconds"] for one in found if all(one.get(key) == value for key, value in facts.items())
    ]
    return [times[over] / times[of] for times in chosen if over in times and of in times]


def bars(found: list[Found]) -> None:
    wanted: list[tuple[str, list[float], float]] = []
    for threads, tenth, twentieth in ((1, 4.0, 7.0), (2, 3.5, 6.0)):
        for kept, bar in ((0.1, tenth), (0.05, twentieth), (0.2, 2.0)):
            name = f"layers, {threads} thread(s), {kept:.0%} kept: times dense"
            wanted.append((name, pick(found, "dense", part="layers", threads=threads, kept=kept), bar))
    wanted.append(("any density: times dense", pick(found, "dense", "sparsified", part="densities"), 0.95))
    wanted.append(("any number of tokens: times dense", pick(found, "dense", part="tokens"), 0.95))
    for name, kept, bar in (("minilm", 0.1, 3.8), ("bert", 0.1, 5.0), ("minilm", 0.05, 5.0), ("bert", 0.05, 7.0)):
        cells = [one for one in found if one["part"] == name and one["kept"] == kept]
        large = [one for one in cells if one["batch"] in ("8 x 128", "32 x 32")]
        wanted.append((f"{name}, {kept:.0%} kept, 8 x 128 and 32 x 32: times dense", pick(large, "dense"), bar))
        wanted.append((f"{name}, {kept:.0%} kept, every batch: times dense", pick(cells, "dense"), 1.0))
        many = [one for one in cells if int(str(one["tokens"])) >= 128]
        wanted.append((f"{name}, {kept:.0%} kept, 128 tokens or more: times int8", pick(many, "int8"), 2.0))
        wanted.append((f"{name}, {kept:.0%} kept, compact first: times sparse", pick(cells, "sparse", "compact"), 0.95))
    wanted.append(("other architectures: times dense", pick(found, "dense", part="others"), 2.0))
    decoders = ("50% zeros", "80% zeros")
    for name, part, least in (("decoder", "decoder", (1.3, 2.0)), (f"prompt of {PROMPT}", "prompt", (2.0, 3.5))):
        for one, bar in zip(decoders, least, strict=True):
            wanted.append((f"{name}, {one}: times dense", pick(found, "dense", one, part=part), bar))
    for name, values, bar in wanted:
        if values:
            met = "met " if min(values) >= bar else "MISS"
            print(f"{met}  {name}: {min(values):.2f} to {max(values):.2f}, at least {bar}")
    sizes = [float(str(one["bytes_of_dense"])) for one in found if one.get("kept") == 0.1 and "bytes_of_dense" in one]
    if sizes:
        print(f"{'met ' if max(sizes) <= 0.25 else 'MISS'}  bytes at 10 % kept: {max(sizes)} of dense, at most 0.25")
    errors = [float(str(one["relative_error"])) for one in found if "relative_error" in one]
    if errors:
        print(f"{'met ' if max(errors) <= 1e-4 else 'MISS'}  relative error: {max(errors):.1e}, at most 1e-4")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ["layers", "rates", *ENCODERS, "others", "decoder"]
    parser.add_argument("--parts", nargs="+", default=every, choices=every)
    parser.add_argument("--keep", nargs="+", type=float, default=KEEPS, help="shares that the encoders keep")
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
        elif part == "rates":
            found += measure_rates()
        elif part == "others":
            found += measure_others()
        elif part == "decoder":
            found += measure_decoder()
        else:
            for keep in arguments.keep:
                found += measure_encoder(part, keep, arguments.rounds)
    bars(found)


if __name__ == "__main__":
    main()
