"""The concept of a task: a request for data and model goes in, what training needs comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from platon.lab.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Rows(Protocol):
    """A map-style dataset: datasets.Dataset or torch's."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


@dataclass(frozen=True)
class Request:
    """What the user asks of the data and of the model; ``None`` leaves it to the task.

    data: a local folder in the hub's layout, or the user's own file or folder; None is the hub.
    model: a hub name or a local folder; None is the task's own choice.
    train_rows, eval_rows: use so many rows only: a fixed random subset, the same whatever the training seed.
    holdout: the share of the user's own training file that becomes validation when there is no validation file.
    augment: random crops and flips of training images. Off by default: the paper names none.
    """

    data: Path | None = None
    model: str | None = None
    max_length: int | None = None
    stride: int | None = None
    image_size: int | None = None
    train_rows: int | None = None
    eval_rows: int | None = None
    text_column: str | None = None
    second_column: str | None = None
    label_column: str | None = None
    holdout: float = 0.1
    augment: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Numbers that can never be right are refused here, once for all tasks."""
        for name in ("max_length", "stride", "image_size", "train_rows", "eval_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if not 0 < self.holdout < 1:
            raise UserError(f"holdout must be between 0 and 1, got {self.holdout}; write 0.1 for 10 %")


@dataclass
class Prepared:
    """What training and evaluation need of a task.

    build: a fresh model; new heads are drawn from torch's global generator, so seed it first.
    evaluation: split name -> rows. The first split and the first metric are the headline.
    collate: list of rows -> batch of tensors.
    score: (split, predictions, labels) -> metrics as fractions (1.0 is perfect, never NaN). The arrays are what Trainer
        gathers, in the order of the split's rows: SQuAD finds its texts by it.
    chance: split -> metrics that the best constant answer would reach: what a model that learned nothing cannot pass.
    fingerprint: SHA-256 of the rows and columns used: the same for the hub and for local files.
    processor: the tokenizer or image processor to save beside the model.
    lengths: "train" or split name -> token counts of its rows, for batches of like length; empty where all are equal.
    label_names: TrainingArguments(label_names=...).
    """

    build: Callable[[], PreTrainedModel]
    train: Rows
    evaluation: dict[str, Rows]
    collate: Callable[[list[Any]], dict[str, Any]]
    score: Callable[[str, Any, Any], dict[str, float]]
    chance: dict[str, dict[str, float]]
    metrics: tuple[str, ...]
    fingerprint: str
    processor: Any = None
    lengths: dict[str, list[int]] = field(default_factory=dict)
    label_names: tuple[str, ...] = ("labels",)

    def batch(self, rows: int = 8) -> dict[str, Any]:
        """The first rows of the first split, as the model takes them, without their labels."""
        split = next(iter(self.evaluation.values()))
        made = self.collate([split[number] for number in range(min(rows, len(split)))])
        return {name: tensor for name, tensor in made.items() if name not in self.label_names}


@dataclass(frozen=True)
class Task:
    """A named task.

    metrics: the first is the headline. A user's own texts with numbers as labels are scored by correlation instead.
    kind: the hub's name for it (pipeline tag).
    family: the module of this package with ``prepare(task, request)``; it is imported on first use, for it needs torch.
    splits: what is evaluated, where it exists; the first is the headline.
    model: what is trained when the user names none; None is a small one built from config.
    """

    name: str
    title: str
    metrics: tuple[str, ...]
    kind: str
    family: str
    splits: tuple[str, ...] = ("validation",)
    model: str | None = None

    def prepare(self, request: Request) -> Prepared:
        """Read and check the data, tokenise or decode it, and say how to build and score the model."""
        prepared: Prepared = import_module(f"platon.lab.tasks.{self.family}").prepare(self, request)
        return prepared
