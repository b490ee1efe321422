"""Whole numbers that modules keep and that may count units; which of them change with a cut is found by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, islice

from torch import nn

from platon.engine.proof.pattern import Number, Pattern
from platon.engine.topology import weights_of

_MOST_TRIES = 64


def sets_of_numbers(
    block: nn.Module, pattern: Pattern, matters: Callable[[Number], bool]
) -> Iterator[tuple[Number, ...]]:
    """Sets of numbers to change, one after another: all that may count units, then fewer.

    The module's own numbers come first, then those of its configuration too: a module that reads its configuration in
    the forward pass gets one of its own.

    Args:
        block: a copy.
        pattern: whose `sizes` are numbers that may count units or their features.
        matters: whether another value of a number changes what the block computes. One that changes nothing here may
            matter on longer inputs, or have its value by chance; it changes only if it is named after heads.
    """
    for numbers in (_numbers(block, pattern, False), _numbers(block, pattern, True)):
        decisive = [number for number in numbers if matters(number)]
        others = tuple(n for n in numbers if n not in decisive and "heads" in n.attribute)
        sets = (some for size in range(len(decisive), -1, -1) for some in combinations(decisive, size))
        yield from (others + some for some in islice(sets, _MOST_TRIES))


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
