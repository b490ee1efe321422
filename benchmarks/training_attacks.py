"""Attacks on training: states of a pruner, what a pruner is given, compaction and run folders; see attacks.py."""

import contextlib
import copy
import io
import json
import math
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn, optim

import platon
from platon import cli
from platon.engine.methods import METHODS
from platon.lab.run import prune
from platon.lab.settings import resolve

SCORES: dict[str, Callable[[], platon.Score]] = {
    name: method.score for name, method in METHODS.items() if method.score is not None
}
UNITS: tuple[Callable[[nn.Module], platon.Units], ...] = (
    *(platon.weights, platon.columns, platon.neurons, platon.heads),
    lambda model: platon.blocks(model, (4, 8)),
)
Change = Callable[[random.Random, Any], Any]  # the value with something inside it replaced by something hostile


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        inputs = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def is_whole(pruner: platon.Pruner) -> bool:
    """Whether masks, weights and the share that is said agree. Between two masks zeroed weights may grow."""
    masks = pruner.masks()
    kept = sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
    with pruner.deterministic():
        zeros = all(not bool(matrix[~masks[name]].any()) for name, matrix in pruner.units.matrices.items())
    return math.isclose(kept, pruner.kept()) and (zeros or pruner.schedule(pruner.step_count) is None)


def same_state(first: dict[str, Any], second: dict[str, Any]) -> bool:
    plain = [{name: value for name, value in state.items() if name != "tensors"} for state in (first, second)]
    tensors = first["tensors"], second["tensors"]
    return plain[0] == plain[1] and all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


def attack_state(chance: random.Random, place: Path, change: Change) -> bool:
    """A pruner's state with other numbers, words, shapes or tensors: refused and nothing changes, or taken as it is."""
    score, units, other = chance.choice(list(SCORES.values()))(), chance.choice(UNITS), chance.random() < 0.1
    states, pruners, optimizers = [], [], []
    for number in range(2):
        model = small_model(number)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        method = chance.choice(list(SCORES.values()))() if other and number else score
        pruner = platon.Pruner(
            model, optimizer, score=method, schedule=platon.Cubic(final=0.3, total=8), units=units(model)
        )
        train(model, optimizer, chance.randrange(9))
        states.append(copy.deepcopy(pruner.state_dict()))
        pruners.append(pruner)
        optimizers.append(optimizer)
    given = states[0]
    if chance.random() < 0.5:
        plain = change(chance, {name: value for name, value in given.items() if name != "tensors"})
        given = {**plain, "tensors": given["tensors"]}
    else:
        given["tensors"] = damaged_tensors(chance, given["tensors"], change)
    pruner = pruners[1]
    before = copy.deepcopy([pruner.state_dict(), pruner._model.state_dict()])
    try:
        pruner.load_state_dict(given)
    except ValueError:
        weights = pruner._model.state_dict()
        assert same_state(pruner.state_dict(), before[0]), "a refused state changed the pruner"
        assert all(torch.equal(tensor, before[1][name]) for name, tensor in weights.items()), "or the weights"
        raise
    found = pruner.state_dict()
    taken = all(found[name] == given[name] for name in ("step_count", "skipped_count", "keep", "kept_count"))
    train(pruner._model, optimizers[1], 1)
    return taken and is_whole(pruner)


def damaged_tensors(chance: random.Random, tensors: dict[str, Tensor], change: Change) -> Any:
    name = chance.choice(sorted(tensors))
    tensor = tensors[name]
    match chance.randrange(7):
        case 0:
            return {key: value for key, value in tensors.items() if key != name}
        case 1:
            return {**tensors, name: tensor.flatten()[: chance.randrange(tensor.numel() + 1)]}
        case 2:
            return {**tensors, name: tensor.to(chance.choice([torch.int64, torch.float16, torch.bool]))}
        case 3 if tensor.is_floating_point():
            damaged = tensor.clone()
            damaged.view(-1)[chance.randrange(tensor.numel())] = chance.choice([math.nan, math.inf, -math.inf])
            return {**tensors, name: damaged}
        case 4:
            return {**tensors, name: tensor.to_sparse() if chance.random() < 0.5 else tensor.to("meta")}
        case 5:
            return change(chance, 0)
        case _:
            return {**tensors, name: change(chance, 0)}


def attack_pruner(chance: random.Random, place: Path, change: Change) -> bool:
    """Schedules that return anything, weights and gradients of any kind, changes between steps."""
    model = small_model()
    optimizer = chance.choice([optim.SGD, optim.AdamW, optim.Adamax])(model.parameters(), lr=1e-2)
    scope = {"scope": chance.choice(["global", "matrix"])} if chance.random() < 0.3 else {}
    score = chance.choice(list(SCORES.values()))(**scope)  # type: ignore[call-arg]
    keep = chance.choice([1e-9, 0.001, 0.1, 0.5, 0.999, 1.0])
    late = chance.randrange(6)
    odd = change(chance, 0) if chance.random() < 0.3 else keep
    schedule: Any = lambda step: odd if step == late else keep  # noqa: E731
    if chance.random() < 0.5 or score.controller() is not None:  # which needs a schedule that answers between masks
        schedule = platon.Cubic(final=keep, total=6, every=chance.randint(1, 3))
    policy: Any = chance.choice(["raise", "skip"])
    pruner = platon.Pruner(
        model, optimizer, score=score, schedule=schedule, units=chance.choice(UNITS)(model), on_nonfinite=policy
    )
    for step in range(6):
        model(torch.randn(2, 3, 16)).square().mean().backward()
        if step == late:
            disturb(chance, model, pruner)
        try:
            optimizer.step()
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        optimizer.zero_grad()
    return is_whole(pruner)


def disturb(chance: random.Random, model: nn.Module, pruner: platon.Pruner) -> None:
    matrix = chance.choice(list(pruner.units.matrices.values()))
    with torch.no_grad():
        match chance.randrange(8):
            case 0:
                matrix.view(-1)[chance.randrange(matrix.numel())] = chance.choice([math.nan, math.inf, 1e38])
            case 1 if matrix.grad is not None:
                matrix.grad.view(-1)[chance.randrange(matrix.numel())] = chance.choice([math.nan, math.inf, 1e38])
            case 2:
                matrix.data = matrix.data.t().contiguous().t()
            case 3:
                matrix.data = matrix.data[:-1].clone()
                matrix.grad = None
            case 4:
                model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
            case 5:
                matrix.grad = None
            case 6:
                with pruner.deterministic():
                    model.load_state_dict(copy.deepcopy(model.state_dict()))
            case _:
                matrix.zero_()


def attack_compaction(chance: random.Random, place: Path, change: Change) -> bool:
    """Zeros of any pattern: the compact model computes the same."""
    sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    torch.manual_seed(chance.randrange(1 << 30))
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes, intermediate_size=20)  # type: ignore[arg-type]
    ).eval()
    with torch.no_grad():
        for matrix in platon.weights(model).matrices.values():
            if chance.random() < 0.7:
                share = chance.choice([0.1, 0.5, 0.9, 1.0])
                rows, columns = (torch.rand(length) < share for length in matrix.shape)
                matrix[rows if chance.random() < 0.5 else slice(0, 0)] = 0
                matrix[:, columns if chance.random() < 0.5 else slice(0, 0)] = 0
        for parameter in model.parameters():
            if parameter.dim() == 1 and chance.random() < 0.3:
                parameter.zero_()
        tokens = torch.randint(1, 50, (2, 7))
        mask = torch.ones(2, 7, dtype=torch.int64)
        mask[1, chance.randint(1, 7) :] = 0
        expected = model(tokens, attention_mask=mask).logits
        return torch.allclose(platon.compact(model)(tokens, attention_mask=mask).logits, expected, rtol=1e-3, atol=1e-5)


def make_run(folder: Path) -> Path:
    """A small finished run."""
    flags: dict[str, Any] = {"train_rows": 32, "eval_rows": 16, "batch": 16, "steps": 4, "eval_every": 2, "every": 1}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prune(resolve(flags={**flags, "log_every": 1, "checkpoint_every": 2, "cooldown": 2.0}), folder)
    return folder


def attack_run(run: Path) -> Callable[[random.Random, Path, Change], bool]:
    """Files of a run folder that are damaged, edited or links: one sentence, and nothing outside is touched."""

    def attack(chance: random.Random, place: Path, change: Change) -> bool:
        folder, outside = Path(shutil.copytree(run, place / "run")), place / "outside"
        names = ("run.json", "record.json", "history.jsonl", "probe.jsonl")
        for name in chance.sample(names, chance.randint(1, 2)):
            damage_file(chance, folder / name, outside, change)
        kept = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and folder not in path.parents}
        words = chance.choice([("report", "--no-figures"), ("inspect",), ("prune", "--resume", "--output")])
        command = [*words, str(folder)]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                cli.app(command, standalone_mode=False)
        finally:
            assert {path: path.read_bytes() for path in kept} == kept, "a file outside of the folder was changed"
        return True

    return attack


def damage_file(chance: random.Random, path: Path, outside: Path, change: Change) -> None:
    text = path.read_text()
    lines = text.splitlines()
    match chance.randrange(6):
        case 0:
            path.write_bytes(text.encode()[: chance.randrange(len(text))])
        case 1:
            path.unlink()
        case 2:
            path.rename(outside)
            path.symlink_to(outside)
        case 3:
            path.write_bytes(bytes(chance.randrange(256) for _ in range(40)))
        case _ if path.suffix == ".jsonl":
            at = chance.randrange(len(lines))
            lines[at] = json.dumps(change(chance, json.loads(lines[at])))
            path.write_text("\n".join(lines) + "\n")
        case _:
            path.write_text(json.dumps(change(chance, json.loads(text))))
