"""What the probe costs a training step: a look, spread over the steps between two looks, beside a real pruned step.

    python benchmarks/probe.py                  # BERT of 1 and 10 million prunable weights, batch 16 × 128 tokens

Step and look are timed in turns in one run, so that a noisy machine disturbs both alike. Prints a JSON object a size.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import BertConfig, BertForSequenceClassification

import platon
from platon.lab.probe import BEAT, Probe

WIDTH = {1: (2, 192), 10: (6, 384), 85: (12, 768)}  # millions of prunable weights: layers, hidden size
BATCH, LENGTH = 16, 128


def measure(size: int, rounds: int, folder: Path) -> dict[str, float]:
    layers, hidden = WIDTH[size]
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=hidden // 64)
    config.intermediate_size = 4 * hidden
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    sealed = SimpleNamespace(pruner=None)
    probe = Probe(folder, 10 * BEAT * rounds, sealed)  # type: ignore[arg-type]
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    probe.on_train_begin(None, state, None, model=model, optimizer=optimizer)  # type: ignore[arg-type]
    probe._handle.remove()  # it is called by hand, so that it can be timed
    sealed.pruner = platon.Pruner(model, optimizer, schedule=platon.Constant(0.1))
    tokens, labels = torch.randint(5, 9_000, (BATCH, LENGTH)), torch.randint(2, (BATCH,))
    steps, looks, quantiles, layers_seconds = [], [], [], []
    for number in range(rounds + 2):
        begin = time.perf_counter()
        model(tokens, labels=labels).loss.backward()
        optimizer.step()
        step = time.perf_counter() - begin
        state.global_step = BEAT * (number + 1) - 1
        probe._cdf_steps = set()
        begin = time.perf_counter()
        probe.on_step_begin(None, state, None)  # type: ignore[arg-type]
        probe._hook()
        probe.on_optimizer_step(None, state, None)  # type: ignore[arg-type]
        look = time.perf_counter() - begin
        optimizer.zero_grad()
        begin = time.perf_counter()
        probe._quantiles("sensitivity"), probe._quantiles("uncertainty")
        quantile = time.perf_counter() - begin
        begin = time.perf_counter()
        probe.on_evaluate(None, state, None)  # type: ignore[arg-type]
        evaluation = time.perf_counter() - begin
        if number > 1:  # the first compile and allocate
            steps.append(step), looks.append(look), quantiles.append(quantile), layers_seconds.append(evaluation)
    step, look = statistics.median(steps), statistics.median(looks)
    return {
        "million_weights": size,
        "step_ms": round(1e3 * step, 2),
        "look_ms": round(1e3 * look, 3),
        "look_share_of_a_step": round(look / BEAT / step, 5),
        "quantiles_in_steps": round(statistics.median(quantiles) / step, 3),
        "layers_in_steps": round(statistics.median(layers_seconds) / step, 3),
        # Five distributions and ten evaluations, over a training of a thousand steps.
        "all_share_of_1000_steps": round(
            (100 * look + 5 * statistics.median(quantiles) + 10 * statistics.median(layers_seconds)) / (1000 * step), 5
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 10], choices=WIDTH)
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    for size in chosen.sizes:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps(measure(size, chosen.rounds, Path(place))), flush=True)


if __name__ == "__main__":
    main()
