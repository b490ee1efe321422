"""The settings of a run: their names, types, limits and defaults, and who chose each value.

A value comes from the defaults here or of the task ("ours"), from a recipe ("paper", "code" or "ours"), or from the
user: a config file, or a flag of the command line ("user").
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from platon.engine.schedule import COOLDOWN, EVERY, WARMUP, checked_keep
from platon.engine.scope import checked_scope
from platon.lab import recipes, tasks
from platon.lab.errors import UserError, nearest
from platon.lab.setting import Flag, Number, Text, Whole, setting

Source = Literal["paper", "code", "ours", "user"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Settings:
    """Everything that decides a run's result. A task may have other defaults (`Task.defaults`)."""

    task: Text = setting("digits", "What", "a name from `platon list tasks`")
    model: Text | None = setting(None, "What", "hub name or local folder; each task has a default")
    method: Text = setting("platon", "What", "a name from `platon list methods`")
    keep: Annotated[Number, AfterValidator(checked_keep)] = setting(
        0.1, "What", "share of the prunable weights that is kept, e.g. 0.1"
    )
    units: Literal["weights", "columns", "blocks", "neurons", "heads", "heads+neurons"] = setting(
        "weights", "What", "what is pruned together: weights, columns, blocks, neurons, heads, heads+neurons"
    )
    dense: Literal["none", "beside", "first"] = setting(
        "none", "What", "train the dense twin too: none, beside, or first (pruning starts from it)"
    )

    data: Text | None = setting(None, "Data", "local folder in the hub's layout, or your own file; default: the hub")
    train_rows: Whole | None = setting(None, "Data", "train on so many rows, a fixed random subset")
    eval_rows: Whole | None = setting(None, "Data", "evaluate on so many rows, a fixed random subset")
    text_column: Text | None = setting(None, "Data", "your own data: the column with the text")
    second_column: Text | None = setting(None, "Data", "your own data: the column with the second text")
    label_column: Text | None = setting(
        None, "Data", "your own data: the column with the label; several, separated by commas, hold 0 or 1 each"
    )
    labels: Literal["classes", "several", "numbers"] | None = setting(
        None,
        "Data",
        "your own texts: what labels are: classes, several in a row, or numbers; default: as the column shows",
    )
    pairs: Text | None = setting(
        None, "Data", "embed: pairs of texts with scores, a file or a folder with STS-B, to evaluate on"
    )
    test: Text | None = setting(None, "Data", "your own data: measured once, at the end, beside the validation data")
    holdout: Number = setting(0.1, "Data", "your own data: share held out where there is no validation file")
    stratify: Flag = setting(True, "Data", "hold out the same share of every class", before=False)
    max_length: Whole | None = setting(None, "Data", "longest input, in tokens")
    stride: Whole | None = setting(None, "Data", "tokens that pieces share (SQuAD), or from window to window (lm)")
    image_size: Whole | None = setting(None, "Data", "width and height of an image, in pixels")
    augment: Flag = setting(False, "Data", "random crops and flips of training images")
    trust_remote_code: Flag = setting(False, "Data", "run Python code that comes with a model")

    epochs: Number = setting(3.0, "Training", "passes over the training data")
    steps: Whole | None = setting(None, "Training", "optimizer steps; overrides epochs; 0: prune untrained", ge=0)
    batch: Whole = setting(32, "Training", "examples in an optimizer step, over all processes", ge=1)
    accumulate: Whole = setting(1, "Training", "compute each batch in so many parts, to save memory", ge=1)
    optimizer: Literal["adamw", "adamax", "sgd"] = setting("adamw", "Training", "adamw, adamax or sgd")
    learning_rate: Number = setting(5e-5, "Training", "peak learning rate", ge=0)
    momentum: Number = setting(0.9, "Training", "momentum of sgd", ge=0)
    weight_decay: Number = setting(0.0, "Training", "on matrices, not on biases and norms", ge=0)
    lr_warmup: Number = setting(
        0.1, "Training", "steps of rising learning rate; below 1: a share of the training", ge=0
    )
    decay: Literal["linear", "cosine"] = setting("linear", "Training", "how the learning rate falls: linear or cosine")
    clip: Number = setting(1.0, "Training", "largest gradient norm; 0: no clipping", ge=0)
    freeze_embeddings: Flag = setting(False, "Training", "train everything but the embeddings")
    group_by_length: Flag = setting(True, "Training", "batches of texts of similar length, for less padding")
    gradient_checkpointing: Flag = setting(
        False, "Training", "compute activations again in the backward pass, to save memory"
    )
    precision: Literal["float32", "bf16", "fp16"] = setting("float32", "Training", "float32, or mixed: bf16 or fp16")
    seed: Whole = setting(0, "Training", "seed of all random numbers", ge=0)

    # The defaults of the engine, which gives the reasons. Those of scores (beta1, …) are written again, because
    # help must not import torch; test_defaults_are_the_engines compares them.
    warmup: Number = setting(WARMUP, "Pruning", "steps before pruning starts; below 1: a share of the training", ge=0)
    cooldown: Number = setting(
        COOLDOWN, "Pruning", "last steps, at the final share; below 1: a share of the training", ge=0
    )
    every: Whole = setting(EVERY, "Pruning", "steps between two masks while the share falls", ge=1)
    beta1: Number = setting(0.85, "Pruning", "platon: smoothing of sensitivity")
    beta2: Number = setting(0.85, "Pruning", "platon: smoothing of uncertainty")
    window: Whole | None = setting(
        None,
        "Pruning",
        "platon: steps whose sensitivity is averaged before smoothing; default: 10, or fewer",
    )
    timing: Literal["after", "before"] = setting(
        "after", "Pruning", "platon: measure sensitivity before or after the optimizer's update"
    )
    exponent: Number = setting(1.0, "Pruning", "platon: the power of uncertainty in the score")
    scope: Annotated[Text, AfterValidator(checked_scope)] | None = setting(
        None, "Pruning", "what is ranked together: global, matrix, row or a pattern (2:4); default: the method's own"
    )
    score_learning_rate: Number | None = setting(
        None, "Pruning", "learned scores: peak learning rate; default: the method's own"
    )
    score_init: Number | None = setting(None, "Pruning", "learned scores: initial value; default: the method's own")
    penalty: Number | None = setting(
        None, "Pruning", "soft-movement, l0: a fixed penalty instead of --keep; the share kept is then a result"
    )
    tau: Number = setting(0.1, "Pruning", "soft-movement: sigmoid of the score above which a weight is kept")
    min_keep_per_matrix: Number | None = setting(
        None, "Pruning", "soft-movement, l0: least share kept of each matrix; default: the method's own"
    )
    block_rows: Whole = setting(32, "Pruning", "units blocks: outputs of a block", ge=1)
    block_columns: Whole = setting(32, "Pruning", "units blocks: inputs of a block", ge=1)
    reference_steps: Whole | None = setting(
        None, "Pruning", "length of the training that a recipe's warmup and cooldown refer to"
    )

    teacher: Text = setting(
        "none",
        "Teacher",
        "none, dense (the dense twin, or without --dense the model before training), or a model's name",
    )
    distil_weight: Number = setting(
        0.5, "Teacher", "the teacher's part of the loss, 0 to 1; 1: without labels", ge=0, le=1
    )
    temperature: Number = setting(2.0, "Teacher", "softens the probabilities that are compared", gt=0)
    hidden_weight: Number = setting(0.0, "Teacher", "weight of the hidden states beside the outputs", ge=0)

    eval_every: Whole | None = setting(None, "Records", "steps between evaluations; default: ten in a training", ge=1)
    eval_batch: Whole = setting(64, "Records", "examples in a batch of evaluation", ge=1)
    log_every: Whole | None = setting(
        None, "Records", "steps between logged lines; default: a hundred in a training", ge=1
    )
    checkpoint_every: Whole | None = setting(
        None, "Records", "steps between checkpoints; default: ten in a training", ge=1
    )
    checkpoints: Whole = setting(2, "Records", "complete checkpoints to keep", ge=1)
    keep_checkpoints: Flag = setting(False, "Records", "keep the checkpoints of a run that is finished")
    fast: Flag = setting(
        True, "Records", "on a CPU, also write the model as it is deployed there, fast/, and measure it"
    )
    report_to: Literal["none", "tensorboard", "wandb"] = setting("none", "Records", "none, tensorboard or wandb")


#: name -> default, description (help) and panel of the help page
FIELDS: dict[str, FieldInfo] = vars(Settings)["__pydantic_fields__"]


_HINTS = get_type_hints(Settings)


def choices(name: str) -> tuple[str, ...]:
    """The words that a setting may be; empty where any value of its type is possible."""
    hints = (_HINTS[name], *get_args(_HINTS[name]))
    return next((get_args(hint) for hint in hints if get_origin(hint) is Literal), ())


def type_of(name: str) -> type:
    """The type of a setting's value: str, int, float or bool."""
    kinds = (_HINTS[name], *get_args(_HINTS[name]))
    return next((kind for kind in (bool, int, float) if kind in kinds), str)


def _extra(name: str) -> dict[str, Any]:
    extra = FIELDS[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def panel_of(name: str) -> str:
    """The panel of the help page that shows a setting."""
    return str(_extra(name)["panel"])


_BEFORE = {name: _extra(name)["before"] for name in FIELDS if "before" in _extra(name)}


def _checked(values: Mapping[str, Any]) -> Settings:
    """Settings with these values; a UserError names the first value that is wrong."""
    try:
        return Settings(**values)
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name, value, context = str(first["loc"][0]), first["input"], first.get("ctx", {})
    match first["type"]:
        case "value_error":
            return str(context["error"])
        case "unexpected_keyword_argument":
            return f"there is no setting {name!r}{nearest(name, FIELDS)}"
        case "finite_number":
            return f"{name} must be a finite number, got {value}"
        case "greater_than_equal":
            return f"{name} must be at least {context['ge']:g}, got {value:g}"
        case "less_than_equal":
            return f"{name} must be at most {context['le']:g}, got {value:g}"
        case "greater_than":
            return f"{name} must be above {context['gt']:g}, got {value:g}"
        case "literal_error" if isinstance(value, str):
            return f"{name} must be one of {', '.join(choices(name))}, got {value!r}"
        case _ if value is None:
            return f"{name} needs a value"
        case _:
            return f"{name} must be of type {type_of(name).__name__}, got {value!r}"


@dataclasses.dataclass(frozen=True)
class ResolvedSettings:
    """The settings of one run after defaults, recipe, config file and flags were merged, and the source of each."""

    settings: Settings
    sources: Mapping[str, Source]
    recipe: str | None = None

    def with_user(self, **values: Any) -> Self:
        """A copy in which the user has chosen these values."""
        chosen: dict[str, Source] = dict.fromkeys(values, "user")
        settings = _checked({**dataclasses.asdict(self.settings), **values})
        return dataclasses.replace(self, settings=settings, sources={**self.sources, **chosen})

    def plain(self) -> dict[str, dict[str, Any]]:
        """Value and source of every setting, as run.json and record.json hold them."""
        values = dataclasses.asdict(self.settings)
        return {name: {"value": value, "source": self.sources[name]} for name, value in values.items()}

    @classmethod
    def from_plain(cls, plain: Any, recipe: Any = None) -> Self:
        """The reverse of `plain`, for a file that may be damaged or edited; a UserError says what is wrong in it.

        A setting that is missing was added after the file was written; the run had its default, or what `before` says.
        """
        if not isinstance(plain, dict) or not all(isinstance(one, dict) for one in plain.values()):
            raise UserError("its settings must be an object of objects with a value and a source")
        for name, one in plain.items():
            if name not in FIELDS:
                raise UserError(f"there is no setting {name!r}{nearest(name, FIELDS)}")
            if "value" not in one or one.get("source") not in get_args(Source):
                raise UserError(f"{name} needs a value and a source ({', '.join(get_args(Source))})")
        if recipe is not None and not isinstance(recipe, str):
            raise UserError(f"recipe must be of type str, got {recipe!r}")
        settings = _checked(_BEFORE | {name: one["value"] for name, one in plain.items()})
        tasks.find(settings.task)
        sources = dict.fromkeys(FIELDS, "ours") | {name: one["source"] for name, one in plain.items()}
        return cls(settings, sources, recipe)


def resolve(
    recipe: str | None = None, config: Path | None = None, flags: Mapping[str, Any] | None = None
) -> ResolvedSettings:
    """Merge defaults, recipe, config file and flags; each overrides those before it."""
    chosen: dict[str, tuple[Any, Source]] = {}
    if config is not None:
        values = _read_config(config)
        recipe = recipe or values.pop("recipe", None)
        values.pop("recipe", None)
        chosen |= {name: (value, "user") for name, value in values.items()}
    chosen |= {name: (value, "user") for name, value in (flags or {}).items() if value is not None}
    if recipe is not None:
        if not isinstance(recipe, str):
            raise UserError(f"recipe must be of type str, got {recipe!r}")
        fields = recipes.find(recipe).fields.items()
        chosen = {name: (f.value, f.source) for name, f in fields if f.value is not None or name == "steps"} | chosen
    task = tasks.find(str(chosen.get("task", (FIELDS["task"].default, "ours"))[0]))
    merged: dict[str, tuple[Any, Source]] = {
        name: (task.defaults.get(name, field.default), "ours") for name, field in FIELDS.items()
    }
    merged |= chosen
    if merged["epochs"][1] == "user" and merged["steps"][1] != "user":
        merged["steps"] = (None, "ours")  # the user's epochs override a recipe's steps
    if merged["keep"][1] == "user" and merged["penalty"][0] is not None:
        if merged["penalty"][1] == "user":
            raise UserError("keep and penalty are both given; with a penalty the share is a result, so leave one out")
        merged["penalty"] = (None, "ours")  # the user's share overrides a recipe's penalty
    settings = _checked({name: value for name, (value, _) in merged.items()})
    return ResolvedSettings(settings, {name: source for name, (_, source) in merged.items()}, recipe)


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
