"""The folder that is shipped: its bytes, the memory that it takes, and how long it takes to load, beside dense.

    python benchmarks/deploy.py                 BERT-base, 10 % kept
    python benchmarks/deploy.py --keep 0.05     another share
    python benchmarks/deploy.py --model small   a model of a few million weights: seconds

The masks are random: bytes and memory depend on the number of zeros alone. Each memory figure comes from a process that
does nothing else: what it holds after loading the model and running one batch, less what it held before. Loading, and
loading with the first answer to 1 × 128 tokens, is timed in processes that have imported everything; the models take
turns, and the shortest time of several counts. `from_pretrained` maps the dense weights and reads none of them before
the first answer; `platon.load` has read and checked all bytes by then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import platon
from platon.deploy import memory

SIZES = {"base": {}, "small": {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}}
FORMS = {
    "fast": {},
    "fast, float16": {"precision": "float16"},
    "fast, float16, int8": {"precision": "float16", "embeddings": "int8"},
}
SHAPES = ((1, 128), (8, 128))
ROUNDS = 5


def build(size: str, keep: float) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES[size])).eval()
    with torch.no_grad():
        for matrix in platon.weights(model).matrices.values():
            matrix[torch.rand_like(matrix) > keep] = 0
    return model


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def load_seconds(folder: Path) -> tuple[float, float]:
    """Of a load in a new process, and of the load with the first answer."""
    done = subprocess.run([sys.executable, __file__, "--load", str(folder)], capture_output=True, text=True, check=True)
    loaded, answered = (float(word) for word in done.stdout.split()[-2:])
    return loaded, answered


def load_once(folder: Path) -> None:
    import time

    from transformers import BertForSequenceClassification
    from transformers.utils import logging

    import platon.deploy.storage  # imported before the clock starts, as transformers is

    logging.disable_progress_bar()
    tokens = torch.randint(1000, 30000, (1, 128))
    start = time.perf_counter()
    if (folder / platon.deploy.storage.MANIFEST).exists():
        model = platon.load(folder)
    else:
        model = BertForSequenceClassification.from_pretrained(folder)
    loaded = time.perf_counter() - start
    with torch.inference_mode():
        model(tokens)
    print(loaded, time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--model", choices=tuple(SIZES), default="base")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        load_once(given.load)
        return
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        model = build(given.model, given.keep)
        folders = {"dense": place / "dense"}
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(folders["dense"])
        fast = platon.sparsify(model, dense_above=0.5)
        for number, (name, form) in enumerate(FORMS.items()):
            folders[name] = platon.save(fast, place / f"fast{number}", **form)
        del model, fast
        rows = {name: {"bytes": folder_bytes(folder)} for name, folder in folders.items()}
        for count, length in SHAPES:
            models = [("eager", folder, place) for folder in folders.values()]
            tokens = torch.randint(1000, 30000, (count, length))
            found = memory.measure(models, {"input_ids": tokens}, torch.get_num_threads())
            for name, one in zip(folders, found, strict=True):
                rows[name][f"memory {count} × {length}"] = one["added_bytes"]
                rows[name][f"peak {count} × {length}"] = one["peak_bytes"]
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in folders}
        for _ in range(ROUNDS):
            for name, folder in folders.items():
                seconds[name].append(load_seconds(folder))
        for name, row in rows.items():
            row["load ms"], row["load and answer ms"] = (1e3 * min(taken) for taken in zip(*seconds[name], strict=True))
    print(f"BERT {given.model}, {given.keep:.0%} kept, {torch.get_num_threads()} threads; of the dense model's")
    for name, row in rows.items():
        shown = (f"{key} {_amount(key, value)} ({value / rows['dense'][key]:.1%})" for key, value in row.items())
        print(f"{name:20} {', '.join(shown)}")
    print(json.dumps(rows))


def _amount(key: str, value: float) -> str:
    return f"{value:.0f}" if key.endswith("ms") else f"{value / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
