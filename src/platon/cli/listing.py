"""The command `list`: the names that a user can give."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from platon.cli.terminal import console


class Listing(StrEnum):
    """What `platon list` can show."""

    tasks = "tasks"
    methods = "methods"
    recipes = "recipes"
    sweeps = "sweeps"


def show_names(
    what: Annotated[Listing, typer.Argument(help="what to list")],
    name: Annotated[str | None, typer.Argument(help="recipes: show this one in full")] = None,
) -> None:
    """List tasks, methods, recipes or sweeps.

    Example: [bold]platon list recipes[/bold]
    """
    if what is Listing.recipes and name is not None:
        console.print(_recipe(name))
    else:
        console.print({"tasks": _tasks, "methods": _methods, "recipes": _recipes, "sweeps": _sweeps}[what.value]())


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _tasks() -> Table:
    from platon.lab.tasks import TASKS

    table = _table("task", "metrics", "what")
    for task in TASKS.values():
        table.add_row(task.name, ", ".join(task.metrics), task.title)
    return table


def _methods() -> Table:
    from platon.engine.methods import METHODS

    table = _table("method", "what", "citation")
    for key, method in METHODS.items():
        table.add_row(key, method.line, method.citation)
    return table


def _sweeps() -> Table:
    from platon.lab.sweep import packaged, read, title

    table = _table("sweep", "runs", "what")
    for key, path in packaged().items():
        table.add_row(key, f"{len(read(key, Path())):,}", title(path))
    return table


def _recipes() -> Table:
    from platon.lab.recipes import RECIPES

    shown = ("model", "task", "method", "keep")
    table = _table("recipe", *shown)
    for recipe in RECIPES.values():
        table.add_row(recipe.name, *(str(recipe.values.get(key, "")) for key in shown))
    return table


def _recipe(name: str) -> Table:
    from platon.lab.recipes import find

    table = _table("setting", "value", "source")
    for setting, field in find(name).fields.items():
        table.add_row(setting, str(field.value), field.source)
    return table
