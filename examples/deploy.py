"""From a pruned model to folders that ship: how many bytes each takes, and how fast it is on this CPU.

    python examples/deploy.py MODEL OUTPUT [--batch 8] [--length 128] [--rounds 20]

MODEL is a run of `platon prune`, or the folder of a model with zeros in it. OUTPUT gets a folder for each form, each of
which `platon.load` opens. Needs `pip install 'platon[lab]'`.
"""

import argparse
from pathlib import Path

import platon


def size(folder: Path) -> float:
    """Megabytes in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def main(words: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args(words)

    model = platon.load(given.model)
    folders = {name: given.output / name for name in ("dense", "sparse", "fast", "fast-half")}
    platon.save(model, folders["dense"])
    platon.save(model, folders["sparse"], sparse=True)  # bits and values: small, not faster
    fast = platon.sparsify(model)  # layers that skip zeros
    platon.save(fast, folders["fast"])
    platon.save(fast, folders["fast-half"], precision="float16", embeddings="int8")

    found = {name: {"megabytes": size(folder)} for name, folder in folders.items()}
    for name in ("fast", "fast-half"):
        # The two models take turns, so that whatever else the machine does meets both of them.
        measured = platon.measure(
            folders[name], folders["dense"], rows=(given.batch,), lengths=(given.length,), rounds=given.rounds
        )
        milliseconds = {line["model"]: line["median_ms"] for line in measured["timings"]}
        found[name] |= {"milliseconds": milliseconds["pruned"], "dense milliseconds": milliseconds["dense"]}
    for name, numbers in found.items():
        times = "{milliseconds:8.1f} ms, dense {dense milliseconds:.1f} ms" if "milliseconds" in numbers else ""
        print(f"{name:10} {numbers['megabytes']:8.2f} MB " + times.format(**numbers))
    return found


if __name__ == "__main__":
    main()
