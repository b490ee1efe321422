"""A sweep from file to records: what it will take, then the runs, with a board to watch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from platon.lab.board import Board, in_words
from platon.lab.crew import CREWS
from platon.lab.record import read_record
from platon.lab.sweep import Job, claimed, read


def run(source: str, folder: Path, workers: int, engine: str, dry: bool, estimate: bool, console: Console) -> int:
    """All runs of a sweep that are not finished; returns how many failed."""
    jobs = read(source, folder)
    todo = [job for job in jobs if not job.finished]
    console.print(f"{len(jobs)} runs in {escape(str(folder))}, {len(jobs) - len(todo)} of them finished")
    seconds = _expected(jobs, todo, workers, console) if estimate and todo else {}
    if dry:
        for job in todo:
            console.print(f"  {escape(job.name)}", style="dim")
        return 0
    with claimed(folder):
        board = Board(jobs, workers, seconds)
        with (
            Live(board, console=console, refresh_per_second=2),
            closing(CREWS[engine](todo, folder, workers)) as events,
        ):
            for event in events:
                if event is not None:
                    board.take(event)
                    if not console.is_terminal and event.what != "started":
                        console.print(f"{event.what} {escape(event.job.name)} {escape(event.why)}".rstrip())
        return len(board.failed)


def _expected(jobs: Sequence[Job], todo: Sequence[Job], workers: int, console: Console) -> dict[Job, float]:
    """Runs × steps × seconds a step, by kind of run: from records where there are such, else from a few steps."""
    from platon.lab.run import trial

    known: dict[tuple[object, ...], tuple[int, float]] = {}
    for job in jobs:
        if job.finished:
            record = read_record(job.folder)
            total = record["plan"]["total"]
            known[_kind(job)] = (total, record["seconds"] / total)
    found: dict[Job, float] = {}
    for job in todo:
        kind = _kind(job)
        if kind not in known:
            known[kind] = trial(job.sourced)
        steps, step = known[kind]
        found[job] = steps * step
    kinds = {_kind(job): [other for other in todo if _kind(other) == _kind(job)] for job in todo}
    for kind, same in kinds.items():
        steps, step = known[kind]
        console.print(f"  {escape(same[0].sourced.settings.task)}: {len(same)} runs × {steps:,} steps × {step:.3g} s")
    total = sum(found.values()) / workers
    console.print(f"about {in_words(total)} with {workers} at a time, evaluation not counted")
    return found


def _kind(job: Job) -> tuple[object, ...]:
    """What decides how long a step takes and how many there are, near enough."""
    s = job.sourced.settings
    return (s.task, s.model, s.batch, s.max_length, s.image_size, s.steps, s.epochs, s.train_rows)
