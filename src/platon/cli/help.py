"""How help looks: flags as they are typed and without a type, and `--help` after the options that people look for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import cleandoc
from typing import Any

from typer.core import TyperCommand, TyperGroup

from platon.lab.settings import FIELDS


def _tidied(parameters: list[Any]) -> list[Any]:
    """The same parameters; flags show no type, and --help goes to the panel of the last option."""
    panels = [one.rich_help_panel for one in parameters if getattr(one, "rich_help_panel", None)]
    for one in parameters:
        if getattr(one, "is_flag", False):
            one.metavar = ""
        if "--help" in one.opts and panels:
            one.rich_help_panel = panels[-1]
    return parameters


@contextmanager
def one_form(parameters: list[Any]) -> Iterator[None]:
    """Show of each yes/no option the form that changes something: --no-NAME where it is on, else --NAME."""
    flags = [one for one in parameters if one.secondary_opts]
    before = [(one.opts, one.secondary_opts) for one in flags]
    for one in flags:
        is_on = one.default is True or (one.name in FIELDS and FIELDS[one.name].default is True)
        one.opts, one.secondary_opts = (one.secondary_opts if is_on else one.opts), []
    try:
        yield
    finally:
        for one, (opts, secondary) in zip(flags, before, strict=True):
            one.opts, one.secondary_opts = opts, secondary


def _paragraphs(text: str) -> str:
    """The text with each paragraph on one line, so that it fills whatever width there is; lists stay as they are."""
    found = [cleandoc(part) for part in cleandoc(text).split("\n\n")]
    return "\n\n".join(part if part.startswith("[bold]") else " ".join(part.split()) for part in found)


class Command(TyperCommand):
    """A command with tidied help."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """As `TyperCommand`."""
        super().__init__(*args, **{**settings, "help": _paragraphs(settings.get("help") or "")})

    def get_params(self, ctx: Any) -> list[Any]:
        return _tidied(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with one_form(self.params):
            super().format_help(ctx, formatter)


class Group(TyperGroup):
    """The same for `platon` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _tidied(super().get_params(ctx))
