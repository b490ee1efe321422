"""What a prune step costs: in time beside AdamW, a dense training step, a copy and a textbook version; and in memory.

    python benchmarks/step.py              1, 10 and 85 million prunable weights; about five minutes on two cores
    python benchmarks/step.py --sizes 1 10
    python benchmarks/step.py --sizes 10 --methods       every method beside PLATON

All figures of a size come from one run, its rounds interleaved, so that a noisy machine disturbs all of them alike.
Prints one JSON object a size and, last, the bars that the project sets itself at 85 million.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForSequenceClassification

import platon
from platon.engine.methods import METHODS

WIDTH = {1: (2, 192), 10: (6, 384), 85: (12, 768)}  # millions of prunable weights: layers, hidden size
BATCH, LENGTH = 16, 128
KEEP = 0.1


class Nothing(torch.optim.Optimizer):
    """Moves no weight, so that its step is the pruner's hooks and nothing else."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        pass


class Textbook:
    """PLATON as one writes it first: elementwise averages, `cat`, `kthvalue`, `masked_fill_`."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights
        self.sensitivity = [torch.zeros_like(w) for w in weights]
        self.uncertainty = [torch.zeros_like(w) for w in weights]

    @torch.no_grad()
    def step(self, beta1: float = 0.85, beta2: float = 0.85) -> None:
        scores = []
        for w, average, spread in zip(self.weights, self.sensitivity, self.uncertainty, strict=True):
            now = (w * w.grad).abs()
            average.mul_(beta1).add_(now, alpha=1 - beta1)
            spread.mul_(beta2).add_((now - average).abs(), alpha=1 - beta2)
            scores.append(average * spread)
        flat = torch.cat([score.view(-1) for score in scores])
        cut = flat.kthvalue(flat.numel() - round(KEEP * flat.numel())).values
        for w, score in zip(self.weights, scores, strict=True):
            w.masked_fill_(score <= cut, 0)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that the allocator holds at once during the call, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def make_model(millions: int) -> tuple[BertForSequenceClassification, Callable[[], None]]:
    """A BERT with so many prunable weights, and a function that gives it gradients."""
    layers, hidden = WIDTH[millions]
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=hidden // 64
    )
    model = BertForSequenceClassification(config)
    tokens = torch.randint(1000, 20000, (BATCH, LENGTH))
    labels = torch.randint(0, 2, (BATCH,))

    def backward() -> None:
        model.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()

    return model, backward


def measure(millions: int, rounds: int) -> dict[str, object]:
    model, backward = make_model(millions)
    units = platon.weights(model)
    weights = list(units.matrices.values())
    adamw = torch.optim.AdamW(weights, lr=1e-5, fused=True)
    whole = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    hooks = Nothing(weights)
    pruner = platon.Pruner(model, hooks, schedule=platon.Constant(KEEP), units=units)
    textbook = Textbook([torch.nn.Parameter(w.detach().clone()) for w in weights])
    copies = [torch.empty_like(w) for w in weights]

    def dense() -> None:
        backward()
        whole.step()

    def copy() -> None:
        for target, w in zip(copies, weights, strict=True):
            target.copy_(w.detach())

    def score() -> None:
        with torch.no_grad():
            pruner._ranking.update(0)

    def prune() -> None:
        with torch.no_grad():
            pruner._after()

    names = ("dense", "adamw", "hooks", "prune", "score", "copy", "textbook")
    times: dict[str, list[float]] = {name: [] for name in names}
    dense()
    gradients = [w.grad.clone() for w in weights]
    for warm in range(2):  # compilation, allocation, the first pages
        hooks.step()
        score()
        copy()
        adamw.step()
        if not warm:
            for mine, w in zip(textbook.weights, weights, strict=True):
                mine.grad = w.grad
            textbook.step()
    for number in range(rounds):
        if number < 3:
            times["dense"].append(seconds(dense))
        for w, gradient in zip(weights, gradients, strict=True):
            w.grad.copy_(gradient).mul_(torch.randn(())).add_(torch.randn(gradient.shape[0], 1) * 1e-6)
        times["adamw"].append(seconds(adamw.step))
        times["prune"].append(seconds(prune))
        adamw.step()
        times["hooks"].append(seconds(hooks.step))
        times["score"].append(seconds(score))
        times["copy"].append(seconds(copy))
        if number < 5:
            times["textbook"].append(seconds(textbook.step))
    middle = {name: statistics.median(found) for name, found in times.items()}
    count = units.count
    state = sum(t.nbytes for t in pruner.state_dict()["tensors"].values())
    return {
        "prunable_weights": count,
        "fused": pruner._ranking.fused,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "milliseconds": {name: round(1000 * value, 2) for name, value in middle.items()},
        "prune_over_adamw": round(middle["prune"] / middle["adamw"], 2),
        "hooks_over_adamw": round(middle["hooks"] / middle["adamw"], 2),  # with the search for non-finite gradients
        "prune_share_of_dense_step": round(middle["hooks"] / middle["dense"], 4),
        "textbook_over_prune": round(middle["textbook"] / middle["prune"], 1),
        # Four reads and two writes of a matrix; a copy is one and one.
        "score_over_its_traffic": round(middle["score"] / (3 * middle["copy"]), 2),
        "nanoseconds_a_weight": round(1e9 * middle["prune"] / count, 3),
        "state_bytes_a_weight": round(state / count, 3),
        "peak_share_of_weights": round(peak_bytes(hooks.step) / (4 * count), 4),
        "kept_exactly": pruner.kept() == round(KEEP * count) / count,
    }


def measure_methods(millions: int, rounds: int) -> dict[str, object]:
    """Time and memory a step of each method, rounds interleaved: the hooks of an optimizer that does nothing."""
    model, backward = make_model(millions)
    backward()
    units = platon.weights(model)
    weights = list(units.matrices.values())
    gradients = [w.grad.clone() for w in weights]
    full = [w.detach().clone() for w in weights]
    schedule = platon.Cubic(final=KEEP, total=2, cooldown=1)
    scores = {name: method.score() for name, method in METHODS.items() if method.score is not None}
    times: dict[str, list[float]] = {name: [] for name in scores}
    memory: dict[str, float] = {}

    def fresh() -> None:
        with torch.no_grad():
            for w, weight, gradient in zip(weights, full, gradients, strict=True):
                w.copy_(weight)
                w.grad.copy_(gradient).mul_(torch.randn(()))

    for name, score in scores.items():
        fresh()
        hooks = Nothing(weights)
        pruner = platon.Pruner(model, hooks, score=score, schedule=schedule, units=units)
        for _ in range(3):  # to the final phase, and through compilation
            hooks.step()
        for _ in range(rounds):
            for w, gradient in zip(weights, gradients, strict=True):
                w.grad.copy_(gradient).mul_(torch.randn(()))
            times[name].append(seconds(hooks.step))
        memory[name] = sum(t.nbytes for t in pruner.state_dict()["tensors"].values()) / units.count
        pruner.detach()
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {
        "prunable_weights": units.count,
        "milliseconds": {name: round(1000 * value, 2) for name, value in middle.items()},
        "over_platon": {name: round(value / middle["platon"], 2) for name, value in middle.items()},
        "state_bytes_a_weight": {name: round(value, 3) for name, value in memory.items()},
    }


BARS = {
    "prune_over_adamw": (3.5, "at most"),
    "prune_share_of_dense_step": (0.025, "at most"),
    "textbook_over_prune": (12, "at least"),
    "score_over_its_traffic": (1.5, "at most"),
    "state_bytes_a_weight": (8.126, "at most"),
    "peak_share_of_weights": (0.05, "at most"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 10, 85], choices=list(WIDTH), help="in millions")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--methods", action="store_true", help="every method beside PLATON, instead of the bars")
    arguments = parser.parse_args()
    if arguments.methods:
        for millions in arguments.sizes:
            print(json.dumps(measure_methods(millions, arguments.rounds)), flush=True)
        return
    found: dict[str, object] = {}
    for millions in arguments.sizes:
        found = measure(millions, arguments.rounds)
        print(json.dumps(found), flush=True)
    if 85 in arguments.sizes:
        for name, (bar, side) in BARS.items():
            value = float(found[name])  # type: ignore[arg-type]
            met = value <= bar if side == "at most" else value >= bar
            print(f"{'met ' if met else 'MISS'}  {name} = {value}, {side} {bar}")


if __name__ == "__main__":
    main()
