"""Units: which weights live or die together. Here each weight is one by itself."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from platon.engine.topology import matrices

Patterns = str | Sequence[str]


@dataclass(frozen=True)
class Units:
    """The prunable matrices of a model, by name; each weight is a unit."""

    matrices: Mapping[str, nn.Parameter]

    @property
    def count(self) -> int:
        """All prunable weights."""
        return sum(matrix.numel() for matrix in self.matrices.values())

    def __repr__(self) -> str:
        """How many weights in how many matrices."""
        return f"weights({self.count:,} in {len(self.matrices)} matrices)"


def weights(model: nn.Module, include: Patterns | None = None, exclude: Patterns | None = None) -> Units:
    """Every weight of the linear layers inside the transformer blocks.

    Embeddings, norms, biases, poolers and heads stay as they are. Shared matrices count once, frozen ones not at all.

    Args:
        model: any module; one without transformer blocks gives all its linear weights but the last, with a warning.
        include: prune only what matches one of these: a glob pattern on the whole name (`*.query.weight`), or a part of
            the dotted name (`attention.self`).
        exclude: leave out what matches one of these.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; the model comes first")
    found = {plain_name(name): matrix for name, matrix in matrices(model).items()}
    if include is not None:
        chosen = _matching(found, include)
        found = {name: matrix for name, matrix in found.items() if name in chosen}
    if exclude is not None:
        left_out = _matching(found, exclude)
        found = {name: matrix for name, matrix in found.items() if name not in left_out}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no prunable matrix left; give a model with trainable linear layers, "
            "a wider include or a narrower exclude"
        )
    return Units(found)


def plain_name(name: str) -> str:
    """A parameter's name without what `torch.compile` and data-parallel wrappers put in front of it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _matching(names: Iterable[str], patterns: Patterns) -> set[str]:
    names = list(names)
    matching: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = {name for name in names if _matches(name, pattern)}
        if not found:
            raise ValueError(f"no parameter matches {pattern!r}; nearest: {_nearest(pattern, names)!r}")
        matching |= found
    return matching


def _matches(name: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def _nearest(pattern: str, names: Sequence[str]) -> str:
    # A user writes a part of a name, so every tail of every name is offered for comparison.
    tails = {
        ".".join(parts[start:]): None for name in names for parts in [name.split(".")] for start in range(len(parts))
    }

    def likeness(tail: str) -> float:
        # The beginning counts most: 'attention.slf' means 'attention.self.query.weight' and not 'attention.output'.
        return difflib.SequenceMatcher(None, pattern, tail[: len(pattern) + 1]).ratio()

    return max(tails, key=likeness, default="")
