"""Rows of the tables: a row is a method with its variant, the settings in which runs of one method differ."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from platon.report.run import Run

_SYMBOLS = {"beta1": "β1", "beta2": "β2"}
_IN_TITLE = {"units"}  # always part of a row's name if it is not the default


def assign_rows(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """The runs with their row and ratio, and a note for each method on the settings that its rows do not name."""
    by_share: dict[tuple[str, str, float | None], list[Run]] = defaultdict(list)
    for run in runs:
        by_share[run.title, run.task, run.setting("keep") if run.has_share else None].append(run)
    differing: dict[str, set[str]] = defaultdict(set)
    following: dict[str, set[str]] = defaultdict(set)
    for (title, _, _), found in by_share.items():
        names = _differing(found)
        unnamed = _following(found, names)
        differing[title] |= names - unnamed
        following[title] |= unnamed
    usual = {title: _usual([run for run in runs if run.title == title], names) for title, names in differing.items()}
    assigned = []
    for (title, _, keep), found in by_share.items():
        rows: dict[str, list[Run]] = defaultdict(list)
        for run in found:
            rows[_row_name(run, differing[title], usual[title])].append(run)
        for row, group in rows.items():
            ratio = _measured_ratio(group) if keep is None else float(keep)
            assigned += [replace(run, ratio=ratio, row=row) for run in group]
    notes = [
        f"where a row of {title} does not say it: {', '.join(_setting(name, value) for name, value in values.items())}"
        for title, values in usual.items()
        if values
    ]
    for title, names in following.items():
        unnamed = names - differing[title]
        if unnamed:
            notes.append(f"rows of {title} differ in {', '.join(sorted(unnamed))} as well")
    return assigned, notes


def _measured_ratio(runs: list[Run]) -> float:
    """1 for dense runs. A penalty's share is a result: the mean of the runs, rounded to a percent."""
    return 1.0 if runs[0].is_dense else round(sum(run.record["kept"] for run in runs) / len(runs), 2)


def _differing(runs: list[Run]) -> set[str]:
    """The settings that differ between runs of one method, task and share."""
    settings = [run.relevant() for run in runs]
    names = {name for one in settings for name in one} - _IN_TITLE
    found = {name for name in names if len({json.dumps(one.get(name)) for one in settings}) > 1}
    return {name for name in found if name not in ("model", "teacher") or not _goes_with_the_seed(runs, name)}


def _following(runs: list[Run], differing: set[str]) -> set[str]:
    """Settings of the training whose value follows from the method's own, as a learning rate chosen for each."""
    own = differing.intersection(*(run.record["method_settings"] for run in runs))

    def variants(names: set[str]) -> int:
        return len({json.dumps([run.relevant().get(name) for name in sorted(names)]) for run in runs})

    return {name for name in differing - own if own and variants(own | {name}) == variants(own)}


def _goes_with_the_seed(runs: list[Run], name: str) -> bool:
    """Whether each seed has a model (or teacher) of its own, all of one shape: then they are one variant."""
    by_seed: dict[int, set[Any]] = defaultdict(set)
    for run in runs:
        by_seed[run.seed].add(run.setting(name))
    shapes = {(run.record["parameters"]["prunable"], tuple(run.record["layers"])) for run in runs}
    return all(len(models) == 1 for models in by_seed.values()) and len(shapes) == 1


def _usual(runs: list[Run], names: set[str]) -> dict[str, Any]:
    """The most frequent value of each setting, which row names leave out.

    Of equally frequent values, `None` is left out, since it leaves the choice to the method; otherwise all are named.
    """
    found = {}
    for name in sorted(names):
        counts = Counter(json.dumps(run.relevant().get(name)) for run in runs)
        most = [value for value, count in counts.items() if count == max(counts.values())]
        if len(most) == 1 or "null" in most:
            found[name] = json.loads(most[0]) if len(most) == 1 else None
    return found


def _row_name(run: Run, differing: set[str], usual: dict[str, Any]) -> str:
    settings = run.relevant()
    named = [name for name in sorted(differing) if name not in usual or settings.get(name) != usual[name]]
    units = [] if run.is_dense or run.setting("units") in (None, "weights") else [run.setting("units")]
    details = [*units, *(_setting(name, settings.get(name)) for name in named)]
    return run.title + (f" ({', '.join(details)})" if details else "")


def _setting(name: str, value: Any) -> str:
    shown = "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{_SYMBOLS.get(name, name)} {shown}"
