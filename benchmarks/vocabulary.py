"""Peak memory of distilling a language model: the divergence over the vocabulary in chunks, and in one piece.

    python benchmarks/vocabulary.py [--rows 4] [--tokens 512] [--vocabulary 49152] [--width 64]

Logits have rows × tokens × vocabulary numbers. The model is one narrow block, so that logits are nearly all the memory
there is; it is trained for two steps without a teacher, with `platon.Distillation`, and with the divergence as it is
usually written (`F.kl_div` of two softmaxes over everything). Each in a process of its own, because peak memory is that
of a process. Prints JSON: megabytes above what the process holds before the first step, and in units of one tensor of
logits in float32.
"""

import argparse
import json
import multiprocessing
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import platon

WAYS = ("no teacher", "in chunks", "in one piece")


def measure(way: str, size: argparse.Namespace, answers: Any) -> None:
    """Train two steps in this process and send how much memory they added at most, and their processor time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=2 * size.width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model, teacher = LlamaForCausalLM(config).train(), LlamaForCausalLM(config).eval().requires_grad_(False)
    if way == "in chunks":
        platon.Distillation(model, teacher, weight=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = torch.randint(0, size.vocabulary, (size.rows, size.tokens))
    before, start = _peak(), time.process_time()
    for _ in range(2):
        output = model(input_ids=ids, labels=ids)
        loss = output.loss
        if way == "in one piece":
            with torch.no_grad():
                answer = teacher(input_ids=ids).logits
            ours, theirs = ((logits / 2).float().log_softmax(-1) for logits in (output.logits, answer))
            loss = 0.5 * loss + 0.5 * 4 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True) / size.tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    answers.put((_peak() - before, time.process_time() - start))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rows": 4, "tokens": 512, "vocabulary": 49152, "width": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    size = parser.parse_args()
    logits = size.rows * size.tokens * size.vocabulary * 4
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {"logits, MB": round(logits / 2**20)}
    for way in WAYS:
        answers = context.Queue()
        process = context.Process(target=measure, args=(way, size, answers))
        process.start()
        added, seconds = answers.get()
        process.join()
        found[way] = {
            "MB": round(added / 2**20),
            "times the logits": round(added / logits, 2),
            "processor seconds": round(seconds, 1),
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
