"""Where the commands print."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

# A table for a file or a pipe is wide enough for its words: nothing is cut off where nobody can widen the window.
# (Both sizes, because rich takes a dumb terminal for 80 columns unless it is told both.)
_width, _height = (None, None) if sys.stdout.isatty() else (160, 50)
console = Console(highlight=False, soft_wrap=True, width=_width, height=_height)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def tell(text: str) -> None:
    """What happens while a command is at work."""
    console.print(escape(text), style="dim")
