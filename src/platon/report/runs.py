"""The runs of a folder: read from their records, told apart by what differs between them, never mixed silently.

A *row* of a table is a method with its variant: the settings in which runs of one method, task and share differ. What a
run cannot contribute (half a record, one of a newer version, the same run twice) is left out and named in a note.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from platon.lab.record import PROBE, RECORD, UserError, read_history, read_record

METHODS = {
    "dense": "Dense",
    "l0": "ℓ0 regularisation",
    "magnitude": "Magnitude",
    "movement": "Movement",
    "soft-movement": "Soft-Movement",
    "sensitivity": "S = Ī",
    "uncertainty": "S = Ū",
    "ratio": "S = Ī / Ū",
    "platon": "PLATON",
}
FAMILY: tuple[str, ...] = (
    "platon",
    "sensitivity",
    "uncertainty",
    "ratio",
)  # PLATON and its ablations; the rest are baselines
_PENALISED: tuple[str, ...] = ("soft-movement", "l0")
_LEARNED = ("movement", *_PENALISED)
# What runs may differ in and still be the same: where things lie, and what is written how often.
_ASIDE = {"task", "method", "keep", "seed", "data", "eval_batch", "log_every", "checkpoint_every", "checkpoints"}
_ASIDE |= {"report_to", "trust_remote_code"}
# Settings that only some methods read.
_ONLY: dict[str, tuple[str, ...]] = {"exponent": ("platon",), "tau": ("soft-movement",)}
_ONLY |= dict.fromkeys(("beta1", "beta2", "window", "timing"), FAMILY)
_ONLY |= dict.fromkeys(("score_learning_rate", "score_init"), _LEARNED)
_ONLY |= dict.fromkeys(("penalty", "min_keep_per_matrix"), _PENALISED)
_PRUNING = {"units", "dense", "warmup", "cooldown", "every", "scope", "block_rows", "block_columns", "reference_steps"}
_SHORT = {"beta1": "β1", "beta2": "β2"}
_NO_RUNS = {"model", "checkpoints", "figures", "report"}

Number = tuple[str, str]  # split and metric


@dataclass(frozen=True)
class Run:
    """One finished run.

    Args:
        folder: where it is.
        name: its folder as seen from the folder that is reported.
        record: what it left.
        ratio: the share kept that it counts for; 1 for a dense model.
        row: method and variant, as tables name them.
        twin: the dense twin inside another run's folder.
    """

    folder: Path
    name: str
    record: dict[str, Any] = field(repr=False)
    ratio: float = 1.0
    row: str = ""
    twin: bool = False

    @property
    def task(self) -> str:
        """As the record names it."""
        return str(self.record["task"])

    @property
    def method(self) -> str:
        """As the record names it."""
        return str(self.record["method"])

    @property
    def seed(self) -> int:
        """Of everything random."""
        return int(self.setting("seed"))

    @property
    def converged(self) -> bool:
        """By our rule, which the run itself applied."""
        return self.record["not_converged"] is None

    @property
    def numbers(self) -> dict[Number, float]:
        """Every metric of every split, in percent."""
        return {(s, name): 100 * value for s, found in self.record["results"].items() for name, value in found.items()}

    @property
    def headline(self) -> Number:
        """The number that chose the best model."""
        return next(iter(self.record["results"])), self.record["metrics"][0]

    def setting(self, name: str) -> Any:
        """A setting's value; `None` where the run is older than the setting."""
        return self.record["settings"].get(name, {}).get("value")

    def relevant(self) -> dict[str, Any]:
        """The settings that decide this run's result, beside task, method, share and seed."""
        values = {name: said["value"] for name, said in self.record["settings"].items() if name not in _ASIDE}
        values = {name: value for name, value in values.items() if self.method in _ONLY.get(name, (self.method,))}
        if self.method == "dense":
            values = {name: value for name, value in values.items() if name not in _PRUNING}
        elif self.setting("units") != "blocks":
            values = {name: value for name, value in values.items() if not name.startswith("block_")}
        return values

    def probe(self) -> list[dict[str, Any]]:
        """The lines that the probe wrote."""
        return read_history(self.folder, PROBE)

    def history(self) -> list[dict[str, Any]]:
        """The lines that the training wrote."""
        return read_history(self.folder)


@dataclass(frozen=True)
class Runs:
    """All runs of a folder that count, in a fixed order, and what is to be said about the others."""

    folder: Path
    runs: tuple[Run, ...]
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[Run]:
        """The runs."""
        return iter(self.runs)

    @property
    def tasks(self) -> list[str]:
        """In order of first appearance."""
        return list(dict.fromkeys(run.task for run in self.runs))


def read_runs(folder: Path) -> Runs:
    """Every run at or below the folder; a sentence if there is none."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {str(folder)!r}; give a run folder, or one with run folders in it")
    notes: list[str] = []
    found: list[Run] = []
    unfinished: list[str] = []
    for place in _places(folder):
        name = place.relative_to(folder).as_posix()
        if not (place / RECORD).exists():
            unfinished.append(name)
            continue
        try:
            record = read_record(place)
            _check(record, place)
        except UserError as error:
            notes.append(f"left out: {error}")
            continue
        inside = any((place.parent / own).exists() for own in (RECORD, "run.json"))
        found.append(Run(place, name, record, twin=place.name == "dense" and inside))
    if not found:
        why = f"; {notes[0]}" if notes else ": there is no record.json at or below it"
        raise UserError(f"{str(folder)!r} holds no finished run{why}; `platon prune` or `platon sweep` leave some")
    if unfinished:
        shown = ", ".join(unfinished[:5]) + (", …" if len(unfinished) > 5 else "")
        notes.append(f"not finished, so not counted: {len(unfinished)} of the runs ({shown})")
    runs = _placed(_once(found, notes), notes)
    if not runs:
        raise UserError(f"{str(folder)!r} holds no run that counts; {'; '.join(notes)}")
    notes += _data_notes(runs)
    return Runs(folder, tuple(sorted(runs, key=_order)), tuple(notes))


def _places(folder: Path) -> Iterator[Path]:
    """Folders that hold a run, finished or not, from top to bottom in the order of their names."""
    for place, names, files in os.walk(folder):
        names[:] = sorted(n for n in names if n not in _NO_RUNS and not n.startswith((".", "best-")))
        if {RECORD, "run.json"} & set(files):
            yield Path(place)


def _check(record: dict[str, Any], place: Path) -> None:
    """That everything is there which tables read: half a record is no record."""
    try:
        texts = isinstance(record["task"], str) and isinstance(record["method"], str)
        settings = all("value" in said for said in record["settings"].values())
        values = [value for found in record["results"].values() for value in found.values()]
        numbers = bool(values) and all(isinstance(value, int | float) and math.isfinite(value) for value in values)
        headline = record["results"][next(iter(record["results"]))][record["metrics"][0]]
        whole = texts and settings and numbers and headline is not None
        whole = whole and isinstance(record["settings"]["seed"]["value"], int)
        whole = whole and isinstance(record["kept"], int | float) and "not_converged" in record
        whole = whole and isinstance(record["layers"], dict) and isinstance(record["parameters"]["prunable"], int)
    except (KeyError, TypeError, AttributeError, IndexError, StopIteration):
        whole = False
    if not whole:
        raise UserError(f"{str(place / RECORD)!r} is half a record: something that tables read is missing in it")


def _once(found: Iterable[Run], notes: list[str]) -> list[Run]:
    """Each run once: of equals the first counts, and of runs that should be equal but are not, none does."""
    same: dict[str, list[Run]] = defaultdict(list)
    for run in found:
        keep = None if run.method == "dense" or run.record["decided_by"] == "penalty" else run.setting("keep")
        same[json.dumps([run.task, run.method, keep, run.seed, run.relevant()], sort_keys=True)].append(run)
    kept = []
    for runs in same.values():
        own = [run for run in runs if not run.twin] or runs  # a dense run of its own goes before the twins of others
        names = ", ".join(run.name for run in own)
        if len(own) == 1 or all(run.record["results"] == own[0].record["results"] for run in own):
            kept.append(own[0])
            if len(own) > 1 and not own[0].twin:
                notes.append(f"the same run {len(own)} times, counted once: {names}")
        elif own[0].twin:
            kept.append(own[0])
            notes.append(
                f"dense twins with the same settings and seed differ in their results, the first counts: {names}"
            )
        else:
            notes.append(f"left out: runs with the same settings and seed differ in their results: {names}")
    return kept


def _placed(runs: list[Run], notes: list[str]) -> list[Run]:
    """Give every run its ratio and its row."""
    cells: dict[tuple[str, str, float | None], list[Run]] = defaultdict(list)
    for run in runs:
        fixed = run.method != "dense" and run.record["decided_by"] != "penalty"
        cells[run.method, run.task, run.setting("keep") if fixed else None].append(run)
    differing: dict[str, set[str]] = defaultdict(set)
    for (method, _, _), cell in cells.items():
        differing[method] |= set(_differing(cell))
    placed = []
    usual = {
        method: _usual([run for run in runs if run.method == method], names) for method, names in differing.items()
    }
    for (method, _, keep), cell in cells.items():
        groups: dict[str, list[Run]] = defaultdict(list)
        for run in cell:
            groups[_label(run, differing[method], usual[method])].append(run)
        for label, group in groups.items():
            ratio = keep
            if ratio is None:  # a penalty's share is a result: that of the group, to the nearest per cent
                ratio = 1.0 if method == "dense" else round(sum(run.record["kept"] for run in group) / len(group), 2)
            placed += [replace(run, ratio=float(ratio), row=label) for run in group]
    for method, values in usual.items():
        if values:
            said = ", ".join(f"{_SHORT.get(name, name)} {_word(value)}" for name, value in values.items())
            notes.append(f"where a row of {METHODS.get(method, method)} does not say it: {said}")
    return placed


def _usual(runs: list[Run], names: set[str]) -> dict[str, Any]:
    """Values that more runs have than any other: a row need not say them."""
    found = {}
    for name in sorted(names - {"units"}):
        counts = Counter(json.dumps(run.relevant().get(name)) for run in runs)
        most = [value for value, count in counts.items() if count == max(counts.values())]
        if len(most) == 1 or "null" in most:  # the method's own choice says nothing, so it goes unsaid
            found[name] = json.loads(most[0]) if len(most) == 1 else None
    return found


def _label(run: Run, names: set[str], usual: dict[str, Any]) -> str:
    """Method and variant."""
    said = run.relevant()
    told = [name for name in sorted(names - {"units"}) if name not in usual or said.get(name) != usual[name]]
    units = [] if run.method == "dense" or run.setting("units") in (None, "weights") else [run.setting("units")]
    more = [*units, *(f"{_SHORT.get(name, name)} {_word(said.get(name))}" for name in told)]
    return METHODS.get(run.method, run.method) + (f" ({', '.join(more)})" if more else "")


def _differing(cell: list[Run]) -> list[str]:
    """The settings that tell runs of one method, task and share apart, beside the seed."""
    said = [run.relevant() for run in cell]
    names = sorted({name for one in said for name in one})
    found = [name for name in names if len({json.dumps(one.get(name)) for one in said}) > 1]
    if "model" in found:
        # One model a seed, all alike: each seed starts from its own dense model.
        by_seed: dict[int, set[Any]] = defaultdict(set)
        for run in cell:
            by_seed[run.seed].add(run.setting("model"))
        shapes = {(run.record["parameters"]["prunable"], tuple(run.record["layers"])) for run in cell}
        if all(len(models) == 1 for models in by_seed.values()) and len(shapes) == 1:
            found.remove("model")
    return found


def _word(value: Any) -> str:
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _data_notes(runs: list[Run]) -> list[str]:
    """Runs of one task on other rows, or with other versions, are shown together, and it is said."""
    notes = []
    for task in dict.fromkeys(run.task for run in runs):
        prints = {run.record.get("data", {}).get("fingerprint") for run in runs if run.task == task}
        if len(prints) > 1:
            notes.append(f"the runs of {task} were trained or measured on {len(prints)} different sets of rows")
    versions = {json.dumps(run.record.get("versions", {}).get("platon")) for run in runs}
    if len(versions) > 1:
        notes.append(f"the runs were made by {len(versions)} versions of platon: {', '.join(sorted(versions))}")
    return notes


def _order(run: Run) -> tuple[Any, ...]:
    return task_order(run.task), -run.ratio, row_order(run.method, run.row), run.seed, run.name


_TASKS = ("mnli", "rte", "qnli", "mrpc", "qqp", "sst2", "cola", "stsb", "squad", "cifar100", "imagenet")


def task_order(task: str) -> tuple[int, str]:
    """The paper's tasks first, in its order."""
    return (_TASKS.index(task) if task in _TASKS else len(_TASKS)), task


def row_order(method: str, row: str) -> tuple[int, str]:
    """Dense, the baselines, the ablations, PLATON last: the paper's order; unknown methods before the ablations."""
    names = list(METHODS)
    return (2 * names.index(method) if method in names else 2 * names.index("sensitivity") - 1), row
