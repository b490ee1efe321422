"""What a teacher costs: time of a training step and peak memory, without one, with its outputs, with hidden states too.

    python benchmarks/distillation.py [--layers 6] [--width 384] [--rows 16] [--tokens 64] [--steps 20]

The teacher is the model itself. Beside each time stands what the teacher's pass should cost at most: the time of a
forward pass without gradients. Each training runs in a process of its own, because peak memory is that of a process;
the order of the trainings is repeated `--rounds` times and medians are taken. Prints JSON.
"""

import argparse
import json
import multiprocessing
import os
import resource
import time
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import BertConfig, BertForSequenceClassification

import platon

TEACHERS: dict[str, dict[str, float] | None] = {
    "no teacher": None,
    "outputs": {"weight": 0.5},
    "outputs and hidden states": {"weight": 0.5, "hidden_weight": 1.0},
}


def measure(name: str, size: argparse.Namespace, answers: Any) -> None:
    """Time a training in this process and send its numbers."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 32,
        intermediate_size=4 * size.width,
    )
    model = BertForSequenceClassification(config).train()
    settings = TEACHERS[name]
    distillation = None if settings is None else platon.Distillation(model, "self", **settings)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = {
        "input_ids": torch.randint(0, config.vocab_size, (size.rows, size.tokens)),
        "attention_mask": torch.ones(size.rows, size.tokens, dtype=torch.int64),
    }
    steps, passes = [], []
    for _ in range(size.steps):
        start = time.perf_counter()
        model(**batch, labels=batch["input_ids"][:, 0] % 2).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - start)
        if distillation is not None and distillation.teacher is not None:
            start = time.perf_counter()
            with torch.no_grad():
                distillation.teacher(**batch)
            passes.append(time.perf_counter() - start)
    answers.put(
        {
            "seconds a step": median(steps[1:]),
            "seconds of a forward pass": median(passes[1:]) if passes else None,
            "peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "weights, MB": sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20,
        }
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 6, "width": 384, "rows": 16, "tokens": 64, "steps": 20, "rounds": 3}.items():
        arguments.add_argument(f"--{name}", type=int, default=value)
    size = arguments.parse_args()
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in TEACHERS}
    for _ in range(size.rounds):
        for name, runs in found.items():
            answers = context.Queue()
            process = context.Process(target=measure, args=(name, size, answers))
            process.start()
            runs.append(answers.get())
            process.join()
    medians = {
        name: {key: median(run[key] for run in runs) if runs[0][key] is not None else None for key in runs[0]}
        for name, runs in found.items()
    }
    plain = medians["no teacher"]
    for numbers in medians.values():
        numbers["time, relative"] = numbers["seconds a step"] / plain["seconds a step"]
        if numbers["seconds of a forward pass"] is not None:
            extra = numbers["seconds a step"] - plain["seconds a step"]
            numbers["extra time in forward passes"] = extra / numbers["seconds of a forward pass"]
        numbers["extra memory in weights"] = (numbers["peak memory, MB"] - plain["peak memory, MB"]) / plain[
            "weights, MB"
        ]
    print(json.dumps({"size": vars(size), "trainings": medians}, indent=1))


if __name__ == "__main__":
    main()
