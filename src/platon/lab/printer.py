"""Where a run prints what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

COLUMN = 11  #: characters of the first column of `row`


class Bar(Protocol):
    """A progress bar of one training."""

    def update(self, step: int, shown: str) -> None:
        """Show that `step` is done, and a few numbers."""
        ...

    def close(self) -> None:
        """The training has ended, or was stopped."""
        ...


def _print_nothing(text: str) -> None:
    pass


@dataclass(frozen=True)
class Printer:
    """Prints nothing by default.

    Args:
        line: prints one line.
        bar: makes a progress bar for a training with this title and so many steps; without one, a line is printed
            after each evaluation.
        warning: prints a line that the user should not miss; by default a line as any other.
    """

    line: Callable[[str], None] = _print_nothing
    bar: Callable[[str, int], Bar] | None = None
    warning: Callable[[str], None] | None = None

    def row(self, what: str, text: str) -> None:
        """Print two columns."""
        self.line(f"{what:{COLUMN}} {text}")

    def warn(self, text: str) -> None:
        """Print a warning."""
        (self.warning or self.line)(f"{'warning':{COLUMN}} {text}")
