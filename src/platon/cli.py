"""The hallway: parses, calls, prints. Heavy imports wait until a command needs them, so that help is instant."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from platon.cli_deploy import export, measure_speed, speed
from platon.lab.errors import UserError
from platon.lab.settings import FIELDS, ResolvedSettings, panel_of, resolve, type_of
from platon.terminal import console, errors, tell

app = typer.Typer(
    name="platon",
    help="Prune transformers while they are fine-tuned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Listing(StrEnum):
    """What `platon list` can show."""

    tasks = "tasks"
    methods = "methods"
    recipes = "recipes"
    sweeps = "sweeps"


class Engine(StrEnum):
    """Where the runs of a sweep run."""

    local = "local"
    ray = "ray"


class Format(StrEnum):
    """How `platon report` prints tables."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every setting, from the one place that knows them."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    options = []
    for name, field in FIELDS.items():
        kind: Any = type_of(name) | None
        default = "" if field.default is None or field.default is False else f" [dim]\\[{field.default}][/dim]"
        word = name.replace("_", "-")
        option = typer.Option(
            f"--{word}/--no-{word}" if type_of(name) is bool else f"--{word}",
            help=f"{field.description}{default}",
            rich_help_panel=panel_of(name),
            show_default=False,
        )
        options.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])
        )

    def run(**arguments: Any) -> None:
        flags = {name: arguments.pop(name) for name in FIELDS}
        command(flags=flags, **arguments)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


@app.command()
@_with_settings
def prune(
    flags: dict[str, Any],
    recipe: Annotated[
        str | None, typer.Option(help="a name from `platon list recipes`", rich_help_panel="What")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings", rich_help_panel="What")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="run folder", rich_help_panel="What")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with an interrupted run", rich_help_panel="What")
    ] = False,
) -> None:
    """Fine-tune a model and prune it on the way.

    Without options: a small ViT on scikit-learn's digits, dense first, then pruned to 10 %.

    Example: [bold]platon prune --task sst2 --model google-bert/bert-base-uncased --keep 0.1[/bold]
    """
    said = recipe or config or any(value is not None for value in flags.values())
    if resume and output is not None and not said:
        from platon.lab.claim import read_started

        resolved = read_started(output)
    else:
        resolved = resolve(recipe, config, flags)
    folder = output or _default_folder(resolved)
    if resume:
        from platon.lab.claim import settings_to_resume

        resolved = settings_to_resume(folder, resolved)
    from platon.deploy.shrink import shrink
    from platon.lab import process_group
    from platon.lab.printer import Printer
    from platon.lab.run import prune as run_prune
    from platon.report.run_figure import draw_run

    record = run_prune(resolved, folder, resume, Printer(tell, sys.stderr.isatty()), shrink)
    first, several = process_group.is_first(), process_group.count() > 1
    process_group.leave()
    if not first:
        _leave()
    figures = draw_run(folder)
    console.print(_results(record))
    if record["not_converged"]:
        console.print(f"did not converge (N.A.): {escape(record['not_converged'])}", style="yellow")
    shown = [("model", folder / "model"), ("record", folder / "record.json"), ("figures", figures[0].parent)]
    small = record.get("compact")
    if small and "error" not in small:
        shown.insert(1, ("compact", folder / "compact"))
        try:
            measure_speed(folder, None, ("eager",), (8,), (128,), rounds=10, threads=None, metric=False)
        except UserError as error:  # the run itself is complete
            console.print(f"{'speed':8} not measured: {escape(str(error))}")
    for what, path in shown:
        console.print(f"{what:8} {escape(str(path))}")
    if small and "error" in small:
        console.print(f"{'compact':8} not made: {escape(small['error'])}")
    console.print("\nNext:", style="bold")
    for line in (f"platon inspect {folder}", f"platon eval {folder}", "platon prune --help"):
        console.print(f"  {escape(line)}")
    if several:
        _leave()


def _leave() -> None:
    """End a process of a job at once: what the libraries still have running may abort on the way out."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _default_folder(resolved: ResolvedSettings) -> Path:
    s = resolved.settings
    share = f"-{100 * s.keep:g}" if s.penalty is None else f"-penalty{s.penalty:g}"
    share = "" if s.method == "dense" else share
    return Path("runs") / f"{s.task}-{s.method}{share}-seed{s.seed}"


def _results(record: dict[str, Any]) -> Table:
    """Dense and pruned beside each other, as far as both are there."""
    from platon.lab.duration import in_words

    pruned = record["method"] != "dense"
    table = Table(title=f"{record['task']}, {record['method']}", title_justify="left")
    table.add_column("")
    columns = ([("dense", record["dense"])] if record["dense"] else []) + [("pruned" if pruned else "dense", record)]
    for name, _ in columns:
        table.add_column(name, justify="right")
    for split, metrics in record["results"].items():
        for metric in metrics:
            label = metric if len(record["results"]) == 1 else f"{split} {metric}"
            table.add_row(label, *(f"{100 * found['results'][split][metric]:.2f} %" for _, found in columns))
    shares = {"dense": "100 %", "pruned": f"{record['kept']:.2%}"}
    table.add_row("prunable weights kept", *(shares[name] for name, _ in columns))
    table.add_row("parameters that are not zero", *(f"{found['parameters']['left']:,}" for _, found in columns))
    table.add_row("size on disk", *(f"{found['bytes'] / 1e6:.2f} MB" for _, found in columns))
    small = record.get("compact")
    if small and "error" not in small:
        before = [""] * (len(columns) - 1)
        table.add_row("parameters of the compact model", *before, f"{small['parameters']:,}")
        table.add_row("its size on disk", *before, f"{small['bytes'] / 1e6:.2f} MB")
        table.add_row("largest difference of its outputs", *before, f"{small['difference']:.1e}")
    table.add_row("time", *(in_words(found["seconds"]) for _, found in columns))
    return table


@app.command()
def sweep(
    source: Annotated[str, typer.Argument(metavar="FILE", help="sweep file, or a name from `platon list sweeps`")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder of the runs; default: runs/ and the file's name")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time; they share the cores")] = 1,
    engine: Annotated[Engine, typer.Option(help="where runs run: this machine, or a Ray cluster")] = Engine.local,
    dry: Annotated[bool, typer.Option("--dry", help="say what would run and for how long, and stop")] = False,
    estimate: Annotated[bool, typer.Option(help="try a few steps of each kind of run first, to tell the time")] = True,
) -> None:
    """Run every combination of settings that a file names; finished runs are skipped, interrupted ones go on.

    Example: [bold]platon sweep glue --dry[/bold]
    """
    from platon.lab.sweep.run import run

    folder = output or Path("runs") / Path(source).stem
    failed = run(source, folder, jobs, engine.value, dry, estimate, console)
    if failed:
        errors.print(f"{failed} of the runs failed; their output is in {escape(str(folder / 'logs'))}")
        raise typer.Exit(1)


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="run folder")],
    data: Annotated[Path | None, typer.Option(help="read the data from here instead")] = None,
) -> None:
    """Measure a run's model again, and compare with its record."""
    from platon.lab.finished import evaluate_run

    record, results = evaluate_run(run, data)
    table = Table(title=f"{record['task']}, {record['method']}", title_justify="left")
    for name in ("split", "metric", "now", "recorded"):
        table.add_column(name, justify="left" if name in ("split", "metric") else "right")
    for split, metrics in results.items():
        for metric, value in metrics.items():
            before = record["results"].get(split, {}).get(metric)
            table.add_row(split, metric, f"{100 * value:.2f} %", "--" if before is None else f"{100 * before:.2f} %")
    console.print(table)


app.command()(export)
app.command()(speed)


@app.command("inspect")
def show_layers(run: Annotated[Path, typer.Argument(help="run folder")]) -> None:
    """Show what a run kept, layer by layer."""
    from platon.lab.record import read_record
    from platon.report.layer import layer_table

    record = read_record(run)
    rows, columns, cells = layer_table(record["layers"])
    prunable = record["parameters"]["prunable"]
    title = f"{record['task']}, {record['method']}: {record['kept']:.2%} of {prunable:,} weights kept"
    table = Table(title=title, title_justify="left", caption="share kept of each matrix, %", caption_justify="left")
    table.add_column("layer", justify="right")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("mean of the layer")
    for row in rows:
        shares = [cells[row, column] for column in columns if (row, column) in cells]
        mean = sum(shares) / len(shares)
        bar = f"[cyan]{'█' * round(30 * mean)}{'·' * (30 - round(30 * mean))}[/cyan] {100 * mean:.1f}"
        table.add_row(row, *(f"{100 * cells[row, c]:.1f}" if (row, c) in cells else "" for c in columns), bar)
    console.print(table)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="run folder, or a folder with run folders in it, at any depth")],
    form: Annotated[Format, typer.Option("--format", help="how to print the tables")] = Format.terminal,
    sd: Annotated[bool, typer.Option("--sd", help="standard deviation over seeds beside each mean")] = False,
    paper: Annotated[bool, typer.Option("--paper", help="the paper's own numbers beside ours")] = False,
    html: Annotated[Path | None, typer.Option(help="write the page here instead")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write here; default: FOLDER/report")] = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="draw figures as SVG and PNG")] = True,
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


@app.command("list")
def show_names(
    what: Annotated[Listing, typer.Argument(help="what to list")],
    name: Annotated[str | None, typer.Argument(help="recipes: show this one in full")] = None,
) -> None:
    """List tasks, methods, recipes or sweeps."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    if what is Listing.tasks:
        from platon.lab.tasks import TASKS

        for column in ("task", "metrics", "what"):
            table.add_column(column)
        for task in TASKS.values():
            table.add_row(task.name, ", ".join(task.metrics), task.title)
    elif what is Listing.methods:
        from platon.engine.methods import METHODS

        for column in ("method", "what", "citation"):
            table.add_column(column, overflow="fold")
        for key, method in METHODS.items():
            table.add_row(key, method.line, method.citation)
    elif what is Listing.sweeps:
        from platon.lab.sweep import packaged, read, title

        for column in ("sweep", "runs", "what"):
            table.add_column(column)
        for key, path in packaged().items():
            table.add_row(key, f"{len(read(key, Path())):,}", title(path))
    else:
        from platon.lab import recipes

        if name is not None:
            for column in ("setting", "value", "source"):
                table.add_column(column)
            for setting, field in recipes.find(name).fields.items():
                table.add_row(setting, str(field.value), field.source)
        else:
            for column in ("recipe", "model", "task", "method", "keep"):
                table.add_column(column)
            for recipe in recipes.RECIPES.values():
                values = recipe.values
                table.add_row(recipe.name, *(str(values.get(key, "")) for key in ("model", "task", "method", "keep")))
    console.print(table)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="show the version and exit")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show Python tracebacks")] = False,
) -> None:
    if version:
        from platon import __version__

        console.print(f"platon {__version__}")
        raise typer.Exit
    context.obj = debug


def main() -> None:
    """Run the command line; one sentence and a conventional exit code when something goes wrong."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except KeyboardInterrupt:
        errors.print("stopped")
        sys.exit(130)
    except UserError as error:
        _complain(str(error), debug)
    except OSError as error:
        what = f" {error.filename!r}" if error.filename else ""
        _complain(f"{error.strerror or error}{what}; nothing that was complete is lost", debug)
    except Exception as error:
        _interrupted(error)
        _complain(f"{type(error).__name__}: {error}; run again with --debug for the whole story", debug, code=1)


def _interrupted(error: Exception) -> None:
    if type(error).__name__ == "Interrupted":
        number, folder = error.number, error.folder  # type: ignore[attr-defined]
        if os.environ.get("RANK", "0") == "0":
            errors.print(
                f"{error}; a checkpoint is saved. Go on with: platon prune --output {escape(str(folder))} --resume"
            )
        sys.exit(128 + number)


def _complain(sentence: str, debug: bool, code: int = 2) -> None:
    if debug:
        raise  # what the caller's except clause holds
    if type(sys.exception()).__name__ == "ReportedByFirst":  # the first process prints it
        os._exit(code)
    errors.print(f"[red]error:[/red] {escape(' '.join(sentence.split()))}")
    # Threads of the libraries may still be at work; nothing of ours is.
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
