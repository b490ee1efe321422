"""The command `push`: a model goes to the Hugging Face hub."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape

from platon.cli.option import Named
from platon.cli.terminal import console
from platon.lab.errors import UserError
from platon.lab.source import find_source


class Form(StrEnum):
    """The folders of a run that can be uploaded."""

    model = "model"
    compact = "compact"
    sparse = "sparse"
    fast = "fast"
    onnx = "onnx"


def push(
    model: Named,
    name: Annotated[str, typer.Argument(metavar="USER/NAME", help="its name on the hub")],
    form: Annotated[
        Form | None, typer.Option(help="which of a run's folders [dim]\\[model][/dim]", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="visible to you alone")] = False,
) -> None:
    """Upload a model to the Hugging Face hub, with a card: what was pruned, how good and how fast it is.

    A card that you changed (README.md in the folder) is uploaded as it is. Log in first: `hf auth login`.

    Example: [bold]platon push runs/reviews me/reviews-pruned[/bold]
    """
    source = find_source(model)
    if name.count("/") != 1 or not all(name.split("/")):
        raise UserError(f"the name on the hub must be USER/NAME, got {name!r}")
    chosen = form.value if form is not None else "model" if source.whole_run is not None else source.folder.name
    from platon.lab.hub import push as upload

    page = upload(source, name, chosen, private)
    console.print(f"uploaded: {escape(page)}")
