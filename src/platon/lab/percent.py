"""Shares in words: the one place that prints them, for runs, commands and reports."""


def percent(share: float, digits: int | None = 1) -> str:
    """A share in percent, with so many decimals; `None`: as many as it needs, at most six digits in all."""
    return f"{100 * share:g} %" if digits is None else f"{100 * share:.{digits}f} %"
