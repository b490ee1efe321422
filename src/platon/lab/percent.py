"""Shares in words."""


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, with so many decimals."""
    return f"{100 * share:.{digits}f} %"
