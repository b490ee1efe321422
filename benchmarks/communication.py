"""Bytes that a mask step sends between ranks, for 1, 10 and 85 million weights on two ranks.

    python benchmarks/communication.py [MILLIONS ...]

Every collective of torch.distributed that the pruner calls is counted, by what a rank puts into it. What the training
itself sends is not: weights and gradients are in place here, and the optimizer moves nothing. Prints JSON.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import platon

RANKS, STEPS = 2, 4
WIDTH = 1000


def counted(sent: Counter[str]) -> None:
    """Count the bytes of every tensor that goes into a collective."""
    for name in ("all_reduce", "all_gather", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
        real = getattr(dist, name)

        def wrapped(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            tensor = args[1] if _name != "all_reduce" and _name != "broadcast" else args[0]
            sent[f"{_name} {tensor.dtype}"] += tensor.numel() * tensor.element_size()
            sent["calls"] += 1
            return _real(*args, **kwargs)

        setattr(dist, name, wrapped)


def work(rank: int, millions: int, place: Path) -> None:
    """One rank: some mask steps on random numbers."""
    dist.init_process_group("gloo", init_method=f"file://{place}/store-{millions}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.randn(millions * 1_000_000 // WIDTH, WIDTH), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    units = platon.Units({"weight": model.weight})
    pruner = platon.Pruner(model, optimizer, schedule=platon.Constant(0.1), units=units)
    local = model.weight.to_local()
    random = torch.Generator().manual_seed(rank)
    sent: Counter[str] = Counter()
    counted(sent)
    found = []
    for _ in range(STEPS):
        gradient = torch.randn(local.shape, generator=random)
        model.weight.grad = type(model.weight.data).from_local(gradient, mesh, [Shard(0)], run_check=False)
        sent.clear()
        optimizer.step()
        # A candidate is a score and its position, and nothing else that is gathered has positions.
        candidates = sent["all_gather torch.int64"] * 12 // 8
        every = sent.total() - sent["calls"]
        found.append({"bytes": every, "candidates": candidates, "the rest": every - candidates, "calls": sent["calls"]})
    if rank == 0:
        largest = max(step["bytes"] for step in found)
        (place / f"{millions}.json").write_text(
            json.dumps(
                {
                    "weights": millions * 1_000_000,
                    "bytes a mask step, at most": largest,
                    "of these without candidates": max(step["the rest"] for step in found),
                    "share of the weights' own bytes": largest / (4 * millions * 1_000_000),
                    "kept": pruner.kept(),
                    "steps": found,
                }
            )
        )
    dist.destroy_process_group()


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or [1, 10, 85]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for millions in sizes:
            children = []
            for rank in range(RANKS):
                child = os.fork()
                if child == 0:
                    try:
                        work(rank, millions, place)
                    except BaseException as error:
                        print(f"{type(error).__name__}: {error}", file=sys.stderr)
                        os._exit(1)
                    os._exit(0)
                children.append(child)
            if any(os.waitpid(child, 0)[1] for child in children):
                sys.exit(1)
        found = [json.loads((place / f"{millions}.json").read_text()) for millions in sizes]
    print(json.dumps({"ranks": RANKS, "sample": "at most 65,536 scores over all ranks", "runs": found}, indent=1))


if __name__ == "__main__":
    main()
