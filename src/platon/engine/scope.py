"""Scopes: among which weights the best are chosen. Nothing here imports torch."""

import re

#: "global": among all weights; "matrix": in each matrix; "row": among the weights of one output feature; "N:M", such as
#: "2:4": N of every M neighbouring weights of a row, the pattern that the sparse units of GPUs multiply
Scope = str

_PATTERN = re.compile(r"([1-9]\d*):([1-9]\d*)")


def checked_scope(scope: str) -> str:
    """`scope`, if it is one; otherwise an error that says what there is."""
    pattern = pattern_of(scope) if isinstance(scope, str) else None
    if scope not in ("global", "matrix", "row") and (pattern is None or pattern[0] >= pattern[1]):
        raise ValueError(
            f"scope must be 'global', 'matrix', 'row', or a pattern such as '2:4' (2 of every 4 stay), got {scope!r}"
        )
    return scope


def pattern_of(scope: Scope) -> tuple[int, int] | None:
    """N and M of a scope "N:M"; `None` for the others."""
    found = _PATTERN.fullmatch(scope)
    return None if found is None else (int(found[1]), int(found[2]))


def check_share(scope: Scope, keep: float) -> None:
    """Raise an error if a final share of `keep` is not what the pattern leaves."""
    pattern = pattern_of(scope)
    share = keep if pattern is None else pattern[0] / pattern[1]
    if abs(keep - share) > 1e-6:
        raise ValueError(f"scope {scope} keeps {share:g} of the weights, but keep is {keep:g}; write keep {share:g}")
