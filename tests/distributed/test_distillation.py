"""A teacher beside a model on two ranks, DDP and FSDP2: the losses and weights of one process with the whole batch."""

import json
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

import forked
import platon

STEPS = 4
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(seed: int, width: int = 16) -> nn.Module:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=31,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
        **_STILL,
    )
    return BertForSequenceClassification(config)


def trained(way: str, teacher: nn.Module, rank: int, world: int) -> dict[str, Any]:
    """Losses and weights of a training in which each rank has its part of each batch."""
    model = bert(0)
    platon.Distillation(model, teacher, weight=0.6, hidden_weight=0.5)
    wrapped: nn.Module = model
    if way == "ddp":
        wrapped = DistributedDataParallel(model)
    elif way == "fsdp":
        for block in model.bert.encoder.layer:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    schedule = platon.Cubic(final=0.5, total=STEPS, warmup=1, cooldown=1)
    pruner = platon.Pruner(wrapped, optimizer, score=platon.Magnitude(), schedule=schedule)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(31, (4, 6), generator=torch.Generator().manual_seed(step))
        part = slice(rank * 4 // world, (rank + 1) * 4 // world)
        loss = wrapped(input_ids=ids[part], labels=ids[part, 0] % 2).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    pruner.check_ranks()
    tensors = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return {"losses": losses, "weights": torch.cat([t.detach().reshape(-1) for t in tensors]).tolist()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks finds."""
    folder = tmp_path_factory.mktemp("ranks")

    def work(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        pairs = product(("ddp", "fsdp"), (16, 20))
        mine = {f"{way}, {width}": trained(way, bert(1, width), rank, 2) for way, width in pairs}
        (folder / f"{rank}.json").write_text(json.dumps(mine))
        dist.barrier()

    forked.run_ranks(work, 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(found: list[dict[str, Any]], way: str, width: int) -> None:
    alone = trained("alone", bert(1, width), 0, 1)
    for ours in found:
        result = ours[f"{way}, {width}"]
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        torch.testing.assert_close(
            torch.tensor(result["weights"]), torch.tensor(alone["weights"]), rtol=1e-4, atol=1e-6
        )
