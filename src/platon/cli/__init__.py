"""The command line, `platon`: parses arguments, calls the other packages, and prints.

Commands import torch and transformers only when they need them, so that help and most error messages come at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.markup import escape

from platon.cli import hub, listing, model, prediction, training, view
from platon.cli.help import Command, Group
from platon.cli.terminal import console, errors
from platon.lab.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="platon",
    cls=Group,
    help="Prune transformers while they are fine-tuned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(training.prune)
app.command(cls=Command)(training.sweep)
app.command(cls=Command)(prediction.predict)
app.command("eval", cls=Command)(model.evaluate)
app.command(cls=Command)(model.export)
app.command(cls=Command)(model.speed)
app.command(cls=Command)(view.inspect)
app.command(cls=Command)(view.report)
app.command(cls=Command)(hub.push)
app.command("list", cls=Command)(listing.show_names)


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
        _exit_with(str(error), debug)
    except OSError as error:
        what = f" {error.filename!r}" if error.filename else ""
        _exit_with(f"{error.strerror or error}{what}; nothing that was complete is lost", debug)
    except Exception as error:
        _exit_if_interrupted(error)
        _exit_with(f"{type(error).__name__}: {error}; run again with --debug for the traceback", debug, code=1)


def _exit_if_interrupted(error: Exception) -> None:
    """After a signal, say how to go on. The class is known by its name: importing it would import torch."""
    if type(error).__name__ == "Interrupted":
        number, folder = error.number, error.folder  # type: ignore[attr-defined]
        if os.environ.get("RANK", "0") == "0":
            errors.print(
                f"{error}; a checkpoint is saved. Go on with: platon prune --output {escape(str(folder))} --resume"
            )
        sys.exit(128 + number)


def _exit_with(sentence: str, debug: bool, code: int = 2) -> None:
    """Print an error and end the process; with `debug`, raise the error that is being handled again."""
    if debug:
        raise
    if type(sys.exception()).__name__ != "ReportedByFirst":  # of several processes the first prints it
        errors.print(f"[red]error:[/red] {escape(' '.join(sentence.split()))}")
    sys.stdout.flush()
    os._exit(code)  # without waiting for threads that libraries have started
