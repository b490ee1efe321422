"""Imports of torch, transformers and what they need, in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Do not search for garbage while large packages are imported.

    They make hundreds of thousands of objects that stay, and the collector would go through them again and again: a
    quarter of the time that the imports of `platon prune` take.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
