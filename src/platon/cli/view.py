"""The commands that show what there is: `inspect` for a run or a model, `report` for many runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from platon.cli.option import Named
from platon.cli.terminal import console, errors
from platon.lab.percent import percent
from platon.lab.source import check_name, find_source


class Format(StrEnum):
    """How `platon report` prints tables."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


def inspect(model: Named) -> None:
    """Show what is kept of each layer; of a model, also its heads and neurons, and what of it cannot be cut.

    Example: [bold]platon inspect google-bert/bert-base-uncased[/bold]
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        check_name(model)
    elif find_source(model).whole_run is not None:
        show_layers(folder)
        return
    from platon.cli.structure import show_structure
    from platon.lab.outline import kept_shares, outline

    opened = outline(model)
    show_structure(opened)
    shares = kept_shares(folder, opened)
    if any(share < 1 for share, _ in shares.values()):
        kept = sum(share * size for share, size in shares.values()) / sum(size for _, size in shares.values())
        sizes = {name: float(size) for name, (_, size) in shares.items()}
        title = f"{percent(kept, 2)} of its weights are not 0"
        console.print(_layers({name: share for name, (share, _) in shares.items()}, sizes, title))


def show_layers(run: Path) -> None:
    """Show what a run kept, layer by layer."""
    from platon.lab.record import RunFolder, read_record

    record = read_record(run)
    prunable = record["parameters"]["prunable"]
    title = f"{record['task']}, {record['method']}: {percent(record['kept'], 2)} of {prunable:,} weights kept"
    console.print(_layers(record["layers"], _sizes(RunFolder(run).model, record["layers"]), title))


def _layers(shares: dict[str, float], sizes: dict[str, float] | None, title: str) -> Table:
    """The share kept of each matrix, and a bar for each layer; `sizes`: the weights of each matrix, if known."""
    from platon.report.layer import layer_table

    rows, columns, cells = layer_table(shares)
    weights = dict.fromkeys(cells, 1.0) if sizes is None else layer_table(sizes)[2]
    table = Table(title=title, title_justify="left", caption="share kept of each matrix, %", caption_justify="left")
    table.add_column("layer", justify="right")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("of the layer" if sizes is not None else "mean of the matrices")
    for row in rows:
        found = [(cells[row, column], weights[row, column]) for column in columns if (row, column) in cells]
        mean = sum(share * size for share, size in found) / sum(size for _, size in found)
        bar = f"[cyan]{'█' * round(30 * mean)}{'·' * (30 - round(30 * mean))}[/cyan] {100 * mean:.1f}"
        table.add_row(row, *(f"{100 * cells[row, c]:.1f}" if (row, c) in cells else "" for c in columns), bar)
    return table


def _sizes(model: Path, names: dict[str, Any]) -> dict[str, float] | None:
    """The number of weights of each matrix, from the headers of the model's files; None if the model is not there."""
    from math import prod

    from safetensors import SafetensorError, safe_open

    sizes: dict[str, float] = {}
    try:
        for file in sorted(model.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as tensors:
                there = set(tensors.keys())
                sizes |= {name: prod(tensors.get_slice(name).get_shape()) for name in names if name in there}
    except (OSError, SafetensorError):
        return None
    return sizes if sizes.keys() == names.keys() else None


def report(
    folder: Annotated[Path, typer.Argument(help="run folder, or a folder with run folders in it, at any depth")],
    form: Annotated[Format, typer.Option("--format", help="how to print the tables")] = Format.terminal,
    sd: Annotated[bool, typer.Option("--sd", help="standard deviation over seeds beside each mean")] = False,
    paper: Annotated[bool, typer.Option("--paper", help="the paper's own numbers beside ours")] = False,
    html: Annotated[Path | None, typer.Option(help="write the page here instead")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write here; default: FOLDER/report")] = None,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="do not draw figures", show_default=False)
    ] = True,
) -> None:
    """Show the tables of finished runs, and write them with figures and a page. Reads records, never trains.

    Example: [bold]platon report runs --sd --paper[/bold]
    """
    from platon.report import text
    from platon.report.reader import read_runs
    from platon.report.report import make_report
    from platon.report.result_table import Options
    from platon.report.writer import write_report

    made = make_report(read_runs(folder), Options(sd, paper))
    for table in made.tables:
        if form is Format.terminal:
            console.print(text.terminal(table))
            for note in table.notes:
                console.print(escape(note), style="dim")
            console.print()
        else:
            print(text.FORMATS[form][1](table))
    for note in made.runs.notes:
        errors.print(f"[yellow]note:[/yellow] {escape(note)}")
    target = output or folder / "report"
    written = write_report(made, target, figures, html)
    page = next(path for path in written if path.suffix == ".html")
    errors.print(f"{len(written)} files in {escape(str(target))}; the page is {escape(str(page))}", style="dim")
