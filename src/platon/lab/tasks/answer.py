"""What a model says about one row, as `platon predict` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DIGITS = 6  #: of probabilities that are written


class Answer(Protocol):
    """One row's answer: `nested` for JSON lines, `flat` for a line of a table."""

    def nested(self) -> dict[str, Any]: ...

    def flat(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ClassAnswer:
    """One class, and the probability of each."""

    names: Sequence[str]
    probabilities: NDArray[np.floating]

    def _said(self) -> dict[str, Any]:
        best = int(self.probabilities.argmax())
        return {"prediction": self.names[best], "probability": _rounded(self.probabilities[best])}

    def nested(self) -> dict[str, Any]:
        return {**self._said(), "probabilities": _named(self.names, self.probabilities)}

    def flat(self) -> dict[str, Any]:
        return {**self._said(), **_columns(self.names, self.probabilities)}


@dataclass(frozen=True)
class LabelsAnswer:
    """The labels whose probability is above 0.5, and the probability of each."""

    names: Sequence[str]
    probabilities: NDArray[np.floating]

    def _said(self) -> list[str]:
        return [name for name, p in zip(self.names, self.probabilities, strict=True) if p > 0.5]

    def nested(self) -> dict[str, Any]:
        return {"prediction": self._said(), "probabilities": _named(self.names, self.probabilities)}

    def flat(self) -> dict[str, Any]:
        return {"prediction": "|".join(self._said()), **_columns(self.names, self.probabilities)}


@dataclass(frozen=True)
class NumberAnswer:
    """A number."""

    number: float

    def nested(self) -> dict[str, Any]:
        return {"prediction": self.number}

    def flat(self) -> dict[str, Any]:
        return self.nested()


@dataclass(frozen=True)
class TagsAnswer:
    """A tag for each word, and its probability."""

    words: Sequence[str]
    tags: Sequence[str]
    probabilities: Sequence[float]

    def nested(self) -> dict[str, Any]:
        sure = [_rounded(p) for p in self.probabilities]
        return {"words": list(self.words), "prediction": list(self.tags), "probabilities": sure}

    def flat(self) -> dict[str, Any]:
        return {name: " ".join(map(str, values)) for name, values in self.nested().items()}


@dataclass(frozen=True)
class VectorAnswer:
    """An embedding."""

    vector: NDArray[np.floating]

    def nested(self) -> dict[str, Any]:
        return {"embedding": [float(value) for value in self.vector]}

    def flat(self) -> dict[str, Any]:
        return {"embedding": " ".join(f"{value:.9g}" for value in self.vector)}


def _rounded(probability: Any) -> float:
    return round(float(probability), DIGITS)


def _named(names: Sequence[str], probabilities: NDArray[np.floating]) -> dict[str, float]:
    return {name: _rounded(p) for name, p in zip(names, probabilities, strict=True)}


def _columns(names: Sequence[str], probabilities: NDArray[np.floating]) -> dict[str, float]:
    return {f"p_{name}": p for name, p in _named(names, probabilities).items()}
