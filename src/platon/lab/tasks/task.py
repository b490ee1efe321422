"""What a task is: a request for data and a model goes in, everything that training and evaluation need comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from platon.lab.errors import UserError
from platon.lab.tasks.answer import Answer
from platon.lab.tasks.path import check_columns, existing_data, locate_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Rows(Protocol):
    """A dataset with a length and numbered rows, as `datasets.Dataset` and torch's are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


@dataclass(frozen=True)
class Request:
    """What the user asks of the data and of the model; ``None`` leaves it to the task.

    data: a local folder in the hub's layout, or the user's own file or folder; None is the hub.
    model: a hub name or a local folder; None is the task's default.
    train_rows, eval_rows: use so many rows only: a fixed random subset, the same whatever the training seed.
    label_column: the column of the user's own labels; names of several columns are separated by commas.
    labels: what the user's own labels are: "classes", "several" in a row, or "numbers".
    pairs: embed: pairs of texts with scores, to evaluate on.
    test: the user's own file or folder that is measured once, at the end.
    holdout: the share of the user's own training file that becomes validation when there is no validation file.
    stratify: hold out the same share of every class.
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
    labels: str | None = None
    pairs: str | None = None
    test: str | None = None
    holdout: float = 0.1
    stratify: bool = True
    augment: bool = False
    trust_remote_code: bool = False

    # Properties of the class and no fields: whether nothing is trained (EvaluationRequest), whether rows have labels
    # (PredictionRequest).
    evaluation_only = False
    labelled = True

    def __post_init__(self) -> None:
        """Refuse numbers that no task can use."""
        for name in ("max_length", "stride", "image_size", "train_rows", "eval_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if not (0 < self.holdout < 1 or (self.evaluation_only and self.holdout == 1)):
            raise UserError(f"holdout must be between 0 and 1, got {self.holdout}; write 0.1 for 10 %")

    @classmethod
    def from_settings(cls, settings: Any, model: str | None = None) -> Request:
        """What a run's settings ask for; `model` instead of theirs, if given."""
        asked = {field.name: getattr(settings, field.name) for field in fields(cls)}
        data = None if settings.data is None else Path(settings.data)
        return cls(**{**asked, "data": data, "model": model or settings.model})

    def for_evaluation(self, model: Path, data: Path | None = None) -> EvaluationRequest:
        """The request that evaluates a trained model: on the rows of this request, or on every row of other data."""
        request = EvaluationRequest(**{**vars(self), "model": str(model), "trained_from": self.model})
        return request if data is None else replace(request, data=data, test=None, eval_rows=None, holdout=1.0)

    def for_prediction(self, model: Path, data: Path) -> PredictionRequest:
        """The request for the answers of a trained model to every row of new data."""
        return PredictionRequest(**vars(self.for_evaluation(model, data)))


@dataclass(frozen=True)
class EvaluationRequest(Request):
    """A request without training rows; the classes are those that the model names in its configuration.

    trained_from: the model that training started from.
    """

    trained_from: str | None = None

    evaluation_only = True


@dataclass(frozen=True)
class PredictionRequest(EvaluationRequest):
    """A request for answers: its rows need no labels. They are the only evaluation split, called `NEW`."""

    labelled = False


NEW = "new"  #: the split of a `PredictionRequest`


@dataclass
class Prepared:
    """What training and evaluation need of a task.

    build: a new model. New heads are drawn from torch's global generator, so seed it first.
    train: the training rows; empty where only evaluation was asked for.
    evaluation: split name -> rows. The first split and the first metric are the headline.
    collate: list of rows -> batch of tensors.
    score: (split, predictions, labels) -> metrics as fractions (1.0 is perfect, never NaN). The arrays are what Trainer
        gathers, in the order of the split's rows.
    chance: split -> metrics of the best constant answer, which a model that learned nothing cannot exceed.
    fingerprint: SHA-256 of the rows and columns used: the same for the hub and for local files.
    processor: the tokenizer or image processor to save beside the model.
    lengths: "train" or split name -> token counts of its rows, for batches of similar length; empty if all are equal.
    label_names: TrainingArguments(label_names=...).
    counts: split -> examples in it, where a row is only a part of an example (SQuAD); otherwise the rows are counted.
    is_constant: whether predictions are the same for every row; None decides by the largest logit of each row.
    notes: sentences for the user about the model that `build` made, for example that its head is new.
    test: like `evaluation`, for splits that are measured once, at the end.
    about: what was read, as (what, sentence), for the user.
    warnings: what in the data will harm the result, one sentence each.
    condense: (logits, labels) of a batch -> what evaluation keeps of them; None keeps the logits.
    details: what the record says of the data beside its rows.
    answers: predictions of the split `NEW` -> what they say, row by row; None where the task cannot tell.
    source: the rows of the split `NEW` as they were read, in the order of the answers.
    adapt: a saved model that was opened again -> the model as it is measured here; a model that `build` made, too.
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
    counts: dict[str, int] = field(default_factory=dict)
    is_constant: Callable[[Any], bool] | None = None
    notes: list[str] = field(default_factory=list)
    test: dict[str, Rows] = field(default_factory=dict)
    about: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    condense: Callable[[Any, Any], Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    answers: Callable[[Any], list[Answer]] | None = None
    source: Any = None
    adapt: Callable[[PreTrainedModel], PreTrainedModel] = lambda model: model

    def __post_init__(self) -> None:
        """Count the rows where the task counted nothing else."""
        self.counts = {split: len(rows) for split, rows in (self.evaluation | self.test).items()} | self.counts

    def batch(self, rows: int = 8) -> dict[str, Any]:
        """The first rows of the first evaluation split as a batch for the model, without labels."""
        split = next(iter(self.evaluation.values()))
        made = self.collate([split[number] for number in range(min(rows, len(split)))])
        return {name: tensor for name, tensor in made.items() if name not in self.label_names}


Prepare = Callable[["Task", Request], Prepared]


@dataclass(frozen=True)
class Task:
    """A named task.

    metrics: the first is the headline. A user's own texts with numbers as labels are scored by correlation instead.
    kind: the hub's name for it (pipeline tag).
    preparation: the function that reads the data and loads the model; or where it is, as "package.module:function",
        to be imported on first use, so that listing the tasks does not import torch.
    splits: what is evaluated, where it exists; the first is the headline.
    model: what is trained when the user names none; None is a small model built from a configuration.
    defaults: settings whose default differs for this task.
    labelled: whether the data has labels; without, the model learns from a teacher alone.
    own_test: whether the user can give a test file.
    predicts: whether `prepare` takes a `PredictionRequest`.
    """

    name: str
    title: str
    metrics: tuple[str, ...]
    kind: str
    preparation: Prepare | str
    splits: tuple[str, ...] = ("validation",)
    model: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    labelled: bool = True
    own_test: bool = False
    predicts: bool = False

    def check_paths(self, request: Request) -> None:
        """Refuse data, columns and models that are not there, without importing torch."""
        for data in (request.data, None if request.test is None else Path(request.test)):
            if data is not None:
                existing_data(data)
                check_columns(data, (request.text_column, request.second_column), request.label_column)
        if request.model is not None:
            locate_model(request.model)

    def prepare(self, request: Request) -> Prepared:
        """Read and check the data, tokenise or decode it, and say how to build and score the model."""
        if request.test is not None and not self.own_test:
            raise UserError(f"--test is for your own data; the task {self.name} has its own splits")
        if not request.labelled and not self.predicts:
            raise UserError(f"predict cannot read new rows for the task {self.name}")
        if not isinstance(self.preparation, str):
            return self.preparation(self, request)
        module, _, name = self.preparation.partition(":")
        prepare: Prepare = getattr(import_module(module), name)
        return prepare(self, request)
