"""Trains small models alone and on 1, 2 and 4 ranks, and writes down the masks of every step.

Run as a program, by test_masks.py: `program.py FOLDER [METHOD ...]`. It imports torch and proves what heads and neurons
are once, and forks the ranks, since that is most of what they would otherwise do. Each rank writes
FOLDER/WORLD-RANK.json; the file of the process alone is alone.json.
"""

import gc
import hashlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, load, save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification, GPTNeoXConfig, GPTNeoXForSequenceClassification

import platon
from platon.engine.methods import METHODS
from platon.engine.topology import blocks

WORLDS = (1, 2, 4)
STEPS, LONG = 6, 20
SAVED = 3  # the step after which a run of two ranks is saved
#: the methods, all of them unless the command line names some
NAMES = sys.argv[2:] or [name for name, method in METHODS.items() if method.score is not None]


def units_of(method: str) -> tuple[str, ...]:
    """What a method can prune: one that reads the inputs of weights ranks no groups."""
    score = METHODS[method].score
    return ("weights",) if score is not None and score().reads == "inputs" else ("weights", "heads+neurons")


class Block(nn.Module):
    """Matrices of three rows: on four ranks one of them has none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.query, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
        self.up, self.down = nn.Linear(3, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(torch.tanh(self.query(self.norm(x))))
        return x + self.down(torch.relu(self.up(x)))


class Narrow(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def bert(**size: int) -> nn.Module:
    """Sizes that no number of ranks divides; more weights than selection collects without a sample."""
    sizes = {"hidden_size": 20, "num_attention_heads": 5, "intermediate_size": 37, "num_hidden_layers": 2, **size}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=31, max_position_embeddings=8, **sizes, **still))


def wide_bert() -> nn.Module:
    """So many weights that they are counted around the cut while they are updated."""
    return bert(hidden_size=68, num_attention_heads=4, intermediate_size=201)


def packed() -> nn.Module:
    """Query, key and value of each head lie together in one matrix: a rank's rows begin and end inside of heads."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 37, "num_hidden_layers": 2}
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0}
    return GPTNeoXForSequenceClassification(GPTNeoXConfig(vocab_size=31, max_position_embeddings=64, **sizes, **still))


MODELS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "wide bert": wide_bert, "narrow": Narrow, "packed": packed}


def rows(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """A batch of four and its labels."""
    random = torch.Generator().manual_seed(step)
    shape = (4, 4) if kind == "narrow" else (4, 6)
    batch = torch.randn(shape, generator=random) if kind == "narrow" else torch.randint(31, shape, generator=random)
    return batch, torch.randint(2, (4,), generator=random)


def wrapped(model: nn.Module, way: str) -> nn.Module:
    """As a user would wrap it."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp":
        for block in blocks(model).values():
            fully_shard(block)
        fully_shard(model)
    return model


def chosen(model: nn.Module, units: str) -> platon.Units:
    """What the name stands for."""
    return platon.weights(model) if units == "weights" else platon.heads(model) + platon.neurons(model)


def scored(method: str) -> platon.Score:
    """The method, with learning rates that move scores within a few steps."""
    fast = {"score_learning_rate": 0.5} if "movement" in method or method == "l0" else {}
    return METHODS[method].build(fast)


def full(tensor: Tensor) -> Tensor:
    """The whole of it, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Training:
    """A model on its way."""

    def __init__(self, kind: str, way: str, method: str, units: str, total: int) -> None:
        torch.manual_seed(0)
        plain = MODELS[kind]()
        self.kind, self.model = kind, wrapped(plain, way)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.pruner = platon.Pruner(
            self.model,
            self.optimizer,
            score=scored(method),
            schedule=platon.Cubic(final=0.3, total=total, warmup=1, cooldown=total // 3, every=1),
            units=chosen(plain if way == "ddp" else self.model, units),
        )

    def step(self, number: int, part: slice = slice(None)) -> None:
        """One step of the optimizer, on a part of the batch."""
        batch, labels = rows(self.kind, number)
        said = self.model(batch[part])
        nn.functional.cross_entropy(getattr(said, "logits", said), labels[part]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def masks(self) -> Tensor:
        """All bits."""
        return torch.cat([full(mask).reshape(-1) for mask in self.pruner.masks().values()])

    def seen(self, closely: bool = False) -> dict[str, Any]:
        """What a test compares: the fingerprint, and when asked to look closely the masks themselves."""
        if not closely:
            return {"fingerprint": self.pruner.fingerprint(), "kept": self.pruner.kept()}
        bits = self.masks()
        weights = torch.cat([full(p.detach()).reshape(-1) for p in self.pruner.units.matrices.values()])
        with self.pruner.deterministic():
            settled = torch.cat([full(p.detach()).reshape(-1) for p in self.pruner.units.matrices.values()])
        # Where a tensor does not fill torch's vectors, its last sigmoids are rounded otherwise: these sizes show it.
        rounded = isinstance(self.pruner.score, platon.HardConcrete | platon.SoftMovement)
        return {
            "fingerprint": self.pruner.fingerprint(),
            "kept": self.pruner.kept(),
            "masks": hashlib.sha256(bits.numpy().tobytes()).hexdigest(),
            "weights": None if rounded else hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            "exact": int(bits.sum()) / bits.numel() == self.pruner.kept() and not bool(settled[~bits].any()),
        }


def same_batches(kind: str, way: str, method: str, units: str) -> list[dict[str, Any]]:
    """Every rank has the same micro-batch."""
    training = Training(kind, way, method, units, STEPS)
    found = []
    for number in range(STEPS):
        training.step(number)
        training.pruner.check_ranks()
        found.append(training.seen(closely=number == STEPS - 1))
    return found


def split_batches(way: str, method: str, units: str) -> list[str]:
    """Each rank has its share of the batch; the masks' bits, as hexadecimal numbers."""
    training = Training("bert", way, method, units, LONG)
    masks = []
    each = 4 // (1 if way == "alone" else dist.get_world_size())
    first = 0 if way == "alone" else dist.get_rank() * each
    for number in range(LONG):
        training.step(number, slice(first, first + each))
        masks.append(training.pruner.masks().values())
    # All steps of a matrix at once: it takes longer to make a sharded tensor whole than to train a step.
    bits = torch.cat([full(torch.stack(steps, -1)).reshape(-1, LONG) for steps in zip(*masks, strict=True)])
    return [bytes(step.numpy()).hex() for step in bits.T.contiguous()]


def tensors_of(training: Training) -> dict[str, Tensor]:
    """What a checkpoint holds beside the numbers: the model's tensors and the pruner's."""
    state = training.pruner.state_dict(whole=True)["tensors"]
    return {**training.model.state_dict(), **{f"pruner.{name}": tensor for name, tensor in state.items()}}


def save_halfway(folder: Path, method: str, units: str) -> None:
    """Train a few steps, and leave a checkpoint without a pickle in it."""
    training = Training("bert", "fsdp", method, units, STEPS)
    for number in range(SAVED):
        training.step(number)
    place = folder / "saved" / f"{method}-{units}"
    save(tensors_of(training), storage_writer=HuggingFaceStorageWriter(str(place), save_distributed=True))
    numbers = training.pruner.state_dict()
    del numbers["tensors"]
    if dist.get_rank() == 0:
        (place / "pruner.json").write_text(json.dumps(numbers))


def resume(folder: Path, way: str, method: str, units: str) -> list[dict[str, Any]]:
    """Go on from there, on however many ranks there are now."""
    training = Training("bert", way, method, units, STEPS)
    place = folder / "saved" / f"{method}-{units}"
    tensors = {name: tensor.clone() for name, tensor in tensors_of(training).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process is one process
        load(tensors, storage_reader=HuggingFaceStorageReader(str(place)), no_dist=way == "alone")
    state = json.loads((place / "pruner.json").read_text())
    pruner = {name.removeprefix("pruner."): t for name, t in tensors.items() if name.startswith("pruner.")}
    training.model.load_state_dict({name: t for name, t in tensors.items() if not name.startswith("pruner.")})
    training.pruner.load_state_dict({**state, "tensors": pruner})
    found = [training.seen()]
    for number in range(SAVED, STEPS):
        training.step(number)
        found.append(training.seen(closely=number == STEPS - 1))
    return found


def cases(ways: tuple[str, ...]) -> Iterator[tuple[str, str, str, str]]:
    """Model, way, method and units of every run with the same batches."""
    for way in ways:
        for method in NAMES:
            for units in units_of(method):
                yield "bert", way, method, units
            if way != "ddp":  # every rank has all rows
                yield "narrow", way, method, "weights"
        yield "wide bert", way, NAMES[0], "weights"
        if "heads+neurons" in units_of(NAMES[0]):
            yield "packed", way, NAMES[0], "heads+neurons"


def work(folder: Path, world: int, rank: int) -> None:
    """Everything that this number of ranks does."""
    alone = world == 0
    ways = ("alone",) if alone else ("ddp", "fsdp")
    if not alone:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world)
    found: dict[str, Any] = {"same": {}, "split": {}, "resumed": {}}
    for case in cases(ways):
        found["same"][", ".join(case)] = same_batches(*case)
    for method in NAMES:
        for units in units_of(method):
            for way in ways if world in (0, 2) else ():
                found["split"][f"{way}, {method}, {units}"] = split_batches(way, method, units)
            if world == 2:
                save_halfway(folder, method, units)
    if world == 2:
        dist.barrier()
    else:
        for method in NAMES:
            for units in units_of(method):
                found["resumed"][f"{method}, {units}"] = resume(folder, ways[-1], method, units)
    name = "alone.json" if alone else f"{world}-{rank}.json"
    (folder / name).write_text(json.dumps(found))
    if not alone:
        dist.destroy_process_group()


@contextmanager
def forked(folder: Path, world: int) -> Iterator[None]:
    """The ranks of one world, or the process alone."""
    children = []
    for rank in range(max(world, 1)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(folder, world, rank)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    yield
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    if failed:
        sys.exit(f"{len(failed)} of {world} ranks failed")


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # torch's own about itself
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for build in (bert, packed):
        chosen(build(), "heads+neurons")  # what is proved now the ranks know
    gc.freeze()  # what was imported: the ranks need not search it for garbage
    folder = Path(sys.argv[1])
    for world in (2, 1, 4, 0):  # two ranks save what the others resume
        with forked(folder, world):
            pass


if __name__ == "__main__":
    main()
