"""Prune a language model: at once with Wanda, then trained with its dense self as teacher; and what each costs.

    python examples/decoder.py MODEL TEXTS FOLDER [--keep 0.5] [--steps 100] [--max-length 256]

MODEL is a folder, a hub name or a GGUF file, TEXTS a .txt, .jsonl or .parquet file or a folder of them. Needs
platon[lab]. Run it again after an interruption, and it goes on.
"""

import argparse
from pathlib import Path

from platon.lab.run import prune
from platon.lab.settings import resolve


def main(words: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--precision", default="float32", help="bf16 where the processor has it")
    given = parser.parse_args(words)

    same = {"task": "lm", "model": given.model, "data": given.texts, "keep": given.keep, "max_length": given.max_length}
    same |= {"precision": given.precision, "fast": False}
    runs = {
        "dense": {"method": "dense", "steps": 0},  # measures the model as it is
        "wanda": {"method": "wanda", "steps": 0},  # minutes: no training
        "platon": {"method": "platon", "steps": given.steps, "teacher": "dense"},
    }
    found = {}
    for name, settings in runs.items():
        record = prune(resolve(flags=same | settings), given.folder / name, resume=True)
        found[name] = record["results"]["validation"]["perplexity"]
        print(f"{name:8} {record['kept']:7.2%} kept, perplexity {found[name]:,.2f}")
    print(f"load a model with AutoModelForCausalLM.from_pretrained('{given.folder / 'platon' / 'model'}')")
    return found


if __name__ == "__main__":
    main()
