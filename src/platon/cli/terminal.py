"""The consoles that all commands print to."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

# In a file or a pipe tables are 160 columns wide, so that no word is cut off. Both sizes are given, because otherwise
# rich assumes 80 columns for a dumb terminal.
_width, _height = (None, None) if sys.stdout.isatty() else (160, 50)
console = Console(highlight=False, soft_wrap=True, width=_width, height=_height)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def show_progress(text: str) -> None:
    """Print a line about what a command is doing."""
    console.print(escape(text), style="dim")
