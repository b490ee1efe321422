"""Running a sweep: estimate the time, then run the trials that are not finished, with a display of their progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from platon.lab.claim import locked
from platon.lab.duration import in_words
from platon.lab.record import read_record
from platon.lab.sweep.display import Display
from platon.lab.sweep.spec import Trial, read
from platon.lab.sweep.workers import WORKERS

LOCK = ".sweep.lock"


def run(source: str, folder: Path, workers: int, engine: str, dry: bool, estimate: bool, console: Console) -> int:
    """Run all trials of a sweep that are not finished; returns how many failed.

    Args:
        source: a sweep file, or the name of a packaged sweep.
        folder: where the run folders are.
        workers: how many trials run at the same time.
        engine: "local" or "ray".
        dry: only print what would run.
        estimate: measure a few steps of each kind of trial first, to tell the time.
        console: where to print.
    """
    trials = read(source, folder)
    todo = [trial for trial in trials if not trial.is_finished]
    console.print(f"{len(trials)} runs in {escape(str(folder))}, {len(trials) - len(todo)} of them finished")
    seconds = _expected(trials, todo, workers, console) if estimate and todo else {}
    if dry:
        for trial in todo:
            console.print(f"  {escape(trial.name)}", style="dim")
        return 0
    with claimed(folder):
        display = Display(trials, workers, seconds)
        with (
            Live(display, console=console, refresh_per_second=2),
            closing(WORKERS[engine](todo, folder, workers)) as events,
        ):
            for event in events:
                if event is not None:
                    display.update(event)
                    if not console.is_terminal and event.what != "started":
                        console.print(f"{event.what} {escape(event.trial.name)} {escape(event.why)}".rstrip())
                        console.print(f"  {display.summary}", style="dim")
        return len(display.failed)


def claimed(folder: Path) -> AbstractContextManager[None]:
    """Hold the folder: one sweep at a time."""
    return locked(folder / LOCK, f"another sweep works on {str(folder)!r}; wait for it or choose another --output")


def _expected(trials: Sequence[Trial], todo: Sequence[Trial], workers: int, console: Console) -> dict[Trial, float]:
    """The seconds of each trial: steps × seconds a step, from the record of a similar trial or from a few steps."""
    from platon.lab.timing import measure_step

    known: dict[tuple[object, ...], tuple[int, float]] = {}
    for trial in trials:
        if trial.is_finished:
            record = read_record(trial.folder)
            total = record["plan"]["total"]
            known[_kind(trial)] = (total, record["seconds"] / max(total, 1))
    found: dict[Trial, float] = {}
    for trial in todo:
        kind = _kind(trial)
        if kind not in known:
            at_once = trial.resolved.settings.steps == 0
            known[kind] = (0, 0.0) if at_once else measure_step(trial.resolved)
        steps, step = known[kind]
        found[trial] = steps * step
    kinds = {_kind(trial): [other for other in todo if _kind(other) == _kind(trial)] for trial in todo}
    for kind, same in kinds.items():
        steps, step = known[kind]
        console.print(f"  {escape(same[0].resolved.settings.task)}: {len(same)} runs × {steps:,} steps × {step:.3g} s")
    total = sum(found.values()) / workers
    console.print(f"about {in_words(total)} with {workers} at a time, evaluation not counted")
    return found


def _kind(trial: Trial) -> tuple[object, ...]:
    """The settings that mostly decide how many steps a trial has and how long one takes."""
    s = trial.resolved.settings
    return (s.task, s.model, s.batch, s.max_length, s.image_size, s.steps, s.epochs, s.train_rows)
