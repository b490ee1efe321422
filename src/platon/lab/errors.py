"""Errors that the user can correct, and suggestions for misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """One sentence: what is wrong, what was given, what to do. The command line prints it and exits with code 2."""


def nearest(given: str, known: Iterable[str]) -> str:
    """The end of an error message, such as ``; nearest: 'sst2'``; empty if no known name is similar."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(given.lower(), by_lower, n=3, cutoff=0.5)
    return "; nearest: " + ", ".join(repr(by_lower[name]) for name in close) if close else ""
