"""The commands on a finished run's model: `eval`, `export` and `speed`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from platon.cli.terminal import console, show_progress
from platon.lab.errors import UserError

#: `compile` is left out: it compiles every model for every shape, which takes minutes
ENGINES = ["eager", "onnx", "sparse"]


class Format(StrEnum):
    """What `platon export` can write."""

    sparse = "sparse"
    onnx = "onnx"
    compact = "compact"


@contextmanager
def _as_user_error() -> Iterator[None]:
    """Show the messages of `platon.deploy` about wrong values to the user, without a traceback."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def evaluate(
    run: Annotated[Path, typer.Argument(help="run folder")],
    data: Annotated[
        Path | None, typer.Option(help="evaluate on this data instead; of a single file, every row")
    ] = None,
) -> None:
    """Evaluate a run's model again, and compare with its record."""
    from platon.lab.record import read_record

    read_record(run)  # before torch is imported, for a quick answer to a wrong path
    from platon.lab.finished import reopen

    record, prepared, measure = reopen(run, data)
    table = Table(title=f"{record['task']}, {record['method']}", title_justify="left")
    for name in ("split", "rows", "metric", "now", "recorded"):
        table.add_column(name, justify="left" if name in ("split", "metric") else "right")
    for split, metrics in measure(prepared.build()).items():
        rows = f"{prepared.counts[split]:,}"
        for metric, value in metrics.items():
            before = record["results"].get(split, {}).get(metric)
            recorded = "--" if before is None else f"{100 * before:.2f} %"
            table.add_row(split, rows, metric, f"{100 * value:.2f} %", recorded)
    console.print(table)


def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    form: Annotated[Format, typer.Option("--format", help="what to write")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where to write it [dim]\\[RUN/FORMAT][/dim]")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="read the data for the check from here instead")] = None,
) -> None:
    """Write a run's model in a form that is smaller or runs elsewhere, with its tokenizer or image processor.

    [bold]sparse[/bold]   bits and values instead of zeros; `platon.load` reads it back bit for bit
    [bold]compact[/bold]  what structured pruning left, as smaller matrices; `platon.load` reads it
    [bold]onnx[/bold]     for ONNX Runtime, with any batch size and length; the compact model where there is one

    Example: [bold]platon export runs/sst2-platon-10-seed0 --format onnx[/bold]
    """
    from platon.lab.folder import RunFolder
    from platon.lab.record import read_record

    if output is None:
        RunFolder(run).refuse_links()
    read_record(run)  # before torch is imported, for a quick answer to a wrong path
    from platon.deploy.storage import size_on_disk

    with _as_user_error():
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
    from platon.lab.tasks.model import saved_processor

    return save(opened(run / "model"), target, sparse=True, processor=saved_processor(run / "model"))


def _write_compact(run: Path, target: Path, data: Path | None) -> Path:
    from platon.deploy.shrink import shrink
    from platon.deploy.speed import opened
    from platon.lab.finished import reopen

    prepared = reopen(run, data, eval_rows=8).prepared
    found = shrink(opened(run / "model"), prepared.batch(), target, prepared.processor)
    console.print(f"{found['parameters']:,} parameters; largest difference of the outputs {found['difference']:.1e}")
    return target


def _write_onnx(run: Path, target: Path, data: Path | None) -> Path:
    from platon.deploy import onnx
    from platon.deploy.speed import opened
    from platon.lab.finished import reopen

    onnx.require()
    prepared = reopen(run, data, eval_rows=8).prepared
    file = target if target.suffix == ".onnx" else target / "model.onnx"
    found = onnx.export(opened(_first(run, "compact", "model")), file, [prepared.batch()])
    console.print(f"checked in ONNX Runtime; largest difference of the outputs {found.difference:.1e}")
    if file == target:  # a file of the user's choice, perhaps among other files
        console.print(f"tokenizer or image processor: {escape(str(run / 'model'))}")
    elif prepared.processor is not None:
        prepared.processor.save_pretrained(target)
    return file


_WRITERS = {Format.sparse: _write_sparse, Format.compact: _write_compact, Format.onnx: _write_onnx}


def speed(
    run: Annotated[Path, typer.Argument(help="run folder")],
    engine: Annotated[
        list[str], typer.Option(help="eager, compile, onnx or sparse; may be given several times")
    ] = ENGINES,
    batch: Annotated[list[int], typer.Option(help="rows in a batch; may be given several times")] = [1, 8],  # noqa: B006
    length: Annotated[list[int], typer.Option(help="tokens in a row, for texts; may be given several times")] = [128],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="how often each model runs in each setting")] = 20,
    threads: Annotated[int | None, typer.Option(help="threads; torch's choice by default")] = None,
    metric: Annotated[bool, typer.Option(help="evaluate both models on the task, too")] = True,
    data: Annotated[Path | None, typer.Option(help="read the data from here instead")] = None,
) -> None:
    """Measure a run's model beside its dense twin: latency, throughput, size, memory, and the task's metric.

    The pruned model is the compact one, or the sparse one, where there is one. Without a dense twin, the model with its
    zeros takes its place: dense kernels take the same time whatever the values are. The engine sparse is compared with
    the dense model in eager PyTorch.

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
    from platon.lab.folder import RunFolder
    from platon.lab.record import read_record, write_json

    RunFolder(run).refuse_links()  # speed.json and figures/ are written
    read_record(run)  # before torch is imported, for a quick answer to a wrong path
    from platon.deploy.speed import Setting, measure
    from platon.lab.finished import reopen
    from platon.report.speed import SPEED, draw_speed, tables

    with _as_user_error():
        setting = Setting(engines, rows, lengths, rounds, threads)
        _, prepared, evaluate_model = reopen(run, data, eval_rows=None if metric else 8)
        folders = {"dense": _first(run, "dense/model", "model"), "pruned": _first(run, "compact", "sparse", "model")}
        found = measure(folders, prepared.batch(), setting, evaluate_model if metric else None, show_progress)
    write_json(run / SPEED, found)
    draw_speed(run)
    for table in tables(found):
        console.print(table)
