"""The numbers of every figure, computed once: `figure` draws them into files, and the page draws them in a browser."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A point of a line; `low` and `high` are mean ± standard deviation if there are several seeds."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A line; dashed if it is the dense model's, for comparison."""

    name: str
    points: tuple[Point, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over one axis. `lines_are_rows`: the lines are rows of the tables, which have one colour in all charts."""

    name: str
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log_x: bool = False
    lines_are_rows: bool = True


@dataclass(frozen=True)
class Violin:
    """How one weight's score is distributed over a training, on a log10 scale.

    Args:
        label: the weight's number.
        outline: (log10 of the score, density with a peak of 1).
        median: log10 of the median score.
    """

    label: str
    outline: tuple[tuple[float, float], ...]
    median: float


@dataclass(frozen=True)
class Violins:
    """Two scores of the sampled weights of a run: (name of the score, a violin for each weight)."""

    name: str
    title: str
    scores: tuple[tuple[str, tuple[Violin, ...]], ...]


@dataclass(frozen=True)
class HeatMap:
    """Percent kept over a training: a panel for each kind of matrix, a row for each layer, a column for each step."""

    name: str
    title: str
    steps: tuple[int, ...]
    rows: tuple[str, ...]
    panels: tuple[tuple[str, tuple[tuple[float | None, ...], ...]], ...]


@dataclass(frozen=True)
class Charts:
    """Every chart of a report."""

    lines: tuple[Chart, ...]
    violins: tuple[Violins, ...]
    maps: tuple[HeatMap, ...]

    def row_names(self) -> list[str]:
        """The rows that have lines, each once: a row's place in this list is its colour in all charts."""
        lines = [line for chart in self.lines if chart.lines_are_rows for line in chart.lines]
        return list(dict.fromkeys(line.name for line in lines if not line.dashed))


def colour_number(chart: Chart, line: Line, row_names: list[str]) -> int:
    """The number of a line's colour: by its row, or by its place in the chart if it is no row."""
    return row_names.index(line.name) if line.name in row_names else chart.lines.index(line)
