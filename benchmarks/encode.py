"""`SentenceTransformer.encode` of real sentences: the dense model, the pruned one, and the pruned one sparsified.

    python benchmarks/encode.py MODEL PRUNED TEXTS              1,000 sentences, batches of 32
    python benchmarks/encode.py MODEL PRUNED TEXTS --batch 1    one at a time

MODEL and PRUNED are sentence-transformers folders, such as the model that `platon prune --task embed` started from and
`model/` of its run folder; TEXTS has a text in each line. The models take turns; the shortest of several times counts.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

import platon

ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("pruned", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    lines = given.texts.read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()][: given.sentences]

    def opened(folder: Path) -> SentenceTransformer:
        return SentenceTransformer(str(folder), device="cpu")

    models = {"dense": opened(given.model), "pruned": opened(given.pruned)}
    models["sparsified"] = platon.sparsify(models["pruned"])
    before, after = (models[name].encode(texts[:64]) for name in ("pruned", "sparsified"))
    print(f"{len(texts)} sentences in batches of {given.batch}; largest difference {np.abs(before - after).max():.1e}")
    for threads in given.threads:
        torch.set_num_threads(threads)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(ROUNDS):
            for name, model in models.items():
                start = time.perf_counter()
                model.encode(texts, batch_size=given.batch)
                seconds[name].append(time.perf_counter() - start)
        best = {name: min(found) for name, found in seconds.items()}
        times = ", ".join(f"{name} {one:.2f} s" for name, one in best.items())
        print(f"{threads} threads: {times}; sparsified {best['dense'] / best['sparsified']:.2f} × dense")


if __name__ == "__main__":
    main()
