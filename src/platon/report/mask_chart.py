"""How masks change over a training, and which share of each matrix is kept, from the probe files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from platon.lab.percent import percent
from platon.report.cell import by_row, by_task_and_ratio
from platon.report.chart import Chart, HeatMap
from platon.report.curve import per_step
from platon.report.layer import layer_table
from platon.report.run import Run
from platon.report.score_chart import described
from platon.report.statistics import mean
from platon.report.table import Spans, Table, plain_row
from platon.report.task import task_title

BINS = 40


def mask_changes(run: Run) -> list[tuple[float, float, float]]:
    """(last step, removed, returned) in bins of equal length: units pruned and units that came back, % of all."""
    changes = run.probe.changes
    if not changes:
        return []
    width = max(change.step for change in changes) / BINS
    width = max(width, *(change.step - change.since for change in changes))
    bins: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for change in changes:
        place = int((change.step - 1) / width)
        bins[place][0] += 100 * change.removed
        bins[place][1] += 100 * change.returned
    return [((place + 1) * width, removed, returned) for place, (removed, returned) in sorted(bins.items())]


def churn(runs: Sequence[Run]) -> list[Chart]:
    """How much of the mask comes back after it was pruned, over the training."""

    def read(run: Run) -> list[tuple[float, float]]:
        return [(round(step, 2), returned) for step, _, returned in mask_changes(run)]

    pruned = [run for run in runs if not run.is_dense]
    return per_step(pruned, "churn", "how much of the mask comes back", "units that came back, % of all", read)


def churn_table(runs: Sequence[Run]) -> Table | None:
    """How much of the mask was pruned and came back over the whole training; `None` without probe files."""
    body: list[tuple[Spans, ...]] = []
    rules = set()
    for (task, ratio), found in by_task_and_ratio(runs):
        first = len(body)
        for row, seeds in by_row(found).items():
            sums = [[sum(part) for part in zip(*seen, strict=True)] for run in seeds if (seen := mask_changes(run))]
            if sums:
                removed, returned = mean([one[1] for one in sums]), mean([one[2] for one in sums])
                numbers = f"{removed:.2f}", f"{returned:.2f}", str(len(sums))
                body.append(plain_row([task_title(task), percent(ratio, None), row, *numbers]))
        if len(body) > first:
            rules.add(first)
    if not body:
        return None
    head = ("Task", "Ratio", "Method", "Left the mask, %", "Came back, %", "Runs")
    notes = ("Percent of all units, added up over the measurements of a training, mean over seeds.",)
    return Table("churn", "How often masks change", head, tuple(body), 3, frozenset(rules - {0}), notes)


def heat_maps(runs: Sequence[Run]) -> list[HeatMap]:
    """The share kept by layer and matrix over the training: for each task and row the run with the fewest weights."""
    maps = []
    for task in dict.fromkeys(run.task for run in runs):
        rows = by_row(run for run in runs if run.task == task)
        for number, found in enumerate(sorted(rows.values(), key=lambda found: found[0].method != "platon")):
            run = min(found, key=lambda run: (run.ratio, run.seed, run.name))
            if run.probe.layers:
                maps.append(_heat_map(f"layers-{task}-{number}", run))
    return maps


def _heat_map(name: str, run: Run) -> HeatMap:
    steps = sorted(run.probe.layers)
    tables = [layer_table(run.probe.layers[step]) for step in steps]
    rows, columns, _ = tables[0]
    panels = []
    for column in columns:
        values = tuple(
            tuple(None if (share := shares.get((row, column))) is None else 100 * share for _, _, shares in tables)
            for row in rows
        )
        panels.append((column, values))
    title = f"{task_title(run.task)}: share kept by layer and matrix ({described(run)})"
    return HeatMap(name, title, tuple(steps), tuple(rows), tuple(panels))
