"""Whole numbers that modules keep and that may count units; which of them change with a cut is found by trying."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from torch import nn

from platon.engine.pattern import Number, Pattern
from platon.engine.topology import weights_of

_MOST_TRIES = 32


def sets_of_numbers(block: nn.Module, pattern: Pattern) -> Iterator[tuple[Number, ...]]:
    """Sets of numbers to change, one after another: all that may count, then fewer; then with the configuration's.

    A module that reads its configuration in the forward pass gets one of its own.
    """
    for numbers in (_numbers(block, pattern, False), _numbers(block, pattern, True)):
        tries = 0
        for left_out in range(len(numbers) + 1):
            for some in combinations(numbers, len(numbers) - left_out):
                if tries < _MOST_TRIES:
                    yield some
                tries += 1
            if tries >= _MOST_TRIES:
                break


def _numbers(block: nn.Module, pattern: Pattern, with_configuration: bool) -> list[Number]:
    """Attributes around the matrices whose value is one of the pattern's sizes; those named after heads come first."""
    found: list[Number] = []
    for path, module in block.named_modules():
        if not _is_around(path, pattern.core) or type(module).__module__.startswith("torch.nn") or weights_of(module):
            continue
        for key, value in vars(module).items():
            places = enumerate(value) if type(value) in (list, tuple) else ((None, value),)
            found += [Number(path, key, place, one) for place, one in places if _may_count(key, one, pattern)]
        config = getattr(module, "config", None)
        if with_configuration and config is not None and path == pattern.core:
            for key, value in vars(config).items():
                if _may_count(key, value, pattern):
                    found.append(Number(path, f"config.{key}", None, value))
    return sorted(found, key=lambda number: "head" not in number.attribute)


def _is_around(path: str, core: str) -> bool:
    """Whether a module is the innermost one with the matrices, inside it, or one that holds it."""
    return f"{path}.".startswith(f"{core}.") or f"{core}.".startswith(f"{path}.") or not path or not core


def _may_count(key: str, value: object, pattern: Pattern) -> bool:
    return (
        type(value) is int
        and not key.startswith("_")
        and value in pattern.sizes
        and value > 1
        and value % pattern.count == 0
    )
