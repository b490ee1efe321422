"""Attacks on saved models, sparse layers and training: bad input must be refused in one sentence, or change nothing.

    python benchmarks/attacks.py                    the long form: minutes
    python benchmarks/attacks.py --short            the short form, which CI runs: seconds
    python benchmarks/attacks.py --kind manifest    one kind of attack alone
    python benchmarks/attacks.py --seed 7           other attacks; the same seed gives the same ones

What an attack can end with:

    refused   an error of one sentence (ValueError or TypeError)
    same      the input was accepted, and the result is that of the undamaged one, or what the changed input describes
    wrong     the input was accepted, and the result is neither
    crashed   the process died, ran out of memory or time, or raised an internal error

Attacks run in child processes, so that a crash is counted and the next attack goes on; memory and time are limited.
Prints the counts as JSON; the exit code is 1 if anything was wrong or crashed. To add a kind, write a function that
makes one random attack and register it with `@attack("its name")`.
"""

import argparse
import copy
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import platon
import training_attacks
from platon.deploy.layer import SparseLinear
from platon.deploy.manifest import checksums
from platon.deploy.storage import CONFIG, MANIFEST, SPARSE, WEIGHTS

MEMORY = 4 << 30  # bytes that a child may take beyond what it has when it starts
SECONDS = 60  # for one attack
SENTENCE = 700  # characters; a longer message is not one sentence
ROOT = Path(__file__).parents[1]

#: An attack gets random numbers and an empty folder. It returns whether the result is the undamaged one, or raises.
Attack = Callable[[random.Random, Path], bool]
KINDS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Register a kind of attack."""

    def register(function: Attack) -> Attack:
        KINDS[name] = function
        return function

    return register


# --- what is attacked -------------------------------------------------------------------------------------------------

TOKENS = {"input_ids": torch.arange(3, 19).view(2, 8)}
HOSTILE: tuple[Any, ...] = (
    *(None, True, "", "x", "../../etc/passwd", [], {}, [[]], {"a": 1}, -1, 0, 1, 2, 3, 7, 64, 1 << 20, 10**9, 1 << 40),
    *(1 << 63, 10**30, -(10**9), 0.5, float("inf"), float("-inf"), float("nan"), "float16", "int64", "complex64"),
)
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "num_labels"),
    *("max_position_embeddings", "type_vocab_size", "pad_token_id", "hidden_act", "id2label", "model_type"),
    *("attn_implementation", "_attn_implementation", "layer_norm_eps_", "chunk_size_feed_forward", "architectures"),
)


class Saved:
    """One small model, saved in each form, and what it computes."""

    def __init__(self, place: Path) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(**sizes, intermediate_size=64)  # type: ignore[arg-type]
        ).eval()
        with torch.no_grad():
            for layer in model.bert.encoder.layer:
                layer.output.dense.weight[:, ::2] = 0.0
                layer.intermediate.dense.weight[torch.rand(64, 32) > 0.2] = 0.0
        fast, small = platon.sparsify(model, dense_above=0.5), platon.compact(model)
        self.folders = {
            "dense": platon.save(model, place / "dense"),
            "bits": platon.save(model, place / "bits", sparse=True),
            "compact": platon.save(small, place / "compact"),
            "fast": platon.save(fast, place / "fast"),
            "int8": platon.save(fast, place / "int8", precision="float16", embeddings="int8"),
        }
        self.expected = {name: logits(platon.load(folder)) for name, folder in self.folders.items()}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**TOKENS).logits
    return found


SAVED: Saved
RUN: Path  # the folder of a small finished run


def folder_copy(chance: random.Random, place: Path) -> Path:
    name = chance.choice(sorted(SAVED.folders))
    return Path(shutil.copytree(SAVED.folders[name], place / name))


def opens_as_it_was(folder: Path) -> bool:
    return torch.allclose(logits(platon.load(folder)), SAVED.expected[folder.name], rtol=1e-4, atol=1e-5)


def renew_checksums(folder: Path) -> None:
    """As somebody does who changes a folder on purpose; every other check has to hold by itself."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"checksums": checksums(folder, content["weights"])}))


# --- saved models -----------------------------------------------------------------------------------------------------


def change_somewhere(chance: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with something inside it replaced by a hostile one, removed, or doubled."""
    if isinstance(value, dict) and value and (depth == 0 or chance.random() < 0.8):
        key = chance.choice(sorted(value))
        if chance.random() < 0.1:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: change_somewhere(chance, value[key], depth + 1)}
    if isinstance(value, list) and value and chance.random() < 0.6:
        at = chance.randrange(len(value))
        return [*value[:at], change_somewhere(chance, value[at], depth + 1), *value[at + chance.randrange(2) :]]
    return copy.deepcopy(chance.choice(HOSTILE))


@attack("manifest")
def attack_manifest(chance: random.Random, place: Path) -> bool:
    """A change anywhere in manifest.json."""
    folder = folder_copy(chance, place)
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    for _ in range(chance.randint(1, 3)):
        content = change_somewhere(chance, content)
        if not isinstance(content, dict):
            break
    path.write_text(json.dumps(content))
    # A layer's merged activation may be given another name that computes something else: that is a valid model.
    return opens_as_it_was(folder) or _describes_another_model(content, SAVED.folders)


def _describes_another_model(content: Any, folders: dict[str, Path]) -> bool:
    """Whether the change left a valid description of a different model, which a reader cannot notice."""
    known = json.loads((folders["fast"] / MANIFEST).read_text())
    changed = content.get("replaced", {})
    return bool(changed) and any(
        changed.get(name, {}).get(key) != one.get(key)
        for name, one in known["replaced"].items()
        for key in ("kind", "activation")
    )


@attack("configuration")
def attack_configuration(chance: random.Random, place: Path) -> bool:
    """Sizes, names and numbers in config.json that do not fit the weights, or fit nothing."""
    folder = folder_copy(chance, place)
    path = folder / CONFIG
    content = json.loads(path.read_text())
    for key in chance.sample(SIZES, chance.randint(1, 2)):
        content[key] = copy.deepcopy(chance.choice(HOSTILE))
    path.write_text(json.dumps(content))
    if chance.random() < 0.5:
        renew_checksums(folder)
    return opens_as_it_was(folder)


@attack("file")
def attack_file(chance: random.Random, place: Path) -> bool:
    """A file that is cut off, missing, empty, a folder, nested without end, or damaged in its header."""
    folder = folder_copy(chance, place)
    path = chance.choice([file for file in sorted(folder.iterdir()) if file.suffix in (".json", ".safetensors")])
    content = path.read_bytes()
    way = chance.randrange(6)
    path.unlink()
    if way == 1:
        path.write_bytes(content[: chance.randrange(len(content))])
    elif way == 2:
        path.write_bytes(b"")
    elif way == 3:
        path.mkdir()
    elif way == 4:
        path.write_bytes(b"[" * 100_000)
    elif way == 5:  # the header alone: a change in the numbers themselves gives another valid model
        header = 8 + int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else 0
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(header or len(damaged))] = chance.randrange(256)
        path.write_bytes(bytes(damaged))
        if path.suffix == ".json":
            return opens_as_it_was(folder) or json.loads(damaged) != json.loads(content)
    return opens_as_it_was(folder)


@attack("tensors")
def attack_tensors(chance: random.Random, place: Path) -> bool:
    """Tensors of another shape, precision or name, and lists of columns or bits that cannot be."""
    folder = folder_copy(chance, place)
    path = folder / (SPARSE if (folder / SPARSE).exists() else WEIGHTS)
    tensors = load_file(path)
    indices = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    name = chance.choice(indices if indices and chance.random() < 0.7 else sorted(tensors))
    tensor, still_valid = tensors.pop(name), False
    match chance.randrange(6):
        case 0:
            pass
        case 1:
            tensors[name] = tensor.flatten()[: max(0, tensor.numel() - 1 - chance.randrange(8))].clone()
        case 2:
            tensors[name] = tensor.to(chance.choice([torch.int64, torch.float64, torch.uint8, torch.bool]))
        case 3:
            tensors[name + chance.choice(["x", ".weight", "/"])] = tensor
        case 4:
            tensors[name], tensors[chance.choice(["bits/", "values/"]) + name] = tensor, tensor.clone()
        case _ if tensor.is_floating_point():
            is_oblong = tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]
            tensors[name] = tensor.t().contiguous() if is_oblong else torch.cat([tensor, tensor])
        case _:
            tensors[name] = tensor.clone()
            value = chance.choice([-1, 127, 63 * 64, 32, 33, 255])
            tensors[name].view(-1)[chance.randrange(tensor.numel())] = value % 256 if tensor.itemsize == 1 else value
            still_valid = True  # perhaps: a bit or a column exchanged for another one describes another model
    save_file(tensors, path)
    if chance.random() < 0.5:
        renew_checksums(folder)
    return opens_as_it_was(folder) or still_valid


# --- sparse layers ----------------------------------------------------------------------------------------------------


@attack("sparse layer")
def attack_layer(chance: random.Random, place: Path) -> bool:
    """Buffers and sizes of a sparse layer that were changed after it was made."""
    rows, columns, density = chance.randint(1, 200), chance.randint(1, 500), chance.random()
    seeded = torch.Generator().manual_seed(chance.randrange(1 << 30))
    weight = torch.randn(rows, columns, generator=seeded)
    weight[torch.rand(rows, columns, generator=seeded) > density] = 0
    layer = SparseLinear(weight, torch.randn(rows, generator=seeded) if chance.random() < 0.7 else None)
    x = torch.randn(chance.randint(1, 100), columns, generator=seeded)
    expected = layer(x)
    for _ in range(chance.randint(1, 3)):
        damage_layer(chance, layer)
    return torch.equal(layer(x), expected)


def damage_layer(chance: random.Random, layer: SparseLinear) -> None:
    name = chance.choice([name for name, buffer in layer.named_buffers() if buffer.numel()])
    buffer = layer.get_buffer(name)
    flat = buffer.view(-1) if buffer.is_contiguous() else buffer
    match chance.randrange(9):
        case 0:
            layer.to(chance.choice([torch.float16, torch.float64, torch.bfloat16]))
        case 1:
            layer.to("meta")
        case 2:
            setattr(layer, name, flat[: chance.randrange(len(flat))])
        case 3:
            setattr(layer, name, torch.cat([flat, flat[:1]]))
        case 4:
            setattr(layer, name, flat[:1].expand(len(flat)))
        case 5:
            setattr(layer, name, buffer.to(chance.choice([torch.int64, torch.float16, torch.uint8])))
        case 6:
            layer.width = chance.choice([0, -1, 257, 1 << 40, layer.width])
        case 7:
            layer.out_features = chance.choice([0, -1, 1 << 40, layer.out_features + 64, layer.out_features])
        case _ if buffer.device.type == "cpu":
            array = layer.starts if name in ("values", "bias", "starts") else layer.counts
            array.view(-1)[chance.randrange(max(1, array.numel()))] = chance.choice([-1, 32767, 12345, -32768])


# --- training ---------------------------------------------------------------------------------------------------------

attack("pruner state")(functools.partial(training_attacks.attack_state, change=change_somewhere))
attack("pruner input")(functools.partial(training_attacks.attack_pruner, change=change_somewhere))
attack("compaction")(functools.partial(training_attacks.attack_compaction, change=change_somewhere))


@attack("run folder")
def attack_run(chance: random.Random, place: Path) -> bool:
    """Files of a run folder that are damaged, edited or links."""
    return training_attacks.attack_run(RUN)(chance, place, change_somewhere)


# --- the campaign -----------------------------------------------------------------------------------------------------


def outcome_of(function: Attack, seed: str, place: Path) -> tuple[str, str]:
    """What one attack ends with, and what was said."""
    place.mkdir()
    try:
        return ("same" if function(random.Random(seed), place) else "wrong"), ""
    except (ValueError, TypeError) as error:
        said = str(error)
        is_internal = isinstance(error, TypeError) and "must be" not in said
        sentence = said and "\n" not in said and len(said) <= SENTENCE and not is_internal
        return ("refused" if sentence else "crashed"), f"{type(error).__name__}: {said}"
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def run_in_child(kind: str, first: int, count: int, seed: int, place: Path) -> list[tuple[str, str]]:
    """Outcomes of the attacks from `first` on, up to the one at which the child died."""
    log = place / "outcomes"
    log.write_text("")
    child = os.fork()
    if child == 0:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.set_num_threads(1)
        with log.open("a") as file:
            for number in range(first, count):
                signal.alarm(SECONDS)
                outcome = outcome_of(KINDS[kind], f"{seed} {kind} {number}", place / str(number))
                file.write(json.dumps(outcome) + "\n")
                file.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = [tuple(json.loads(line)) for line in log.read_text().splitlines()]
    code = os.waitstatus_to_exitcode(status)
    if code:
        found.append(("crashed", f"the process ended with {code}"))
    return found


def campaign(kind: str, count: int, seed: int, failures: list[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        done = 0
        while done < count:
            for outcome, said in run_in_child(kind, done, count, seed, Path(folder)):
                counts[outcome] += 1
                if outcome in ("wrong", "crashed"):
                    failures.append(f"{kind}, attack {done} of seed {seed}: {outcome} {said}"[:500])
                done += 1
    return counts


def fuzz_kernel(cases: int, seed: int, failures: list[str]) -> dict[str, int]:
    """The C kernel with damaged arrays, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fuzz"
        sources = (ROOT / "src/platon/deploy/sparse.c", ROOT / "benchmarks/fuzz_sparse.c")
        flags = ("-g", "-O1", "-std=gnu11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
        command = [os.environ.get("CC", "cc"), *flags, *map(str, sources), "-o", str(program), "-lm"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            return {}  # no compiler, or none with sanitizers
        done = subprocess.run([str(program), str(cases), str(seed)], capture_output=True, text=True, check=False)
    if done.returncode:
        failures.append(f"kernel arrays, seed {seed}: {(done.stdout + done.stderr)[:1000]}")
        return {"crashed": 1}
    found: dict[str, int] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="some attacks of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=[*KINDS, "kernel arrays"], action="append", help="only this kind")
    parser.add_argument("--count", type=int, help="attacks of each kind")
    arguments = parser.parse_args()
    count = arguments.count or (15 if arguments.short else 1000)
    failures: list[str] = []
    counts: dict[str, dict[str, int]] = {}
    global SAVED, RUN
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        SAVED = Saved(Path(folder))
        RUN = training_attacks.make_run(Path(folder) / "run")
        for kind in arguments.kind or [*KINDS, "kernel arrays"]:
            if kind == "kernel arrays":
                counts[kind] = fuzz_kernel(300 if arguments.short else 100_000, arguments.seed, failures)
            else:
                counts[kind] = dict(campaign(kind, count, arguments.seed, failures))
            print(json.dumps({"kind": kind, **counts[kind]}), file=sys.stderr, flush=True)
    print(json.dumps({"seed": arguments.seed, "counts": counts, "failures": failures}, indent=1))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
