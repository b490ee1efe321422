"""Metrics: how their values are printed, and which of two values is better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_SHORT = {"accuracy": "Acc", "f1": "F1", "matthews": "Mcc", "pearson": "P", "spearman": "S", "exact_match": "EM"}
_SHORT |= {"matched accuracy": "m", "mismatched accuracy": "mm", "perplexity": "PPL"}
_LOWER_IS_BETTER = frozenset({"perplexity", "loss"})
_NOT_PERCENT = frozenset({"perplexity", "loss"})


@dataclass(frozen=True)
class Metric:
    """One metric, measured on one split of the data.

    Args:
        split: the split's name, such as "validation" or "matched".
        name: the metric's name in the record, such as "accuracy".
    """

    split: str
    name: str

    @property
    def is_percent(self) -> bool:
        """Whether records hold a share between -1 and 1 that is printed in percent."""
        return self.name not in _NOT_PERCENT

    @property
    def label(self) -> str:
        """For the axis of a figure."""
        return f"{self.name}, %" if self.is_percent else self.name

    def scaled(self, value: float) -> float:
        """A value of a record as tables and figures show it."""
        return 100 * value if self.is_percent else value

    def text(self, value: float) -> str:
        """A value of a record with two decimals and its unit."""
        return f"{self.scaled(value):.2f}{' %' if self.is_percent else ''}"

    def best(self, values: Iterable[float]) -> float:
        """The best of several values."""
        return min(values) if self.name in _LOWER_IS_BETTER else max(values)

    def gain(self, difference: float) -> float:
        """How much better a value is that is larger by `difference`; negative if it is worse."""
        return -difference if self.name in _LOWER_IS_BETTER else difference

    def title(self, among: Iterable[Metric]) -> str:
        """The metric's name, with its split if the task is measured on several."""
        return self.name if len({metric.split for metric in among}) == 1 else f"{self.split} {self.name}"


def short_title(title: str) -> str:
    """The abbreviation that tables use for a metric's title."""
    return _SHORT.get(title, title)
