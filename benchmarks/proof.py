"""How long the proof of heads and neurons takes, and cutting half of them out: BERT-base and a 24-layer decoder.

    python benchmarks/proof.py

The models are built from config, with random weights. Prints a JSON line for each: seconds of processor time, on one
thread, for finding and proving the units, for `platon.compact` (with its comparison of both models), for a forward pass
of 8 × 128 tokens to compare with, and the largest difference of outputs. The bar: below 30 s for proof and cutting
together.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

import platon
from platon.engine.proof.discovery import heads, neurons

BAR = 30.0
MODELS: dict[str, Callable[[], Any]] = {
    "BERT-base": lambda: hf.BertForSequenceClassification(hf.BertConfig()),
    "24-layer decoder": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=32_000,
        )
    ),
}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def measure(build: Callable[[], Any]) -> dict[str, Any]:
    """Of one model."""
    torch.manual_seed(0)
    model = build().eval()
    proof, groups = timed(lambda: heads(model) + neurons(model))
    with torch.no_grad():
        for group in groups:
            kept = torch.arange(group.count) % 2 == 0
            for part in group.slices:
                part.parameter.mul_(part.expand(kept.float()))
    cutting, small = timed(lambda: platon.compact(model))
    tokens = torch.randint(0, 30_000, (8, 128))
    with torch.inference_mode():
        seconds, expected = timed(lambda: model(tokens).logits)
        difference = float((small(tokens).logits - expected).abs().max() / expected.abs().max())
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "left": sum(parameter.numel() for parameter in small.parameters()),
        "proof": round(proof, 2),
        "cutting": round(cutting, 2),
        "forward": round(seconds, 2),
        "difference": difference,
    }


def main() -> None:
    torch.set_num_threads(1)
    slow = []
    for name, build in MODELS.items():
        found = measure(build)
        print(json.dumps({"model": name, **found}), flush=True)
        if found["proof"] + found["cutting"] > BAR or not found["difference"] <= 1e-5:
            slow.append(name)
    sys.exit(f"beyond the bar: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()
