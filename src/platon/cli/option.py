"""Options that commands share, and the settings of a run as options of a command."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from platon.lab.settings import FIELDS, panel_of, type_of

Named = Annotated[str, typer.Argument(metavar="MODEL", help="run folder, model folder or hub name")]
TaskName = Annotated[
    str | None, typer.Option("--task", help="a name from `platon list tasks`; a run knows its own", show_default=False)
]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="evaluate on this data; of a single file, on every row", show_default=False),
]
Column = Annotated[str | None, typer.Option(help="the column of that name in the data", show_default=False)]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every setting.

    The command's parameter `flags` receives them, with None for those that were not given. Typer reads a function's
    signature, so the function that is returned has one parameter for each setting in place of `flags`.
    """
    other = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in other] + [_parameter(name) for name in FIELDS]
    parameters.sort(key=_place)

    def run(**arguments: Any) -> None:
        flags = {name: arguments.pop(name) for name in FIELDS}
        command(flags=flags, **arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


#: the options that people look for first, in this order; `RARE` come last
COMMON = (
    "task",
    "data",
    "model",
    "keep",
    "output",
    "resume",
    "hold",
    "method",
    "units",
    "dense",
    "epochs",
    "learning_rate",
)
RARE = "Recipes and files"
_PANELS = ("Common", "Data", "Training", "Pruning", "Teacher", "Records", "Method", RARE)
_SCHEDULE = ("warmup", "cooldown", "every", "scope")


def _panel(name: str) -> str:
    """The panel of the help page that shows a setting: from what everybody needs to what one method reads."""
    if name in COMMON:
        return _PANELS[0]
    panel = panel_of(name)
    return "Method" if panel == "Pruning" and name not in _SCHEDULE else "Pruning" if panel == "What" else panel


def _place(parameter: inspect.Parameter) -> tuple[int, int]:
    """Where an option stands: by its panel, common ones in their own order."""
    panel = typing.get_args(parameter.annotation)[1].rich_help_panel
    common = COMMON.index(parameter.name) if parameter.name in COMMON else len(COMMON)
    return _PANELS.index(panel), common


def _parameter(name: str) -> inspect.Parameter:
    """The option of a setting; a yes/no setting has a second one, --no-NAME."""
    field, kind, word = FIELDS[name], type_of(name), name.replace("_", "-")
    shown = "" if field.default is None or kind is bool else f" [dim]\\[{field.default}][/dim]"
    text = f"switch off: {field.description}" if field.default is True else field.description
    option = typer.Option(
        f"--{word}/--no-{word}" if kind is bool else f"--{word}",
        help=f"{text}{shown}",
        rich_help_panel=_panel(name),
        show_default=False,
    )
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
