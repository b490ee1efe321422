"""Units: which weights live or die together: each by itself, or groups of them."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from platon.engine.proof import discovery
from platon.engine.schedule import checked_count
from platon.engine.slices import Group, Index, Slice
from platon.engine.topology import inputs_first, matrices

Patterns = str | Sequence[str]


@dataclass(frozen=True)
class Units:
    """What is pruned: every weight of some matrices, or groups of units that are slices of them.

    Groups can be added: `heads(model) + neurons(model)`.

    Args:
        matrices: the prunable matrices of a model, by name.
        groups: the groups in them; without any, each weight is a unit.
        name: what the units are called.
    """

    matrices: Mapping[str, nn.Parameter]
    groups: tuple[Group, ...] = ()
    name: str = "weights"

    @property
    def count(self) -> int:
        """All prunable weights."""
        if self.groups:
            return sum(int(group.sizes.sum()) for group in self.groups)
        return sum(matrix.numel() for matrix in self.matrices.values())

    def __add__(self, other: "Units") -> "Units":
        if not isinstance(other, Units):
            return NotImplemented
        if not self.groups or not other.groups:
            raise ValueError(f"{self.name} and {other.name} do not add up; only groups (heads, neurons, …) do")
        shared = next((name for name in self.matrices if name in other.matrices), None)
        if shared is not None:
            raise ValueError(f"{self.name} and {other.name} both have weights of {shared!r}; choose one of them for it")
        return Units({**self.matrices, **other.matrices}, self.groups + other.groups, f"{self.name} + {other.name}")

    def __repr__(self) -> str:
        if not self.groups:
            return f"{self.name}({self.count:,} in {len(self.matrices)} matrices)"
        units = sum(group.count for group in self.groups)
        return f"{self.name}({units:,} of {self.count:,} weights in {len(self.matrices)} matrices)"


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
    names = list(found) if include is None else _matching(list(found), include)
    left_out = [] if exclude is None else _matching(names, exclude)
    chosen = {name: found[name] for name in names if name not in left_out}
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no prunable matrix left; give a model with trainable linear layers, "
            "a wider include or a narrower exclude"
        )
    return Units(chosen)


def columns(model: nn.Module, include: Patterns | None = None, exclude: Patterns | None = None) -> Units:
    """The paper's groups: all weights of a matrix that read one input feature.

    Args:
        model: as for `weights`.
        include: as for `weights`.
        exclude: as for `weights`.
    """
    return _rectangles(model, weights(model, include, exclude), (None, 1), "columns")


def blocks(
    model: nn.Module, shape: tuple[int, int], include: Patterns | None = None, exclude: Patterns | None = None
) -> Units:
    """Rectangles of a matrix; those at its edges may be smaller.

    Args:
        model: as for `weights`.
        shape: outputs and inputs of a block, such as (32, 32).
        include: as for `weights`.
        exclude: as for `weights`.
    """
    if len(shape) != 2 or not all(isinstance(side, int) and side > 0 for side in shape):
        raise ValueError(f"shape must be two whole numbers above 0, got {shape!r}; (32, 32) is usual")
    return _rectangles(model, weights(model, include, exclude), shape, f"blocks of {shape[0]}×{shape[1]}")


def _rectangles(model: nn.Module, flat: Units, shape: tuple[int | None, int], kind: str) -> Units:
    """Rectangles of so many outputs and inputs; `None`: all outputs. Each matrix is a group."""
    transposed = inputs_first(model)
    groups = []
    for name, matrix in flat.matrices.items():
        if not matrix.numel():
            raise ValueError(f"{name!r} has no weights, its shape is {tuple(matrix.shape)}; leave it out with exclude")
        rows, columns = (
            None if side is None else Index(torch.arange(length) // side, -(-length // side))
            for length, side in zip(matrix.shape, shape[::-1] if id(matrix) in transposed else shape, strict=True)
        )
        part = Slice(name, matrix, rows, columns)
        groups.append(Group(name, len(part.sizes), (part,)))
    return Units(flat.matrices, tuple(groups), kind)


def heads(model: nn.Module, spare: int = 1) -> Units:
    """Attention heads: the query, key, value and output weights of one; grouped-query attention by key-value group.

    Args:
        model: any transformer whose heads can be proved (docs/architectures.md); others are refused with the reason.
        spare: so many heads of each layer stay whatever their score; 0 lets a layer lose all.
    """
    return _units(discovery.heads(model), spare, "heads")


def neurons(model: nn.Module, spare: int = 1) -> Units:
    """Feed-forward neurons: the weights that write one hidden feature and those that read it.

    Args:
        model: any transformer whose neurons can be proved; others are refused with the reason.
        spare: so many neurons of each layer stay whatever their score; 0 lets a layer lose all.
    """
    return _units(discovery.neurons(model), spare, "neurons")


def _units(proved: Sequence[Group], spare: int, name: str) -> Units:
    checked_count(spare, "spare")
    found: dict[str, nn.Parameter] = {}
    groups = []
    for group in proved:
        if not all(part.parameter.requires_grad for part in group.slices):
            continue  # a frozen matrix cannot lose weights, and neither can the matrices that its units span
        slices = tuple(replace(part, name=plain_name(part.name)) for part in group.slices)
        found |= {part.name: part.parameter for part in slices}
        groups.append(Group(f"{plain_name(group.name)} {name}", group.count, slices, spare))
    if not groups:
        raise ValueError(f"the model has no {name} that are trained in full; unfreeze the matrices that they lie in")
    return Units(found, tuple(groups), name)


def plain_name(name: str) -> str:
    """A parameter's name without what `torch.compile` and data-parallel wrappers put in front of it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _matching(names: Sequence[str], patterns: Patterns) -> list[str]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(f"no parameter matches {pattern!r}; nearest: {_nearest(pattern, names)!r}")
    return [name for name in names if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def _nearest(pattern: str, names: Sequence[str]) -> str:
    # A user writes a part of a name, so every tail of every name is offered for comparison.
    tails = [".".join(parts[start:]) for parts in (name.split(".") for name in names) for start in range(len(parts))]
    # The beginning counts most: 'attention.slf' means 'attention.self.query.weight' and not 'attention.output'.
    size = len(pattern) + 1
    return max(tails, key=lambda tail: difflib.SequenceMatcher(None, pattern, tail[:size]).ratio(), default="")
