"""Errors that the user can correct, suggestions for misspelt names, and what other errors say in short."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """One sentence: what is wrong, what was given, what to do. The command line prints it and exits with code 2."""


def nearest(given: str, known: Iterable[str]) -> str:
    """The end of an error message, such as ``; nearest: 'sst2'``; empty if no known name is similar."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(given.lower(), by_lower, n=3, cutoff=0.5)
    return "; nearest: " + ", ".join(repr(by_lower[name]) for name in close) if close else ""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
