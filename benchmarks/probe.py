"""What the probe costs: one observation, spread over the steps between two of them, beside a real pruned step.

    python benchmarks/probe.py                  # BERT of 1 and 10 million prunable weights, batch 16 × 128 tokens

Step and observation are timed in turns in one run, so that noise of the machine affects both equally. Prints a
JSON object for each size.
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
from platon.lab.folder import RunFolder
from platon.lab.probe import INTERVAL, Probe

WIDTH = {1: (2, 192), 10: (6, 384), 85: (12, 768)}  # millions of prunable weights: layers, hidden size
BATCH, LENGTH = 16, 128


def measure(size: int, rounds: int, folder: Path) -> dict[str, float]:
    layers, hidden = WIDTH[size]
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=hidden // 64)
    config.intermediate_size = 4 * hidden
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    checkpoints = SimpleNamespace(pruner=None)
    probe = Probe(RunFolder(folder), 10 * INTERVAL * rounds, checkpoints)  # type: ignore[arg-type]
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    probe.on_train_begin(None, state, None, model=model, optimizer=optimizer)  # type: ignore[arg-type]
    for hook in probe._hooks:
        hook.remove()  # called by hand below, so that it can be timed
    checkpoints.pruner = platon.Pruner(model, optimizer, schedule=platon.Constant(0.1))
    tokens, labels = torch.randint(5, 9_000, (BATCH, LENGTH)), torch.randint(2, (BATCH,))
    steps, observations, quantiles, layers_seconds = [], [], [], []
    for number in range(rounds + 2):
        begin = time.perf_counter()
        model(tokens, labels=labels).loss.backward()
        optimizer.step()
        step = time.perf_counter() - begin
        state.global_step = INTERVAL * (number + 1) - 1
        probe._cdf_steps = set()
        begin = time.perf_counter()
        probe.on_step_begin(None, state, None)  # type: ignore[arg-type]
        probe._observe(before=True)
        probe._observe(before=False)
        probe.on_optimizer_step(None, state, None)  # type: ignore[arg-type]
        observation = time.perf_counter() - begin
        optimizer.zero_grad()
        begin = time.perf_counter()
        probe._quantiles("sensitivity"), probe._quantiles("uncertainty")
        quantile = time.perf_counter() - begin
        begin = time.perf_counter()
        probe.on_evaluate(None, state, None)  # type: ignore[arg-type]
        evaluation = time.perf_counter() - begin
        if number > 1:  # the first two compile kernels and allocate memory
            (
                steps.append(step),
                observations.append(observation),
                quantiles.append(quantile),
                layers_seconds.append(evaluation),
            )
    step, observation = statistics.median(steps), statistics.median(observations)
    return {
        "million_weights": size,
        "step_ms": round(1e3 * step, 2),
        "observation_ms": round(1e3 * observation, 3),
        "observation_share_of_a_step": round(observation / INTERVAL / step, 5),
        "quantiles_in_steps": round(statistics.median(quantiles) / step, 3),
        "layers_in_steps": round(statistics.median(layers_seconds) / step, 3),
        # Five distributions and ten evaluations, over a training of a thousand steps.
        "all_share_of_1000_steps": round(
            (100 * observation + 5 * statistics.median(quantiles) + 10 * statistics.median(layers_seconds))
            / (1000 * step),
            5,
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
