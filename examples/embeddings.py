"""Prune a sentence-embedding model without labels, then measure what it lost and how much faster it is on this CPU.

    python examples/embeddings.py MODEL TEXTS OUTPUT [--pairs FILE] [--keep 0.2] [--steps 500] [--method platon]

MODEL is a sentence-transformers folder or hub name, TEXTS a file with a text in each line. The texts should be like
those that the model will embed; a few thousand are enough. An interrupted run goes on when the command is repeated.
Needs `pip install 'platon[lab]' sentence-transformers`.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

import platon
from platon.lab.printer import Printer
from platon.lab.run import prune
from platon.lab.settings import resolve


def seconds(model: SentenceTransformer, texts: list[str]) -> float:
    """The time to embed the texts, the best of three."""
    model.encode(texts[:8])
    found = []
    for _ in range(3):
        start = time.perf_counter()
        model.encode(texts, batch_size=32)
        found.append(time.perf_counter() - start)
    return min(found)


def main(words: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--pairs", help="two texts and a score in each row, or a folder with STS-B in the hub's layout")
    parser.add_argument("--keep", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--method", default="platon")
    parser.add_argument("--sentences", type=int, default=1000, help="texts to embed when the speed is measured")
    given = parser.parse_args(words)

    # The same as: platon prune --task embed --model MODEL --data TEXTS --keep 0.2 --steps 500 --output OUTPUT --resume
    flags = {"task": "embed", "data": str(given.texts)}
    flags |= {name: getattr(given, name) for name in ("model", "pairs", "keep", "steps", "method")}
    record = prune(resolve(flags=flags), given.output, resume=given.output.exists(), printer=Printer(print))
    numbers = {
        f"{split} {metric}": value for split, found in record["results"].items() for metric, value in found.items()
    }

    # What comes out is an ordinary sentence-transformers folder.
    dense = SentenceTransformer(given.model, device="cpu")
    pruned = SentenceTransformer(str(given.output / "model"), device="cpu")
    lines = [line.strip() for line in given.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = (lines * (given.sentences // len(lines) + 1))[: given.sentences]
    before = pruned.encode(texts[:64])
    numbers["seconds, dense"] = seconds(dense, texts)
    fast = platon.sparsify(pruned)  # a copy that skips the zeros
    numbers["seconds, sparsified"] = seconds(fast, texts)
    numbers["largest difference of sparsify"] = float(np.abs(fast.encode(texts[:64]) - before).max())
    for name, value in numbers.items():
        print(f"{name:32} {value:.4g}")
    return numbers


if __name__ == "__main__":
    main()
