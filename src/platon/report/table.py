"""A table, ready to be written in any format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NOT_RUN, FAILED = "--", "N.A."


@dataclass(frozen=True)
class Span:
    """A piece of a cell's text."""

    text: str
    bold: bool = False


Spans = tuple[Span, ...]


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        name: a word for file names.
        title: stands above it.
        head: one text for each column.
        body: rows of cells.
        labels: how many columns, from the left, name the row.
        rules: numbers of the rows that have a line above them.
        notes: stand below it.
    """

    name: str
    title: str
    head: tuple[str, ...]
    body: tuple[tuple[Spans, ...], ...]
    labels: int
    rules: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()


def plain_row(texts: Iterable[str]) -> tuple[Spans, ...]:
    """A row without bold text."""
    return tuple((Span(text),) for text in texts)
