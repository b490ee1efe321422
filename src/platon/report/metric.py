"""Metrics: one measure on one split of the data, and their names in tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from platon.lab.record import Measure

_SHORT = {"accuracy": "Acc", "f1": "F1", "matthews": "Mcc", "pearson": "P", "spearman": "S", "exact_match": "EM"}
_SHORT |= {"matched accuracy": "m", "mismatched accuracy": "mm", "perplexity": "PPL"}


@dataclass(frozen=True)
class _OnSplit:
    split: str


@dataclass(frozen=True)
class Metric(Measure, _OnSplit):
    """A measure on one split of the data, such as "validation" or "matched"."""

    def title(self, among: Iterable[Metric]) -> str:
        """The metric's name, with its split if the task is measured on several."""
        return self.name if len({metric.split for metric in among}) == 1 else f"{self.split} {self.name}"


def short_title(title: str) -> str:
    """The abbreviation that tables use for a metric's title."""
    return _SHORT.get(title, title)
