"""The settings of a run as options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from platon.lab.settings import FIELDS, panel_of, type_of


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every setting.

    The command's parameter `flags` receives them, with None for those that were not given. Typer reads a function's
    signature, so the function that is returned has one parameter for each setting in place of `flags`.
    """
    other = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in other] + [_parameter(name) for name in FIELDS]

    def run(**arguments: Any) -> None:
        flags = {name: arguments.pop(name) for name in FIELDS}
        command(flags=flags, **arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _parameter(name: str) -> inspect.Parameter:
    """The option of a setting; a yes/no setting has a second one, --no-NAME."""
    field, kind, word = FIELDS[name], type_of(name), name.replace("_", "-")
    default = "" if field.default is None or field.default is False else f" [dim]\\[{field.default}][/dim]"
    option = typer.Option(
        f"--{word}/--no-{word}" if kind is bool else f"--{word}",
        help=f"{field.description}{default}",
        rich_help_panel=panel_of(name),
        show_default=False,
    )
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
