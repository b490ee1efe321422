"""The commands on a finished run's model: export it, and measure it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from platon.lab.errors import UserError
from platon.terminal import console, tell


class Format(StrEnum):
    """What `platon export` can write."""

    sparse = "sparse"
    onnx = "onnx"
    compact = "compact"


@contextmanager
def _for_the_user() -> Iterator[None]:
    """The sentences of deploy on bad values are for the user too."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    form: Annotated[Format, typer.Option("--format", help="what to write")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where to write it [dim]\\[RUN/FORMAT][/dim]")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="read the data for the check from here instead")] = None,
) -> None:
    """Write a run's model in a form that is smaller or runs elsewhere.

    [bold]sparse[/bold]   bits and values instead of zeros; `platon.load` reads it back bit for bit
    [bold]compact[/bold]  what structured pruning left, as smaller matrices; `platon.load` reads it
    [bold]onnx[/bold]     for ONNX Runtime, with any batch size and length; the compact model where there is one

    Example: [bold]platon export runs/sst2-platon-10-seed0 --format onnx[/bold]
    """
    from platon.deploy.storage import size_on_disk
    from platon.lab.record import read_record

    read_record(run)  # it is a finished run
    with _for_the_user():
        target = _WRITERS[form](run, output or run / form.value, data)
    before, size = size_on_disk(run / "model"), sum(path.stat().st_size for path in _weights(target))
    console.print(f"{size / 1e6:.2f} MB, {size / before:.1%} of {before / 1e6:.2f} MB: {escape(str(target))}")


def _first(run: Path, *names: str) -> Path:
    """The first of these folders that the run has; the last one otherwise."""
    return next((run / name for name in names if (run / name).exists()), run / names[-1])


def _weights(target: Path) -> Iterator[Path]:
    return target.glob("*.safetensors") if target.is_dir() else target.parent.glob(f"{target.name}*")


def _write_sparse(run: Path, target: Path, data: Path | None) -> Path:
    from platon.deploy.speed import opened
    from platon.deploy.storage import save

    return save(opened(run / "model"), target, sparse=True)


def _write_compact(run: Path, target: Path, data: Path | None) -> Path:
    from platon.deploy.shrink import shrink
    from platon.deploy.speed import opened
    from platon.lab.finished import reopen

    _, prepared, _ = reopen(run, data, eval_rows=8)
    found = shrink(opened(run / "model"), prepared.batch(), target, prepared.processor)
    console.print(f"{found['parameters']:,} parameters; largest difference of the outputs {found['difference']:.1e}")
    return target


def _write_onnx(run: Path, target: Path, data: Path | None) -> Path:
    from platon.deploy import onnx
    from platon.deploy.speed import opened
    from platon.lab.finished import reopen

    onnx.require()
    _, prepared, _ = reopen(run, data, eval_rows=8)
    file = target if target.suffix == ".onnx" else target / "model.onnx"
    found = onnx.export(opened(_first(run, "compact", "model")), file, [prepared.batch()])
    console.print(f"checked in ONNX Runtime; largest difference of the outputs {found.difference:.1e}")
    return file


_WRITERS = {Format.sparse: _write_sparse, Format.compact: _write_compact, Format.onnx: _write_onnx}


def speed(
    run: Annotated[Path, typer.Argument(help="run folder")],
    engine: Annotated[list[str], typer.Option(help="eager, compile, onnx or sparse; may be given several times")] = [  # noqa: B006
        "eager",
        "compile",
        "onnx",
    ],
    batch: Annotated[list[int], typer.Option(help="rows a batch; may be given several times")] = [1, 8],  # noqa: B006
    length: Annotated[list[int], typer.Option(help="tokens a row, for texts; may be given several times")] = [128],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="how often each model runs in each setting")] = 20,
    threads: Annotated[int | None, typer.Option(help="threads; torch's choice by default")] = None,
    metric: Annotated[bool, typer.Option(help="evaluate both models on the task, too")] = True,
    data: Annotated[Path | None, typer.Option(help="read the data from here instead")] = None,
) -> None:
    """Measure a run's model beside its dense twin: latency, throughput, size, memory, and the task's metric.

    The pruned model is the compact one, or the sparse one, where there is one. Without a dense twin, the model with its
    zeros takes its place: dense kernels take the same time whatever the values are.

    Example: [bold]platon speed runs/mrpc --engine eager --engine onnx --batch 8 --length 128[/bold]
    """
    measure_speed(run, data, tuple(engine), tuple(batch), tuple(length), rounds, threads, metric)
    console.print(f"{'record':8} {escape(str(run / 'speed.json'))}")
    console.print(f"{'figure':8} {escape(str(run / 'figures' / 'speed.png'))}")


def measure_speed(
    run: Path,
    data: Path | None,
    engines: tuple[str, ...],
    rows: tuple[int, ...],
    lengths: tuple[int, ...],
    rounds: int,
    threads: int | None,
    metric: bool,
) -> None:
    """Measure, write, draw and print."""
    from platon.deploy.speed import Setting, measure
    from platon.lab.finished import reopen
    from platon.lab.record import read_record, write_json
    from platon.report.speed import SPEED, draw_speed, tables

    read_record(run)
    with _for_the_user():
        setting = Setting(engines, rows, lengths, rounds, threads)
        _, prepared, evaluate_model = reopen(run, data)
        folders = {"dense": _first(run, "dense/model", "model"), "pruned": _first(run, "compact", "sparse", "model")}
        found = measure(folders, prepared.batch(), setting, evaluate_model if metric else None, tell)
    write_json(run / SPEED, found)
    draw_speed(run)
    for table in tables(found):
        console.print(table)
