"""Where a run prints its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _print_nothing(text: str) -> None:
    pass


@dataclass(frozen=True)
class Printer:
    """Prints nothing by default.

    Args:
        line: prints one line.
        bar: show Trainer's progress bar, instead of a line for each evaluation.
    """

    line: Callable[[str], None] = _print_nothing
    bar: bool = False
