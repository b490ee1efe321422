"""Tables of results in the paper's layouts.

A cell is a task, a share kept and a row (method and variant). It is

    68.6            the mean over its seeds, all of which converged
    N.A.            none of its seeds converged
    68.6 (2 of 3)   the mean of the two seeds of three that converged; never the best, and in no test
    --              not run
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from platon.lab.percent import percent
from platon.report import paper
from platon.report.cell import Cells, gather
from platon.report.layout import Layout, choose_layouts
from platon.report.metric import Metric, short_title
from platon.report.run import Run
from platon.report.statistics import deviation
from platon.report.table import FAILED, NOT_RUN, Span, Spans, Table
from platon.report.task import task_order, task_title

CONVERGENCE_RULE = (
    "N.A.: did not converge, by our rule: the loss or a gradient was not finite, or the model predicts the same for "
    "every example, or its headline metric is no better than that of the best constant prediction."
)


@dataclass(frozen=True)
class Options:
    """Options of all result tables.

    Args:
        sd: print the standard deviation beside each mean.
        paper: print the paper's rows beside ours.
    """

    sd: bool = False
    paper: bool = False


def result_tables(runs: Sequence[Run], options: Options) -> list[Table]:
    """Every layout that these runs fill, as a table."""
    return [_Builder(layout, chosen, options).build() for layout, chosen in choose_layouts(runs)]


def _metrics(run: Run) -> list[Metric]:
    """A run's metrics in the paper's order: the exact match of SQuAD before its F1."""
    return sorted(run.results, key=lambda metric: metric.name != "exact_match")


def _best_means(cells: Cells) -> dict[tuple[str, float, Metric], str]:
    """(task, ratio, metric) -> the best mean as printed, if there are two rows at least."""
    means: dict[tuple[str, float, Metric], list[float]] = {}
    for (task, ratio, _), cell in cells.items():
        if ratio < 1 and cell.all_converged:
            for metric in cell.runs[0].results:
                means.setdefault((task, ratio, metric), []).append(round(cell.mean(metric), 1))
    return {key: f"{key[2].best(values):.1f}" for key, values in means.items() if len(values) > 1}


class _Builder:
    """Builds one table.

    Tables are addressed by three axes: "task", "ratio" and "row". A layout says which of them go down and which across.
    """

    def __init__(self, layout: Layout, runs: Sequence[Run], options: Options) -> None:
        self.layout, self.options = layout, options
        self.cells = gather(runs)
        self.best = _best_means(self.cells)
        self.metrics = {run.task: _metrics(run) for run in reversed(runs)}
        self.models = sorted({_model_name(run) for run in runs})
        self.methods = {run.row: run.method for run in runs}
        self.titles = {run.method: str(run.record["title"]) for run in runs}
        self.paper = self._paper_cells() if options.paper else {}
        counts = [len(cell.runs) for cell in self.cells.values()]
        self.usual_seeds = max(set(counts), key=lambda count: (counts.count(count), count))
        self.used: set[str] = set()  # the signs in cells that a note explains
        self.keys: list[dict[str, Any]] = [
            dict(zip(("task", "ratio", "row"), key, strict=True)) for key in (*self.cells, *self.paper)
        ]
        self.values: dict[str, list[Any]] = {
            "task": sorted({key["task"] for key in self.keys}, key=task_order),
            "ratio": sorted({key["ratio"] for key in self.keys}, reverse="ratio" in layout.rows),
            "row": sorted({key["row"] for key in self.keys}, key=self._row_order),
        }

    def _paper_cells(self) -> dict[tuple[str, float, str], dict[str, float | None]]:
        """The paper's cells for the tasks and ratios of the runs."""
        here = {(task, ratio) for task, ratio, _ in self.cells}
        found = {}
        for place, values in paper.cells().items():
            if place.table == self.layout.name and (place.task, place.ratio) in here:
                title = self.titles.get(place.method, paper.titles()[place.method])
                row = f"{title}{'' if place.units == 'weights' else ' (structured)'}, paper"
                self.methods[row] = place.method
                found[place.task, place.ratio, row] = values
        return found

    def _row_order(self, row: str) -> tuple[Any, ...]:
        order = paper.method_order(self.methods[row])
        if self.layout.name == "variants" and self.methods[row] == "platon":
            order = (-1, 0)  # PLATON comes first in the paper's table of variants
        return order, ", paper" in row, row

    def build(self) -> Table:
        rows, columns = self.layout.rows, self.layout.columns
        across = list(self._positions(columns))
        body: list[tuple[Spans, ...]] = []
        rules = set()
        last: dict[str, Any] = {}
        for down in self._positions(rows):
            labels = [self._label(axis, down[axis]) for axis in rows]
            if len(rows) > 1:
                if last.get(rows[0]) == down[rows[0]]:
                    labels[0] = ""
                elif last:
                    rules.add(len(body))
            body.append((*((Span(label),) for label in labels), *(self._cell(**down, **top) for top in across)))
            last = down
        heads = {"ratio": "Ratio", "row": "Method", "task": "Task"}
        head = (*(heads[axis] for axis in rows), *(self._label(columns[0], top[columns[0]], True) for top in across))
        notes = tuple(self._notes())
        return Table(self.layout.name, self._title(), head, tuple(body), len(rows), frozenset(rules), notes)

    def _title(self) -> str:
        """The layout's title, with the task or the metrics that no row or column names."""
        tasks = self.values["task"]
        if "task" not in self.layout.rows + self.layout.columns:
            return f"{self.layout.title}, {self._label('task', tasks[0], True)}"
        metrics = {self._metric_titles(task) for task in tasks}
        if "task" in self.layout.rows and len(metrics) == 1:
            return f"{self.layout.title}, {metrics.pop()}"
        return self.layout.title

    def _positions(self, axes: tuple[str, ...]) -> Iterable[dict[str, Any]]:
        """The values along one axis, or the pairs along two axes that have a cell."""
        values = dict(self.values)
        if axes != ("ratio", "row") and len(values["ratio"]) > 1 and self._only_dense_at_one():
            values["ratio"] = [ratio for ratio in values["ratio"] if ratio < 1]  # dense is shown at every ratio
        if len(axes) == 1:
            yield from ({axes[0]: value} for value in values[axes[0]])
            return
        for first in values[axes[0]]:
            for second in values[axes[1]]:
                if any(key[axes[0]] == first and key[axes[1]] == second for key in self.keys):
                    yield {axes[0]: first, axes[1]: second}

    def _only_dense_at_one(self) -> bool:
        return all(self._is_dense(key["row"]) for key in self.keys if key["ratio"] == 1)

    def _is_dense(self, row: str) -> bool:
        return self.methods[row] == "dense"

    def _label(self, axis: str, value: Any, metrics: bool = False) -> str:
        if axis == "ratio":
            return percent(value, None)
        if axis == "row":
            return str(value)
        return f"{task_title(value)} {self._metric_titles(value)}" if metrics else task_title(value)

    def _metric_titles(self, task: str) -> str:
        metrics = self.metrics[task]
        return " / ".join(short_title(metric.title(metrics)) for metric in metrics)

    def _cell(self, row: str, task: str | None = None, ratio: float | None = None) -> Spans:
        task = self.values["task"][0] if task is None else task
        ratio = 1.0 if self._is_dense(row) or ratio is None else ratio
        if (task, ratio, row) in self.paper:
            return self._paper_cell(task, self.paper[task, ratio, row])
        cell = self.cells.get((task, ratio, row))
        if cell is None:
            self.used.add(NOT_RUN)
            return (Span(NOT_RUN),)
        if not cell.converged:
            self.used.add(FAILED)
            return (Span(FAILED),)
        spans: list[Span] = []
        for metric in self.metrics[task]:
            spans += [Span(" / ")] if spans else []
            text = f"{cell.mean(metric):.1f}"
            best = cell.all_converged and self.best.get((task, ratio, metric)) == text
            spread = deviation(list(cell.values(metric).values())) if self.options.sd else None
            spans += [Span(text, best)] + ([] if spread is None else [Span(f" ± {spread:.1f}")])
        if not cell.all_converged:
            self.used |= {FAILED, "k of n"}
            spans.append(Span(f" ({len(cell.converged)} of {len(cell.runs)})"))
        elif len(cell.runs) != self.usual_seeds:
            self.used.add("n")
            spans.append(Span(f" (n = {len(cell.runs)})"))
        return tuple(spans)

    def _paper_cell(self, task: str, values: dict[str, float | None]) -> Spans:
        names = [metric.title(self.metrics[task]) for metric in self.metrics[task]]
        texts = [FAILED if values.get(name) is None else f"{values[name]:.1f}" for name in names if name in values]
        return (Span(FAILED if set(texts) == {FAILED} else " / ".join(texts)),)

    def _notes(self) -> Iterable[str]:
        every = [metric for metrics in self.metrics.values() for metric in metrics]
        others = sorted({metric.name for metric in every if not metric.is_percent})
        unit = "Percent" if not others else f"Percent, except {' and '.join(others)}"
        seeds = "1 seed" if self.usual_seeds == 1 else f"{self.usual_seeds} seeds"
        yield f"{unit}; {'mean ± standard deviation' if self.options.sd else 'mean'} over {seeds}" + (
            ", or over n where a cell says so." if "n" in self.used else "."
        )
        if self.best:
            yield "Bold: the best of its task and ratio."
        if FAILED in self.used:
            yield CONVERGENCE_RULE
        if "k of n" in self.used:
            yield "(k of n): the mean of the k seeds of n that converged; never the best, and in no test."
        if NOT_RUN in self.used:
            yield "--: not run."
        if self.paper:
            yield "paper: as printed by Zhang et al. (2022), means of 5 seeds; their N.A. has no stated rule."
        if len(self.models) <= 3:
            yield f"Model: {', '.join(self.models)}."


def _model_name(run: Run) -> str:
    """The model that was pruned: its name on the Hugging Face hub, or the last part of its folder's path."""
    return str(run.setting("model") or "the task's own").rstrip("/").rpartition("/")[2]
