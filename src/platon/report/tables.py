"""Tables in the paper's layouts, from runs: means over seeds, the best bold, N.A. by our rule, "--" for not run.

A cell is a task, a share kept and a row (method and variant). It is

    68.6            the mean over its seeds, all of which converged
    N.A.            none of its seeds converged
    68.6 (2 of 3)   the mean of the two seeds of three that did; never the best, and in no test
    --              not run
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from platon.report.cells import (
    FAILED,
    METRICS,
    NOT_RUN,
    TASKS,
    Cells,
    Span,
    Spans,
    Table,
    gather,
    model_name,
    number_name,
    numbers_of,
    percent,
)
from platon.report.compare import comparison
from platon.report.paper import Place
from platon.report.paper import cells as paper_cells
from platon.report.runs import FAMILY, METHODS, Number, Run, Runs, row_order, task_order
from platon.report.statistics import deviation

GLUE = ("mnli", "rte", "qnli", "mrpc", "qqp", "sst2", "cola", "stsb")
PICTURES = ("cifar100", "imagenet", "digits", "images")
RULE = (
    "N.A.: did not converge, by our rule: the loss or a gradient was not finite, or the model gives one answer to "
    "every row, or its headline metric is no better than the best constant answer."
)


@dataclass(frozen=True)
class Layout:
    """Which runs a table shows, and what stands where: `rows` and `columns` name task, ratio and row (the method)."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    take: Callable[[Run], bool]
    needs: Callable[[Run], bool] = field(default=lambda run: run.method != "dense")


def _deberta(run: Run) -> bool:
    return "deberta" in str(run.setting("model")).lower()


def _whole(run: Run) -> bool:
    """Prunes weight by weight, or not at all."""
    return run.method == "dense" or run.setting("units") in (None, "weights")


def _ablation(run: Run) -> bool:
    return run.method in FAMILY and run.method != "platon"


def _main(run: Run) -> bool:
    return _whole(run) and not _ablation(run)


_BY_TASK, _BY_METHOD = (("ratio", "row"), ("task",)), (("task", "ratio"), ("row",))
LAYOUTS = (
    Layout("glue", "GLUE", *_BY_TASK, lambda run: run.task in GLUE and _main(run) and not _deberta(run)),
    Layout("squad", "SQuAD v1.1", ("row",), ("ratio",), lambda r: r.task == "squad" and _main(r) and not _deberta(r)),
    Layout("deberta", "DeBERTaV3", *_BY_TASK, lambda run: _deberta(run) and _main(run)),
    Layout("vit", "Images", *_BY_METHOD, lambda run: run.task in PICTURES and _main(run)),
    Layout(
        "variants",
        "Variants of the score",
        *_BY_TASK,
        lambda run: run.method in FAMILY and _whole(run),
        needs=_ablation,
    ),
    Layout(
        "betas",
        "Memory of the averages, β1 and β2",
        *_BY_TASK,
        lambda run: run.method == "platon" and _whole(run),
        needs=lambda run: "β" in run.row,
    ),
    Layout(
        "structured",
        "Structured pruning",
        *_BY_METHOD,
        lambda run: run.method == "platon",
        needs=lambda run: not _whole(run),
    ),
)
ANY = Layout("runs", "Runs", *_BY_TASK, lambda run: True, needs=lambda run: True)


def _best(cells: Cells) -> dict[tuple[str, float, Number], str]:
    """The best mean, as printed, of every task, ratio and number that two rows or more compete for."""
    best: dict[tuple[str, float, Number], list[float]] = {}
    for (task, ratio, _), cell in cells.items():
        if ratio < 1 and cell.whole:
            for number in cell.runs[0].numbers:
                best.setdefault((task, ratio, number), []).append(round(cell.mean(number), 1))
    return {key: f"{max(values):.1f}" for key, values in best.items() if len(values) > 1}


# --- one table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What a reader may ask for."""

    sd: bool = False
    paper: bool = False


class _Builder:
    """One layout with its runs; `axes` are the values that stand on the table's sides."""

    def __init__(self, layout: Layout, runs: Sequence[Run], options: Options) -> None:
        self.layout, self.options = layout, options
        self.cells = gather(runs)
        self.best = _best(self.cells)
        self.numbers = {run.task: numbers_of(run) for run in reversed(runs)}
        self.methods = {run.row: run.method for run in runs}
        self.printed = self._paper() if options.paper else {}
        counts = [len(cell.runs) for cell in self.cells.values()]
        self.usual = max(set(counts), key=lambda count: (counts.count(count), count))
        self.said: set[str] = set()
        keys = [*self.cells, *self.printed]
        self.tasks = sorted({task for task, _, _ in keys}, key=task_order)
        self.ratios = sorted({ratio for _, ratio, _ in keys}, reverse="ratio" in layout.rows)
        self.names = sorted({row for _, _, row in keys}, key=self._row_order)

    def _paper(self) -> dict[tuple[str, float, str], dict[str, float | None]]:
        """The paper's cells for the tasks and ratios that are here."""
        here = {(task, ratio) for task, ratio, _ in self.cells}
        found = {}
        for place, values in paper_cells().items():
            if place.table == self.layout.name and (place.task, place.ratio) in here:
                row = paper_row(place)
                self.methods[row] = place.method
                found[place.task, place.ratio, row] = values
        return found

    def _row_order(self, row: str) -> tuple[Any, ...]:
        order, name = row_order(self.methods[row], row)
        if self.layout.name == "variants" and self.methods[row] == "platon":
            order = -1  # as the paper has it
        return order, ", paper" in row, name

    def build(self) -> Table:
        rows, columns = self.layout.rows, self.layout.columns
        sides = list(self._sides(rows))
        tops = list(self._sides(columns))
        body: list[tuple[Spans, ...]] = []
        rules = set()
        last: dict[str, Any] = {}
        for side in sides:
            marks = []
            for axis in rows:
                repeated = len(rows) > 1 and axis == rows[0] and last.get(axis) == side[axis]
                if len(rows) > 1 and axis == rows[0] and last and not repeated:
                    rules.add(len(body))
                marks.append((Span("" if repeated else self._name(axis, side[axis])),))
            body.append((*marks, *(self._cell(**side, **top) for top in tops)))
            last = side
        heads = {"ratio": "Ratio", "row": "Method", "task": "Task"}
        head = (*(heads[axis] for axis in rows), *(self._name(columns[0], top[columns[0]], True) for top in tops))
        title = self.layout.title
        if "task" not in rows + columns:
            title += f", {self._name('task', self.tasks[0], True)}"
        if columns != ("task",) and "task" in rows:
            metrics = {self._metrics(task) for task in self.tasks}
            title += f", {metrics.pop()}" if len(metrics) == 1 else ""
        return Table(self.layout.name, title, head, tuple(body), len(rows), frozenset(rules), tuple(self._notes()))

    def _sides(self, axes: tuple[str, ...]) -> Iterable[dict[str, Any]]:
        """The values of an axis, or the pairs of two axes that something stands in."""
        keys = [*self.cells, *self.printed]
        ratios = self.ratios
        if axes != ("ratio", "row") and len(ratios) > 1 and all(self._dense(row) for _, r, row in keys if r == 1):
            ratios = [ratio for ratio in ratios if ratio < 1]
        values: dict[str, list[Any]] = {"task": self.tasks, "ratio": ratios, "row": self.names}
        if len(axes) == 1:
            yield from ({axes[0]: value} for value in values[axes[0]])
            return
        for first in values[axes[0]]:
            for second in values[axes[1]]:
                wanted = {axes[0]: first, axes[1]: second}
                there = (dict(zip(("task", "ratio", "row"), key, strict=True)) for key in keys)
                if any(all(key[axis] == value for axis, value in wanted.items()) for key in there):
                    yield wanted

    def _dense(self, row: str) -> bool:
        return self.methods[row] == "dense"

    def _name(self, axis: str, value: Any, metrics: bool = False) -> str:
        if axis == "ratio":
            return percent(value)
        if axis == "row":
            return str(value)
        name = TASKS.get(value, value)
        return f"{name} {self._metrics(value)}" if metrics else name

    def _metrics(self, task: str) -> str:
        numbers = self.numbers[task]
        names = [number_name(number, numbers) for number in numbers]
        return " / ".join(METRICS.get(name, name) for name in names)

    def _cell(self, row: str, task: str | None = None, ratio: float | None = None) -> Spans:
        task = self.tasks[0] if task is None else task
        share = 1.0 if self._dense(row) or ratio is None else ratio  # a dense model goes with every ratio
        if (task, share, row) in self.printed:
            return self._printed(task, self.printed[task, share, row])
        cell = self.cells.get((task, share, row))
        if cell is None:
            self.said.add(NOT_RUN)
            return (Span(NOT_RUN),)
        if not cell.converged:
            self.said.add(FAILED)
            return (Span(FAILED),)
        spans: list[Span] = []
        for number in self.numbers[task]:
            spans += [Span(" / ")] if spans else []
            text = f"{cell.mean(number):.1f}"
            best = cell.whole and self.best.get((task, share, number)) == text
            spread = deviation(list(cell.values(number).values())) if self.options.sd else None
            spans += [Span(text, best)] + ([] if spread is None else [Span(f" ± {spread:.1f}")])
        if not cell.whole:
            self.said |= {FAILED, "some"}
            spans.append(Span(f" ({len(cell.converged)} of {len(cell.runs)})"))
        elif len(cell.runs) != self.usual:
            self.said.add("n")
            spans.append(Span(f" (n = {len(cell.runs)})"))
        return tuple(spans)

    def _printed(self, task: str, values: dict[str, float | None]) -> Spans:
        names = [number_name(number, self.numbers[task]) for number in self.numbers[task]]
        texts = [FAILED if values.get(name) is None else f"{values[name]:.1f}" for name in names if name in values]
        return (Span(FAILED if set(texts) == {FAILED} else " / ".join(texts)),)

    def _notes(self) -> Iterable[str]:
        seeds = "1 seed" if self.usual == 1 else f"{self.usual} seeds"
        yield f"Percent; {'mean ± standard deviation' if self.options.sd else 'mean'} over {seeds}" + (
            ", or over n where a cell says so." if "n" in self.said else "."
        )
        if self.best:
            yield "Bold: the best of its task and ratio."
        if FAILED in self.said:
            yield RULE
        if "some" in self.said:
            yield "(k of n): the mean of the k seeds of n that converged; never the best, and in no test."
        if NOT_RUN in self.said:
            yield "--: not run."
        if self.printed:
            yield "paper: as printed by Zhang et al. (2022), means of 5 seeds; their N.A. has no stated rule."
        models = sorted({model_name(run) for cell in self.cells.values() for run in cell.runs})
        if len(models) <= 3:
            yield f"Model: {', '.join(models)}."


def paper_row(place: Place) -> str:
    """How a row of the paper is called beside ours."""
    name = METHODS[place.method]
    return f"{name} (structured), paper" if place.units != "weights" else f"{name}, paper"


# --- all tables -------------------------------------------------------------------------------------------------------


def layouts_for(runs: Sequence[Run]) -> list[tuple[Layout, list[Run]]]:
    """The paper's layouts that these runs fill, and a plain table for runs that none of them shows."""
    found = []
    shown: set[str] = set()
    plain = {(run.task, run.ratio) for run in runs if run.method == "platon" and "β" not in run.row}
    for layout in LAYOUTS:
        taken = [run for run in runs if layout.take(run)]
        needed = {(run.task, run.ratio) for run in taken if layout.needs(run)}
        if layout.name in ("variants", "structured", "betas"):  # beside what they vary, not a table of everything
            taken = [run for run in taken if (run.task, run.ratio) in needed]
        if layout.name != "betas":  # other β have a table of their own, where the usual ones are here
            taken = [run for run in taken if "β" not in run.row or (run.task, run.ratio) not in plain]
        if needed:
            found.append((layout, taken))
            shown |= {run.name for run in taken}
    left = [run for run in runs if run.name not in shown]
    return [*found, *([(ANY, left)] if left else [])]


def tables(runs: Runs, options: Options | None = None) -> list[Table]:
    """Every table of a folder: results in the paper's layouts, then the tests."""
    chosen = layouts_for(runs.runs)
    built = [_Builder(layout, taken, options or Options()).build() for layout, taken in chosen]
    tests = comparison(runs.runs)
    return [*built, *([tests] if tests is not None else [])]
