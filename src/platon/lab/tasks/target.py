"""What a model is to predict for a text or an image: one class, several labels, or a number.

A target knows the model's configuration, its metrics, and how outputs are read. Labels are what the loss takes: a class
number, a list of zeros and ones, or a number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from platon.lab import convergence
from platon.lab.errors import UserError
from platon.lab.percent import percent
from platon.lab.tasks import metrics as measures
from platon.lab.tasks.answer import Answer, ClassAnswer, LabelsAnswer, NumberAnswer
from platon.lab.tasks.dataset import Split
from platon.lab.tasks.model import Pretrained, name_labels

SHOWN = 8  #: classes that are listed with their shares


def logits_of(predictions: Any) -> NDArray[Any]:
    """The logits in what Trainer gathers; some models return more."""
    return np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)


class Target(ABC):
    """What is predicted for a row.

    Attributes:
        metrics: the first is the headline.
    """

    metrics: tuple[str, ...]

    @abstractmethod
    def title(self) -> str:
        """What is predicted, in words."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The fields of a model's configuration."""

    @abstractmethod
    def require(self, split: Split, column: str) -> None:
        """Raise unless every label of the split is one that the loss can take."""

    @abstractmethod
    def score(self, split: str, predictions: Any, labels: Any) -> dict[str, float]:
        """The metrics of a model's outputs."""

    @abstractmethod
    def chance(self, labels: Any) -> dict[str, float]:
        """The metrics of the best constant answer."""

    @abstractmethod
    def answers(self, predictions: Any) -> list[Answer]:
        """What the outputs say, row by row."""

    @abstractmethod
    def described(self, labels: Any) -> str:
        """The labels of a split in words."""

    def is_constant(self, predictions: Any) -> bool:
        """Whether every row gets the same answer."""
        return convergence.is_constant(predictions)

    def strata(self, labels: Any) -> list[Any] | None:
        """Groups of rows of which the same share is held out; `None`: the rows are not grouped."""
        return None


@dataclass(frozen=True)
class Classes(Target):
    """One of several classes, by their names."""

    names: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)

    def title(self) -> str:
        return f"{len(self.names)} classes"

    def config(self) -> dict[str, Any]:
        return name_labels(self.names)

    def require(self, split: Split, column: str) -> None:
        split.require_labels(column, len(self.names))

    def score(self, split: str, predictions: Any, labels: Any) -> dict[str, float]:
        return measures.score(split, predictions, labels, metrics=self.metrics)

    def chance(self, labels: Any) -> dict[str, float]:
        return measures.chance(labels, self.metrics)

    def answers(self, predictions: Any) -> list[Answer]:
        return [ClassAnswer(self.names, row) for row in softmax(logits_of(predictions))]

    def described(self, labels: Any) -> str:
        found = Counter(labels)
        return shares({self.names[number]: found[number] for number in range(len(self.names))}, len(labels))

    def strata(self, labels: Any) -> list[Any]:
        return list(labels)


@dataclass(frozen=True)
class Several(Target):
    """Any number of labels, independent of each other; a label is predicted where its probability is above 0.5."""

    names: tuple[str, ...]
    metrics: tuple[str, ...] = ("micro_f1", "macro_f1")

    def title(self) -> str:
        return f"any of {len(self.names)} labels in a row"

    def config(self) -> dict[str, Any]:
        return name_labels(self.names) | {"problem_type": "multi_label_classification"}

    def require(self, split: Split, column: str) -> None:
        kind = split.rows.data.column(column).type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_floating(kind.value_type):
            raise UserError(f"column {column!r} of {split.where} must hold lists of 0 and 1, but holds {kind}")

    def score(self, split: str, predictions: Any, labels: Any) -> dict[str, float]:
        said, true = logits_of(predictions) > 0, np.asarray(labels) > 0
        return {name: measures.LABEL_METRICS[name](said, true) for name in self.metrics}

    def chance(self, labels: Any) -> dict[str, float]:
        """The best set for the micro F1 is that of the k most frequent labels; for the macro F1, all labels."""
        true = np.asarray(labels) > 0
        rows, counts = len(true), np.sort(true.sum(0))[::-1].astype(np.float64)
        sizes = np.arange(1, len(counts) + 1)
        micro = np.max(2 * np.cumsum(counts) / (sizes * rows + counts.sum()), initial=0.0)
        found = {"micro_f1": float(micro), "macro_f1": float(np.mean(2 * counts / (rows + counts)))}
        return {name: found[name] for name in self.metrics}

    def answers(self, predictions: Any) -> list[Answer]:
        logits = logits_of(predictions).astype(np.float64)
        return [LabelsAnswer(self.names, row) for row in 1 / (1 + np.exp(-np.clip(logits, -700, 700)))]

    def described(self, labels: Any) -> str:
        true = np.asarray(labels) > 0
        none = int((~true.any(1)).sum())
        counts = {name: int(count) for name, count in zip(self.names, true.sum(0), strict=True)}
        return shares(counts, len(true)) + (f"; none {percent(none / len(true))}" if none else "")

    def is_constant(self, predictions: Any) -> bool:
        said = logits_of(predictions) > 0
        return len(said) > 1 and bool((said == said[0]).all())


@dataclass(frozen=True)
class Numbers(Target):
    """A number: regression."""

    metrics: tuple[str, ...] = ("pearson", "spearman")

    def title(self) -> str:
        return "numbers (regression)"

    def config(self) -> dict[str, Any]:
        return name_labels(None)

    def require(self, split: Split, column: str) -> None:
        split.require_numbers(column)

    def score(self, split: str, predictions: Any, labels: Any) -> dict[str, float]:
        return measures.score(split, predictions, labels, metrics=self.metrics, regression=True)

    def chance(self, labels: Any) -> dict[str, float]:
        return measures.chance(labels, self.metrics, regression=True)

    def answers(self, predictions: Any) -> list[Answer]:
        return [NumberAnswer(float(value)) for value in logits_of(predictions).reshape(-1)]

    def described(self, labels: Any) -> str:
        found = np.asarray(labels, dtype=np.float64)
        return f"{found.min():g} to {found.max():g}, mean {found.mean():.3g}"


def target_of(pretrained: Pretrained) -> Target:
    """What a trained model predicts, by its configuration."""
    names = pretrained.labels()
    if names is None:
        return Numbers()
    several = getattr(pretrained.config, "problem_type", None) == "multi_label_classification"
    return Several(names) if several else Classes(names)


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Probabilities of the classes in the last dimension."""
    wide = logits.astype(np.float64)
    raised = np.exp(wide - wide.max(-1, keepdims=True))
    found: NDArray[np.float64] = raised / raised.sum(-1, keepdims=True)
    return found


def shares(counts: dict[str, int], rows: int) -> str:
    """The most frequent names with their shares of the rows."""
    ordered = sorted(counts.items(), key=lambda one: -one[1])
    shown = ", ".join(f"{name} {percent(count / rows)}" for name, count in ordered[:SHOWN])
    return shown + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")
