"""The names of the methods, known before torch is imported; `engine/methods.py` says what they mean."""

import sys

UNPRUNED = ("dense", "hold")  #: methods that train without pruning
NAMES: tuple[str, ...] = (
    *("platon", "magnitude", "wanda", "movement", "soft-movement", "l0", "sensitivity", "uncertainty", "ratio"),
    *UNPRUNED,
)


def method_names() -> tuple[str, ...]:
    """All names that are known so far: a program may have added methods of its own to those here."""
    loaded = sys.modules.get("platon.engine.methods")
    return NAMES if loaded is None else tuple(loaded.METHODS)
