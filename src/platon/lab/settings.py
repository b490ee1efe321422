"""The settings of a run: what a user can say, what a recipe says, what we say, and who said what."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path
from typing import Any, Literal

from platon.lab import recipes, tasks
from platon.lab.errors import UserError, nearest

Source = Literal["paper", "code", "ours", "user"]


def _setting(default: Any, panel: str, text: str) -> Any:
    return field(default=default, metadata={"panel": panel, "help": text})


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run's result. The defaults are ours, and small tasks have some of their own."""

    task: str = _setting("digits", "What", "a name from `platon list tasks`")
    model: str | None = _setting(None, "What", "hub name or local folder; each task has a default")
    method: str = _setting("platon", "What", "a name from `platon list methods`")
    keep: float = _setting(0.1, "What", "share of the prunable weights that stays, e.g. 0.1")
    units: str = _setting(
        "weights", "What", "what goes together: weights, columns, blocks, neurons, heads, heads+neurons"
    )
    dense: str = _setting("none", "What", "train the dense twin too: none, beside, or first (pruning starts from it)")

    data: str | None = _setting(None, "Data", "local folder in the hub's layout, or your own file; default: the hub")
    train_rows: int | None = _setting(None, "Data", "train on so many rows, a fixed random subset")
    eval_rows: int | None = _setting(None, "Data", "evaluate on so many rows, a fixed random subset")
    text_column: str | None = _setting(None, "Data", "your own data: the column with the text")
    second_column: str | None = _setting(None, "Data", "your own data: the column with the second text")
    label_column: str | None = _setting(None, "Data", "your own data: the column with the label")
    holdout: float = _setting(0.1, "Data", "your own data: share held out where there is no validation file")
    max_length: int | None = _setting(None, "Data", "tokens a row at most")
    stride: int | None = _setting(None, "Data", "SQuAD: tokens that neighbouring windows share")
    image_size: int | None = _setting(None, "Data", "pixels a side")
    augment: bool = _setting(False, "Data", "random crops and flips of training images")
    trust_remote_code: bool = _setting(False, "Data", "run Python code that comes with a model; off unless asked")

    epochs: float = _setting(3.0, "Training", "passes over the training data")
    steps: int | None = _setting(None, "Training", "optimizer steps; overrides epochs")
    batch: int = _setting(32, "Training", "examples an optimizer step, over all processes")
    accumulate: int = _setting(1, "Training", "split each batch into so many parts, to save memory")
    optimizer: str = _setting("adamw", "Training", "adamw, adamax or sgd")
    learning_rate: float = _setting(5e-5, "Training", "its peak")
    momentum: float = _setting(0.9, "Training", "of sgd")
    weight_decay: float = _setting(0.0, "Training", "on matrices, not on biases and norms")
    lr_warmup: float = _setting(0.1, "Training", "steps of rising learning rate; below 1: a share of the training")
    decay: str = _setting("linear", "Training", "how the learning rate falls: linear or cosine")
    clip: float = _setting(1.0, "Training", "largest gradient norm; 0: no clipping")
    freeze_embeddings: bool = _setting(False, "Training", "train everything but the embeddings")
    group_by_length: bool = _setting(True, "Training", "batches of like length: much less padding")
    precision: str = _setting("float32", "Training", "float32, or mixed with bf16 or fp16")
    seed: int = _setting(0, "Training", "of everything random")

    warmup: float = _setting(0.1, "Pruning", "t_i: steps before pruning starts; below 1: a share of the training")
    cooldown: float = _setting(0.3, "Pruning", "t_f: steps at the final share; below 1: a share of the training")
    every: int = _setting(10, "Pruning", "steps between masks while the share falls")
    beta1: float = _setting(0.85, "Pruning", "platon: memory of sensitivity")
    beta2: float = _setting(0.85, "Pruning", "platon: memory of uncertainty")
    window: int = _setting(10, "Pruning", "platon: steps averaged before they count")
    timing: str = _setting("after", "Pruning", "platon: measure before or after the optimizer moves")
    exponent: float = _setting(1.0, "Pruning", "platon: the power c of uncertainty in the score")
    scope: str | None = _setting(
        None, "Pruning", "rank all weights together (global) or each matrix (matrix); default: the method's own"
    )
    score_learning_rate: float | None = _setting(
        None, "Pruning", "learned scores: peak learning rate; default: the method's own"
    )
    score_init: float | None = _setting(None, "Pruning", "learned scores: where they start; default: the method's own")
    penalty: float | None = _setting(
        None, "Pruning", "soft-movement, l0: fix the penalty, so that sparsity is a result; default: --keep steers it"
    )
    tau: float = _setting(0.1, "Pruning", "soft-movement: sigmoid of the score above which a weight stays")
    min_keep_per_matrix: float | None = _setting(
        None, "Pruning", "soft-movement, l0: least share of each matrix; default: the method's own"
    )
    block_rows: int = _setting(32, "Pruning", "units blocks: outputs of a block")
    block_columns: int = _setting(32, "Pruning", "units blocks: inputs of a block")
    reference_steps: int | None = _setting(None, "Pruning", "the training that warmup and cooldown refer to")

    eval_every: int | None = _setting(None, "Records", "steps between evaluations; default: ten in a training")
    eval_batch: int = _setting(64, "Records", "examples a batch in evaluation")
    log_every: int | None = _setting(None, "Records", "steps between logged lines; default: a hundred in a training")
    checkpoint_every: int | None = _setting(None, "Records", "steps between checkpoints; default: ten in a training")
    checkpoints: int = _setting(2, "Records", "complete checkpoints to keep")
    report_to: str = _setting("none", "Records", "none, tensorboard or wandb")


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
_CHOICES = {
    "units": ("weights", "columns", "blocks", "neurons", "heads", "heads+neurons"),
    "dense": ("none", "beside", "first"),
    "optimizer": ("adamw", "adamax", "sgd"),
    "decay": ("linear", "cosine"),
    "precision": ("float32", "bf16", "fp16"),
    "timing": ("after", "before"),
    "scope": ("global", "matrix"),
    "report_to": ("none", "tensorboard", "wandb"),
}
_LEAST = (
    dict.fromkeys(("block_rows", "block_columns"), 1)
    | dict.fromkeys(("batch", "accumulate", "steps", "every", "eval_batch", "checkpoints"), 1)
    | dict.fromkeys(("eval_every", "log_every", "checkpoint_every"), 1)
    | dict.fromkeys(("seed", "learning_rate", "momentum", "weight_decay", "clip"), 0)
    | dict.fromkeys(("warmup", "cooldown", "lr_warmup"), 0)
)
# What a task needs that others do not: the digits' model is built from nothing, so it is trained dense first.
_TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"dense": "first", "epochs": 30.0, "batch": 32, "learning_rate": 5e-4, "weight_decay": 0.1},
    "cifar100": {"epochs": 10.0, "batch": 128, "learning_rate": 5e-4, "weight_decay": 0.01},
}


@dataclass(frozen=True)
class Sourced:
    """Settings, and for each who said it."""

    settings: Settings
    sources: Mapping[str, Source]
    recipe: str | None = None

    def with_user(self, **values: Any) -> Sourced:
        """The same with some settings said by the user."""
        said: dict[str, Source] = dict.fromkeys(values, "user")
        return Sourced(dataclasses.replace(self.settings, **values), {**self.sources, **said}, self.recipe)

    def plain(self) -> dict[str, dict[str, Any]]:
        """Value and source of every setting, for the record."""
        values = dataclasses.asdict(self.settings)
        return {name: {"value": value, "source": self.sources[name]} for name, value in values.items()}


def resolve(recipe: str | None = None, config: Path | None = None, flags: Mapping[str, Any] | None = None) -> Sourced:
    """Defaults, then the recipe, then the config file, then the flags; each overrides what stands before it."""
    said: dict[str, tuple[Any, Source]] = {}
    if config is not None:
        values = _read_config(config)
        recipe = recipe or values.pop("recipe", None)
        values.pop("recipe", None)
        said |= {name: (value, "user") for name, value in values.items()}
    said |= {name: (value, "user") for name, value in (flags or {}).items() if value is not None}
    if recipe is not None:
        if not isinstance(recipe, str):
            raise UserError(f"recipe must be of type str, got {recipe!r}")
        named = recipes.find(recipe).fields
        said = {name: (f.value, f.source) for name, f in named.items() if f.value is not None or name == "steps"} | said
    task = tasks.find(str(said.get("task", (Settings().task, "ours"))[0]))
    defaults: dict[str, tuple[Any, Source]] = {
        name: (_TASK_DEFAULTS.get(task.name, {}).get(name, f.default), "ours") for name, f in FIELDS.items()
    }
    everything = defaults | said
    if said.get("epochs", (None, "ours"))[1] == "user" and said.get("steps", (None, "ours"))[1] != "user":
        everything["steps"] = (None, "ours")  # the user's epochs beat a recipe's steps
    if everything["keep"][1] == "user" and everything["penalty"][0] is not None:
        if everything["penalty"][1] == "user":
            raise UserError("keep and penalty are both given; with a penalty the share is a result, so leave one out")
        everything["penalty"] = (None, "ours")  # the user's share beats a recipe's penalty
    settings = Settings(**{name: _converted(name, value) for name, (value, _) in everything.items()})
    return Sourced(settings, {name: source for name, (_, source) in everything.items()}, recipe)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no config file {str(path)!r}; give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read config file {str(path)!r}: {error}") from None
    for name in values:
        if name not in FIELDS and name != "recipe":
            raise UserError(f"{str(path)!r} has a setting {name!r} that is not known{nearest(name, FIELDS)}")
    return values


def _converted(name: str, value: Any) -> Any:
    """`value` as the setting's type, or the sentence that says what is wrong with it."""
    wanted = str(FIELDS[name].type)
    if value is None:
        if "None" in wanted:
            return None
        raise UserError(f"{name} needs a value")
    kind = wanted.split(" ")[0]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float" and number:
        value = float(value)
    right = {
        "float": isinstance(value, float),
        "int": number and float(value).is_integer(),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
    }[kind]
    if not right:
        raise UserError(f"{name} must be of type {kind}, got {value!r}")
    if kind == "float" and not isfinite(value):
        raise UserError(f"{name} must be a finite number, got {value}")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise UserError(f"{name} must be one of {', '.join(_CHOICES[name])}, got {value!r}")
    return int(value) if kind == "int" else value


@dataclass(frozen=True)
class Plan:
    """The steps of a training, all whole numbers."""

    total: int
    warmup: int
    cooldown: int
    lr_warmup: int
    eval_every: int
    log_every: int
    checkpoint_every: int


def plan(sourced: Sourced, rows: int) -> Plan:
    """Steps from epochs and shares; a recipe's step counts scale with the length of the training."""
    s = sourced.settings
    for name, least in _LEAST.items():
        value = getattr(s, name)
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value:g}")
    if s.steps is None and s.epochs <= 0:
        raise UserError(f"epochs must be above 0, got {s.epochs:g}")
    total = s.steps if s.steps is not None else max(1, ceil(s.epochs * ceil(rows / s.batch)))

    def steps(name: str) -> int:
        value = getattr(s, name)
        if value < 1:
            return round(value * total)
        # The user counts in steps of this training, a recipe in steps of the training that it was made for.
        scales = s.reference_steps is not None and sourced.sources[name] != "user"
        return round(value * total / s.reference_steps) if scales and s.reference_steps else round(value)

    warmup, cooldown = steps("warmup"), steps("cooldown")
    if warmup + cooldown > total:
        raise UserError(
            f"warmup + cooldown must not exceed the {total} steps of the training, got {warmup} + {cooldown}; "
            "shorten one of them or train for longer"
        )
    return Plan(
        total=total,
        warmup=warmup,
        cooldown=cooldown,
        lr_warmup=min(steps("lr_warmup"), total),
        eval_every=s.eval_every or max(1, ceil(total / 10)),
        log_every=s.log_every or max(1, total // 100),
        checkpoint_every=s.checkpoint_every or max(1, ceil(total / 10)),
    )
