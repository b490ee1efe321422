"""Reads every run below a folder. Runs that cannot be counted are left out, and a note says which and why."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from platon.lab.record import RunFolder, UserError
from platon.report.paper import method_order
from platon.report.record import OLD_METHOD_SETTINGS, load_record
from platon.report.row import assign_rows
from platon.report.run import Run
from platon.report.task import task_order


@dataclass(frozen=True)
class Runs:
    """The runs that count, sorted, and notes on the others."""

    folder: Path
    runs: tuple[Run, ...]
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(run.task for run in self.runs))


def read_runs(folder: Path) -> Runs:
    """Every finished run at or below the folder; a `UserError` if there is none."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {str(folder)!r}; give a run folder, or one with run folders in it")
    notes: list[str] = []
    found: list[Run] = []
    unfinished: list[str] = []
    for run in RunFolder.below(folder):
        name = run.path.relative_to(folder).as_posix()
        if not run.is_finished:
            unfinished.append(name)
            continue
        try:
            record = load_record(run.path)
        except UserError as error:
            notes.append(f"left out: {error}")
            continue
        found.append(Run(run.path, name, record, twin=run.is_twin))
    if not found:
        why = f"; {notes[0]}" if notes else ": there is no record.json at or below it"
        raise UserError(f"{str(folder)!r} holds no finished run{why}; `platon prune` or `platon sweep` leave some")
    if unfinished:
        shown = ", ".join(unfinished[:5]) + (", …" if len(unfinished) > 5 else "")
        notes.append(f"not finished, so not counted: {len(unfinished)} of the runs ({shown})")
    runs, more = assign_rows(_without_copies(_with_unread(found), notes))
    if not runs:
        raise UserError(f"{str(folder)!r} holds no run that counts; {'; '.join(notes)}")
    notes += [*more, *_data_notes(runs)]
    return Runs(folder, tuple(sorted(runs, key=_order)), tuple(notes))


def _with_unread(runs: list[Run]) -> list[Run]:
    """Tell each run which settings only other methods read. Every record holds the settings of all methods."""
    known = {name for settings in OLD_METHOD_SETTINGS.values() for name in settings}
    known |= {name for run in runs for name in run.record["method_settings"]}
    return [replace(run, unread=frozenset(known - set(run.record["method_settings"]))) for run in runs]


def _without_copies(found: Iterable[Run], notes: list[str]) -> list[Run]:
    """Each run once. Of runs with the same settings, seed and results one counts; if the results differ, none does."""
    same: dict[str, list[Run]] = defaultdict(list)
    for run in found:
        keep = run.setting("keep") if run.has_share else None
        same[json.dumps([run.task, run.method, keep, run.seed, run.relevant()], sort_keys=True)].append(run)
    kept = []
    for copies in same.values():
        runs = [run for run in copies if not run.twin] or copies  # a dense run goes before the dense twins of others
        names = ", ".join(run.name for run in runs)
        if len(runs) == 1 or all(run.record["results"] == runs[0].record["results"] for run in runs):
            kept.append(runs[0])
            if len(runs) > 1 and not runs[0].twin:
                notes.append(f"the same run {len(runs)} times, counted once: {names}")
        elif runs[0].twin:
            kept.append(runs[0])
            notes.append(
                f"dense twins with the same settings and seed differ in their results, the first counts: {names}"
            )
        else:
            notes.append(f"left out: runs with the same settings and seed differ in their results: {names}")
    return kept


def _data_notes(runs: list[Run]) -> list[str]:
    """Notes on runs of one task with other data, and on runs made by several versions; both are shown together."""
    notes = []
    for task in dict.fromkeys(run.task for run in runs):
        fingerprints = {run.record.get("data", {}).get("fingerprint") for run in runs if run.task == task}
        if len(fingerprints) > 1:
            notes.append(f"the runs of {task} were trained or measured on {len(fingerprints)} different sets of rows")
    versions = {json.dumps(run.record.get("versions", {}).get("platon")) for run in runs}
    if len(versions) > 1:
        notes.append(f"the runs were made by {len(versions)} versions of platon: {', '.join(sorted(versions))}")
    return notes


def _order(run: Run) -> tuple[object, ...]:
    return task_order(run.task), -run.ratio, method_order(run.method), run.row, run.seed, run.name
