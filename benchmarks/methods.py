"""Every method on the embedded digits ViT: a table of accuracy by method and share kept, mean ± sd over seeds.

    python benchmarks/methods.py                      # what the table in docs/methods.md shows
    python benchmarks/methods.py --keeps 0.5 --seeds 1 --methods movement l0

The dense model of a seed is trained once; every method starts from it and has the same steps. Runs that are finished
are not run again, so that the program can be stopped and started.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from platon.engine.methods import METHODS
from platon.lab.run import prune
from platon.lab.settings import resolve


def run(folder: Path, **flags: Any) -> dict[str, Any]:
    """A finished run's record, from its folder or by running it."""
    return prune(resolve(flags={"task": "digits", "dense": "none", **flags}), folder, resume=folder.exists())


def accuracy(record: dict[str, Any]) -> float:
    return 100 * record["results"]["validation"]["accuracy"]


def cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/methods"), help="folder of the runs")
    parser.add_argument("--keeps", type=float, nargs="+", default=[0.5, 0.2, 0.1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=[name for name in METHODS if name != "dense"])
    chosen = parser.parse_args()
    seeds = range(chosen.seeds)
    dense = {seed: run(chosen.output / f"dense-{seed}", method="dense", seed=seed) for seed in seeds}
    found: dict[str, dict[float, list[float]]] = {}
    shares: dict[str, dict[float, list[float]]] = {}
    for method in chosen.methods:
        for keep in chosen.keeps:
            records = [
                run(
                    chosen.output / f"{method}-{100 * keep:g}-{seed}",
                    method=method,
                    keep=keep,
                    seed=seed,
                    model=str(chosen.output / f"dense-{seed}" / "model"),
                )
                for seed in seeds
            ]
            found.setdefault(method, {})[keep] = [accuracy(record) for record in records]
            shares.setdefault(method, {})[keep] = [record["kept"] for record in records]
            print(f"{method} at {keep:.0%}: {cell(found[method][keep])}", flush=True)
    print(f"\ndense {cell([accuracy(record) for record in dense.values()])}\n")
    print("| method | " + " | ".join(f"{keep:.0%} kept" for keep in chosen.keeps) + " |")
    print("|---|" + "---|" * len(chosen.keeps))
    for method, row in found.items():
        print(f"| {method} | " + " | ".join(cell(row[keep]) for keep in chosen.keeps) + " |")
    result = {"dense": [accuracy(record) for record in dense.values()], "accuracy": found, "kept": shares}
    (chosen.output / "methods.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
