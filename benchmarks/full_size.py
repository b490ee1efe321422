"""One optimizer step at full size, with and without pruning: BERT-base, DeBERTaV3-base and ViT-B/16 at 384 px.

    python benchmarks/full_size.py                       all three; a few minutes on two cores
    python benchmarks/full_size.py bert-base --layers 1  a quick look

The models are built from config, with random weights and random data. Each is measured in a process of its own, so that
its peak memory is its own. Prints a JSON object a model; times are medians of a few steps, after one to warm up.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# torch is imported by the measuring processes alone: a process inherits the peak memory of the one that starts it.

KEEP = 0.1
LENGTH = 128


def bert_base(layers: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    batch = {"input_ids": torch.randint(1000, 30000, (8, LENGTH)), "labels": torch.randint(2, (8,))}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers)), batch


def deberta_v3_base(layers: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=128100,
        hidden_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=512,
        type_vocab_size=0,
        layer_norm_eps=1e-7,
        relative_attention=True,
        max_relative_positions=-1,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        pooler_hidden_size=768,
    )
    batch = {"input_ids": torch.randint(1000, 128000, (2, LENGTH)), "labels": torch.randint(2, (2,))}
    return DebertaV2ForSequenceClassification(config), batch


def vit_base_384(layers: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=384, patch_size=16, num_hidden_layers=layers, num_labels=1000)
    batch = {"pixel_values": torch.randn(2, 3, 384, 384), "labels": torch.randint(1000, (2,))}
    return ViTForImageClassification(config), batch


#: the model with a batch for it, and the optimizer that the paper trains it with
MODELS: dict[str, tuple[Callable[[int], tuple[Any, dict[str, Any]]], str]] = {
    "bert-base": (bert_base, "adamw"),
    "deberta-v3-base": (deberta_v3_base, "adamw"),
    "vit-base-384": (vit_base_384, "sgd"),
}


def peak_gb() -> float:
    """The most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9, 2)


def measure(name: str, layers: int, rounds: int) -> dict[str, object]:
    import torch

    import platon

    torch.manual_seed(0)
    build, kind = MODELS[name]
    model, batch = build(layers)
    model.train()
    if kind == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=True)

    def step() -> tuple[float, float]:
        """Seconds of the whole step, and of the optimizer in it."""
        start = time.perf_counter()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        middle = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        optimizer.zero_grad()
        return time.perf_counter() - start, end - middle

    def median() -> list[float]:
        return [round(statistics.median(part), 3) for part in zip(*(step() for _ in range(rounds)), strict=True)]

    step()
    without = median()
    peak_without = peak_gb()
    pruner = platon.Pruner(model, optimizer, schedule=platon.Constant(KEEP))
    first, _ = step()  # compiles
    pruned = median()
    peak = peak_gb()
    return {
        "model": name,
        "optimizer": kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "prunable_weights": pruner.units.count,
        "kept_exactly": kept_exactly(pruner),
        "seconds": {
            "step_without_pruning": without[0],
            "step_with_pruning": pruned[0],
            "optimizer_without_pruning": without[1],
            "optimizer_with_pruning": pruned[1],
            "first_step_with_pruning": round(first, 3),
        },
        "peak_memory_gb": peak,
        "peak_memory_gb_without_pruning": peak_without,
        "threads": torch.get_num_threads(),
    }


def kept_exactly(pruner: Any) -> bool:
    """Whether as many weights stay as were asked for, and all others are zero."""
    matrices = pruner.units.matrices
    kept = 0
    for name, mask in pruner.masks().items():
        kept += int(mask.sum())
        if matrices[name].detach()[~mask].any():
            return False
    return kept == round(KEEP * pruner.units.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--here", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.models if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    for name in arguments.models:
        if arguments.here:
            print(json.dumps(measure(name, arguments.layers, arguments.rounds)), flush=True)
        else:
            options = ["--here", "--layers", str(arguments.layers), "--rounds", str(arguments.rounds)]
            subprocess.run([sys.executable, __file__, name, *options], check=True)


if __name__ == "__main__":
    main()
