"""What goes wrong in the user's hands, said in one sentence."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A sentence for the user: what is wrong, what was given, what to do. The command prints it and exits with 2."""


def nearest(given: str, known: Iterable[str]) -> str:
    """The end of a sentence: ``; nearest: 'sst2'``, or nothing when no known name comes close."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(given.lower(), by_lower, n=3, cutoff=0.5)
    return "; nearest: " + ", ".join(repr(by_lower[name]) for name in close) if close else ""
