"""The command `predict`: what a run's model says about new rows."""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.markup import escape
from rich.table import Table

from platon.cli.terminal import console, errors
from platon.lab.errors import UserError

if TYPE_CHECKING:
    from platon.lab.prediction import Predictions

SHOWN, WIDTH = 10, 60  # rows, and characters of a cell, that a terminal shows


class Format(StrEnum):
    """How predictions are written."""

    csv = "csv"
    jsonl = "jsonl"


class Form(StrEnum):
    """The forms of a run's model."""

    fast = "fast"
    compact = "compact"
    model = "model"


def predict(
    run: Annotated[Path, typer.Argument(help="run folder")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="new rows: .csv, .tsv, .jsonl, .json, .parquet, .txt with a text in each line, CoNLL, images; "
            "default: lines of texts or JSON from the standard input"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write to this .csv or .jsonl file; default: print")
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="how to write; default: as the output or the data is named")
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(help="the column with the text, if it has another name than in training")
    ] = None,
    second_column: Annotated[str | None, typer.Option(help="the same for the second text")] = None,
    model: Annotated[
        Form | None, typer.Option(help="which form of the model; default: the fastest that the run has")
    ] = None,
) -> None:
    """Predict labels and probabilities for new rows, with the fastest form of a run's model.

    Every row comes out again with its prediction and probabilities added, in the same order.

    Example: [bold]platon predict runs/reviews --data new.csv -o predictions.csv[/bold]
    """
    from platon.lab.record import read_record
    from platon.lab.tasks.path import check_columns, existing_data

    read_record(run)  # before torch is imported, for a quick answer to a wrong path
    if data is not None:
        existing_data(data)
        check_columns(data, (text_column, second_column), None)
    written = form or _format_of(output, data)
    if output is not None and not output.parent.is_dir():
        raise UserError(f"the folder {str(output.parent)!r} of --output does not exist; create it first")
    with _rows(data) as source:
        from platon.lab.prediction import predict as run_predict

        found = run_predict(run, source, model, text_column=text_column, second_column=second_column)
    if output is not None:
        temporary = output.with_name(f".{output.name}")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            _write(found, written, file)
        temporary.replace(output)
    elif sys.stdout.isatty() and form is None:
        _show(found)
    else:
        _write(found, written, sys.stdout)
    speed = f"{len(found.answers) / max(found.seconds, 1e-9):,.0f} rows/s"
    place = "" if output is None else f": {escape(str(output))}"
    errors.print(f"{len(found.answers):,} rows through {escape(str(found.form))}, {speed}{place}", style="dim")


def _format_of(output: Path | None, data: Path | None) -> Format:
    """By the name of the output; without one, JSON lines for JSON and CSV for everything else."""
    if output is not None:
        known = {".csv": Format.csv, ".jsonl": Format.jsonl, ".json": Format.jsonl}
        if output.suffix.lower() not in known:
            raise UserError(f"--output {output} must end in .csv or .jsonl, or --format must say which it is")
        return known[output.suffix.lower()]
    return Format.jsonl if data is not None and data.suffix.lower() in (".jsonl", ".json") else Format.csv


@contextmanager
def _rows(data: Path | None) -> Iterator[Path]:
    """The file with the rows; what comes from the standard input is in a temporary one meanwhile."""
    if data is not None:
        yield data
        return
    if sys.stdin.isatty():
        raise UserError("there are no rows: give a file with --data, or write texts to the standard input")
    text = sys.stdin.read()
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / ("stdin.jsonl" if text.lstrip().startswith("{") else "stdin.txt")
        file.write_text(text, encoding="utf-8")
        yield file


def _write(found: Predictions, form: Format, file: TextIO) -> None:
    if form is Format.jsonl:
        for row in found.nested():
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        return
    writer: csv.DictWriter[str] | None = None
    for row in found.flat():
        if writer is None:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: Any) -> Any:
    """Lists of strings, such as words, with blanks between them; other structures as JSON."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return " ".join(value)
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value


def _show(found: Predictions) -> None:
    """The first rows as a table."""
    rows = list(islice(found.flat(), SHOWN))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=WIDTH)
    for row in rows:
        table.add_row(*_texts(row.values()))
    console.print(table)
    if len(found.answers) > SHOWN:
        console.print(f"… and {len(found.answers) - SHOWN:,} more; -o predictions.csv writes all", style="dim")


def _texts(cells: Iterable[Any]) -> Iterator[str]:
    for cell in cells:
        yield f"{cell:.4g}" if isinstance(cell, float) else escape(str(_cell(cell)))
