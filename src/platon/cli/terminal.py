"""The consoles that all commands print to."""

from __future__ import annotations

import sys
import textwrap

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from platon.lab.duration import in_words
from platon.lab.printer import COLUMN

# In a file or a pipe tables are 160 columns wide, so that no word is cut off. Both sizes are given, because otherwise
# rich assumes 80 columns for a dumb terminal.
_width, _height = (None, None) if sys.stdout.isatty() else (160, 50)
console = Console(highlight=False, soft_wrap=True, width=_width, height=_height)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def show_progress(text: str) -> None:
    """Print a line about what a command is doing."""
    console.print(escape(_wrapped(text)), style="dim")


def show_warning(text: str) -> None:
    """Print a line that the user should not miss."""
    console.print(escape(_wrapped(text)), style="yellow")


def _wrapped(text: str) -> str:
    """In a terminal, long lines go on below the second column of `Printer.row`."""
    if not console.is_terminal:
        return text
    indent = " " * (COLUMN + 1)
    return textwrap.fill(text, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class TimeLeft(ProgressColumn):
    """The time that is left; when all is done, the time that it took."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"in {in_words(task.finished_time or 0)}", style="dim")
        return Text("" if task.time_remaining is None else f"{in_words(task.time_remaining)} left", style="dim")


class TrainingBar:
    """The progress bar of one training; it stays on the screen when the training has ended."""

    def __init__(self, title: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description:11}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeLeft(),
            console=console,
        )
        self._task = self._progress.add_task(title, total=total, shown="")
        self._progress.start()

    def update(self, step: int, shown: str) -> None:
        """Show that `step` is done, and a few numbers."""
        self._progress.update(self._task, completed=step, shown=shown)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()
