"""The page of the command line: every command with its options, from the program itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import typer

from platon import cli
from platon.cli.help import one_form


def commands() -> str:
    """Markdown with a section for each command."""
    top = typer.main.get_command(cli.app)
    return "\n\n".join("\n\n".join(_section(name, command)) for name, command in top.commands.items())


def _section(name: str, command: Any) -> Iterator[str]:
    arguments = [_flags(one).strip("`") for one in command.params if one.param_type_name == "argument"]
    yield f"## platon {name}"
    yield _markdown(command.help or "")
    yield f"```text\nplaton {' '.join([name, *arguments, '[OPTIONS]'])}\n```"
    panels: dict[str, list[Any]] = defaultdict(list)
    for option in command.params:
        panels[getattr(option, "rich_help_panel", None) or ""].append(option)
    with one_form(command.params):
        for panel, options in panels.items():
            head = [f"| {panel or 'option'} | |", "|---|---|"]
            yield "\n".join([*head, *(f"| {_flags(one)} | {_description(one)} |" for one in options)])


def _flags(option: Any) -> str:
    if option.param_type_name == "argument":
        return f"`{option.metavar or option.name.upper()}`"
    return "<br>".join(f"`{flag}`" for flag in option.opts)


def _description(option: Any) -> str:
    """What an option does, and its default where help shows it."""
    default = option.default
    shown = f" [{default}]" if option.show_default and isinstance(default, str | int | float) and default else ""
    return _markdown((option.help or "") + ("" if isinstance(default, bool) else shown)).replace("|", "\\|")


def _markdown(text: str) -> str:
    """Rich's markup as Markdown: bold is a command to type, the rest is plain."""
    text = re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", text)
    return re.sub(r"\[/?(dim|cyan|red|green|italic)\]", "", text).replace("\\[", "[").replace("[", "\\[")
