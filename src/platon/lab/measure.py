"""What the numbers of a metric mean: whether they are percentages, and which of two is better.

Everything that compares or prints a result asks here: the best model of a run, its progress line, its record and card,
and the reports. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Metrics that count down and are no share of anything. All others are shares: 1 is perfect.
_ERRORS = frozenset({"perplexity", "loss"})


@dataclass(frozen=True)
class Measure:
    """A metric by its name in records, such as "accuracy" or "perplexity"."""

    name: str

    @property
    def lower_is_better(self) -> bool:
        return self.name in _ERRORS

    @property
    def is_percent(self) -> bool:
        """Whether records hold a share between -1 and 1 that is printed in percent."""
        return self.name not in _ERRORS

    @property
    def label(self) -> str:
        """For the axis of a figure."""
        return f"{self.name}, %" if self.is_percent else self.name

    def scaled(self, value: float) -> float:
        """A value of a record as tables and figures show it."""
        return 100 * value if self.is_percent else value

    def number(self, value: float) -> str:
        """A value of a record with two decimals."""
        return f"{self.scaled(value):,.2f}"

    def text(self, value: float) -> str:
        """A value of a record with two decimals and its unit."""
        return f"{self.number(value)}{' %' if self.is_percent else ''}"

    def is_better(self, value: float, than: float) -> bool:
        """Whether `value` is better than another; equal ones are not."""
        return value < than if self.lower_is_better else value > than

    def best(self, values: Iterable[float]) -> float:
        """The best of several values."""
        return min(values) if self.lower_is_better else max(values)

    def gain(self, difference: float) -> float:
        """How much better a value is that is larger by `difference`; negative if it is worse."""
        return -difference if self.lower_is_better else difference
