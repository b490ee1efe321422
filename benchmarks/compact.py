"""Compact models beside the dense one: BERT-base size, batch 8 × 128, half and four fifths of heads and neurons gone.

    python benchmarks/compact.py                                 two threads, eager and ONNX Runtime; about four minutes
    python benchmarks/compact.py --engine eager --layers 2       a quick look

The model is built from config, with random weights. Which heads and neurons go is random, over the whole model, as a
global ranking would have it: layers keep different numbers, and none loses its last. The models take turns in one run.
Prints a JSON object: the median and the middle half of the times, the ratio to dense, the bytes on disk, what the
compact model computes differently, and where its time goes (`--profile`).
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import platon
from platon.deploy.shrink import largest_difference
from platon.deploy.speed import ENGINES, Setting, measure
from platon.engine.proof.discovery import heads, neurons

SHARES = (0.5, 0.8)
BARS = {0.5: 1.8, 0.8: 3.5}  # times as fast as dense, in eager PyTorch on two cores


def build(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers)).eval()


def empty(model: nn.Module, share: float) -> None:
    """Zero this share of the heads and of the neurons, at random over the whole model."""
    random = torch.Generator().manual_seed(0)
    for groups in (heads(model), neurons(model)):
        count = sum(group.count for group in groups)
        kept = torch.zeros(count, dtype=torch.bool)
        kept[torch.randperm(count, generator=random)[round(share * count) :]] = True
        for group, mine in zip(groups, kept.split([group.count for group in groups]), strict=True):
            mine[0] |= not mine.any()
            with torch.no_grad():
                for part in group.slices:
                    part.parameter.mul_(part.expand(mine.float()))


def profile(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """The share of the time that each operation takes, the largest first."""
    with torch.inference_mode(), torch.profiler.profile() as found:
        model(**batch)
    events = [event for event in found.key_averages() if event.self_cpu_time_total]
    whole = sum(event.self_cpu_time_total for event in events)
    largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:8]
    return {event.key: round(event.self_cpu_time_total / whole, 3) for event in largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="default: eager and onnx")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--profile", action="store_true", help="say where the time goes, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = {
        "input_ids": torch.randint(1000, 30000, (options.rows, options.length)),
        "attention_mask": torch.ones(options.rows, options.length, dtype=torch.int64),
    }
    result: dict[str, Any] = {"shares": {}}
    with tempfile.TemporaryDirectory() as place:
        model = build(options.layers)
        folders = {"dense": platon.save(model, Path(place) / "dense")}
        for share in SHARES:
            empty(model, share)  # the same order, so what went at the smaller share is among it
            small = platon.compact(model)
            name = f"{share:.0%} removed"
            result["shares"][name] = {
                "parameters": sum(parameter.numel() for parameter in small.parameters()),
                "difference": largest_difference(model, small, batch),
            }
            if options.profile:
                result["shares"][name]["profile"] = profile(small, batch)
            folders[name] = platon.save(small, Path(place) / f"{share}")
        engines = tuple(options.engine or ("eager", "onnx"))
        setting = Setting(engines, (options.rows,), (options.length,), options.rounds, options.threads)
        found = measure(folders, batch, setting)
    result |= found
    ratios: dict[str, dict[str, float]] = {}
    for line in found["timings"]:
        if "error" not in line:
            first = next(one for one in found["timings"] if one["engine"] == line["engine"])
            ratios.setdefault(line["engine"], {})[line["model"]] = round(first["median_ms"] / line["median_ms"], 2)
    result["ratios"] = ratios
    result["bars"] = {f"{share:.0%} removed": bar for share, bar in BARS.items()}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
