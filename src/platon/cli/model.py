"""The commands on any model, a run's or another: `eval`, `export` and `speed`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from platon.cli.option import Column, Data, Named, TaskName
from platon.cli.terminal import console, show_progress
from platon.lab.errors import UserError
from platon.lab.measure import Measure
from platon.lab.percent import percent
from platon.lab.source import Source, find_source

#: `compile` is left out: it compiles every model for every shape, which takes minutes
ENGINES = ["eager", "sparse", "onnx", "onnx-int8", "openvino", "openvino-int8", "torch-int8"]


class Format(StrEnum):
    """What `platon export` can write."""

    sparse = "sparse"
    compact = "compact"
    fast = "fast"
    onnx = "onnx"


@contextmanager
def _as_user_error() -> Iterator[None]:
    """Show the messages of `platon.deploy` about wrong values to the user, without a traceback."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def _checked(model: str, task: str | None, data: Path | None, **columns: Any) -> Source:
    """The model that a command names, once its task, data and columns are known to be there; torch is not imported."""
    from platon.lab.tasks import Request, find

    source = find_source(model)
    record = source.record
    name = task or (None if record is None else record["task"])
    if name is not None:
        find(name).check_paths(Request(data=data, **columns))
    elif data is not None:
        raise UserError(f"{model!r} is no run, so it does not say its task; give --task (`platon list tasks`)")
    return source


def evaluate(
    model: Named,
    task: TaskName = None,
    data: Data = None,
    text_column: Column = None,
    second_column: Column = None,
    label_column: Column = None,
) -> None:
    """Evaluate a model on its task; a run's beside what it recorded.

    Example: [bold]platon eval my-model --task text --data new-reviews.csv[/bold]
    """
    columns: dict[str, Any] = {
        "text_column": text_column,
        "second_column": second_column,
        "label_column": label_column,
    }
    source = _checked(model, task, data, **columns)
    if source.run is None and task is None:
        raise UserError(f"{model!r} is no run, so it does not say its task; give --task (`platon list tasks`)")
    from platon.lab.finished import open_source

    record, prepared, measure = open_source(source, task, data, **columns)
    title = f"{task}, {model}" if record is None else f"{record['task']}, {record['method']}"
    table = Table(title=escape(title), title_justify="left")
    for name in ("split", "rows", "metric", "now", *(() if record is None else ("recorded",))):
        table.add_column(name, justify="left" if name in ("split", "metric") else "right")
    for split, metrics in measure(prepared.build()).items():
        rows = f"{prepared.counts[split]:,}"
        for metric, value in metrics.items():
            before = [] if record is None else [_shown(metric, record["results"].get(split, {}).get(metric))]
            table.add_row(split, rows, metric, _shown(metric, value), *before)
    console.print(table)


def _shown(metric: str, value: float | None) -> str:
    return "--" if value is None else Measure(metric).text(value)


def export(
    model: Named,
    form: Annotated[Format, typer.Option("--format", help="what to write")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="where to write it [dim]\\[RUN/FORMAT, or MODEL-FORMAT][/dim]"),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="sparse, fast: float16 rounds matrices to half the bytes")
    ] = "float32",
    embeddings: Annotated[
        str | None, typer.Option(metavar="NAME", help="sparse, fast: int8 rounds embeddings to a quarter")
    ] = None,
    task: TaskName = None,
    data: Data = None,
) -> None:
    """Write a model in a form that is smaller, faster, or runs elsewhere, with its tokenizer or image processor.

    [bold]sparse[/bold]   bits and values instead of zeros: the same model, bit for bit
    [bold]compact[/bold]  smaller matrices: what structured pruning left
    [bold]fast[/bold]     layers that skip zeros on a CPU
    [bold]onnx[/bold]     for ONNX Runtime and Optimum, any batch size and length

    `platon.load` opens all but the last. It is checked on the data of the run or of --task, otherwise on a few
    sentences or random pixels. Of a run, fast and onnx start from its compact model, where it has one.

    Example: [bold]platon export runs/sst2-platon-10-seed0 --format onnx[/bold]
    """
    source = _checked(model, task, data)
    if source.run is not None and output is None:
        source.run.refuse_links()
    target = output or source.beside(form.value)
    from platon import deployment
    from platon.deploy.storage import size_on_disk

    with _as_user_error():
        batch = _batch(source, task, data) if form in (Format.compact, Format.onnx) else None
        if target.suffix == ".onnx":
            written = _write_onnx_file(source, target, batch)
        else:
            rounding: dict[str, Any] = {"precision": precision, "embeddings": embeddings}
            deployment.export(model, target, form.value, batch=batch, tell=console.print, **rounding)
            written = target / deployment.ONNX_FILE if form is Format.onnx else target
    before, size = size_on_disk(source.folder), sum(path.stat().st_size for path in _weights(written))
    share = f", {percent(size / before)} of {before / 1e6:.2f} MB" if before else ""
    console.print(f"{size / 1e6:.2f} MB{share}: {escape(str(written))}")
    if (precision != "float32" or embeddings is not None) and (source.run is not None or task is not None):
        _show_rounding(source, target, task, data)


def _show_rounding(source: Source, target: Path, task: str | None, data: Path | None) -> None:
    """What rounding costs: the task's metrics of the model and of what was written."""
    from platon.deploy.loading import opened
    from platon.lab.finished import open_source

    measure = open_source(source, task, data, in_float32=True).measure
    before, after = (measure(opened(folder)) for folder in (source.folder, target))
    for split, metrics in after.items():
        for metric, value in metrics.items():
            unrounded = _shown(metric, before[split][metric])
            console.print(f"{split} {metric} {_shown(metric, value)}, before rounding {unrounded}")


def _batch(source: Source, task: str | None, data: Path | None) -> dict[str, Any] | None:
    """Rows of the task, if there is one."""
    if source.run is None and task is None:
        return None
    from platon.lab.finished import open_source

    return open_source(source, task, data, eval_rows=8).prepared.batch()


def _write_onnx_file(source: Source, file: Path, batch: dict[str, Any] | None) -> Path:
    """A file of the user's choice, perhaps among other files: nothing is put beside it."""
    from platon.deploy import onnx
    from platon.deploy.example import example_batch
    from platon.deploy.loading import load
    from platon.lab.tasks.model import saved_processor

    onnx.require()
    folder = source.form("compact")
    opened = load(folder)
    found = onnx.export(opened, file, [batch or example_batch(opened, saved_processor(folder))])
    console.print(f"checked in ONNX Runtime; largest difference of the outputs {found.difference:.1e}")
    console.print(f"tokenizer or image processor: {escape(str(source.folder))}")
    return file


def _weights(target: Path) -> Iterator[Path]:
    return target.glob("*.safetensors") if target.is_dir() else target.parent.glob(f"{target.name}*")


def speed(
    model: Named,
    engine: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="one of these, or compile, which takes minutes; may be given several times"),
    ] = ENGINES,
    batch: Annotated[list[int], typer.Option(metavar="N", help="rows in a batch; may be given several times")] = [1, 8],  # noqa: B006
    length: Annotated[
        list[int], typer.Option(metavar="N", help="tokens in a row, for texts; may be given several times")
    ] = [128],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="how often each model runs in each setting")] = 20,
    threads: Annotated[int | None, typer.Option(help="threads; torch's choice by default")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="compare with this model [dim]\\[the dense twin][/dim]")
    ] = None,
    metric: Annotated[
        bool, typer.Option("--metric/--no-metric", help="do not evaluate the models on the task", show_default=False)
    ] = True,
    task: TaskName = None,
    data: Data = None,
) -> None:
    """Measure a model beside a dense one: latency, throughput, size, memory, and the task's metric.

    Of a run, the pruned model is the compact one, or the sparse one, where there is one. Without a dense twin, the
    model with its zeros takes its place: dense kernels take the same time whatever the values are. The dense model in
    eager PyTorch is what all are compared with. ONNX Runtime, OpenVINO and PyTorch's int8 are measured in the same
    turns, each with the task's metric, where they are installed (the extra named rivals).

    Example: [bold]platon speed runs/mrpc --engine eager --engine onnx --batch 8 --length 128[/bold]
    """
    source = _checked(model, task, data)
    dense = None if against is None else find_source(against)
    setting = {"engines": engine, "rows": batch, "lengths": length, "rounds": rounds, "threads": threads}
    measure_speed(source, dense, task, data, metric, **setting)
    if source.whole_run is not None:
        console.print(f"{'record':8} {escape(str(source.whole_run.speed))}")
        console.print(f"{'figure':8} {escape(str(source.whole_run.speed_figure))}")


def measure_speed(
    source: Source,
    dense: Source | None = None,
    task: str | None = None,
    data: Path | None = None,
    metric: bool = True,
    **setting: Any,
) -> None:
    """Measure and print; of a run, also write and draw. `setting`: as for `platon.measure`."""
    run = source.whole_run
    if run is not None:
        run.refuse_links()  # speed.json and figures/ are written
    from platon import deployment
    from platon.report.speed import tables

    with _as_user_error():
        evaluate_model = inputs = None
        if source.run is not None or task is not None:
            from platon.lab.finished import open_source

            rows = None if metric else 8
            _, prepared, evaluate_model = open_source(source, task, data, rows, in_float32=True)
            inputs = prepared.batch(rows=64)
        found = deployment.measure(
            source.form("compact", "sparse"),
            source.form("dense/model") if dense is None else dense.folder,
            metric=evaluate_model if metric else None,
            batch=inputs,
            tell=show_progress,
            **setting,
        )
    if run is not None:
        from platon.lab.record import write_json
        from platon.report.speed import draw_speed

        write_json(run.speed, found)
        draw_speed(run.path)
    for table in tables(found):
        console.print(table)
