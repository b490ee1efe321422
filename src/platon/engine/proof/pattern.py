"""How the units of one group lie in a block: places of its tensors, and what else of its modules counts units."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Side:
    """The units along one dimension of one tensor of the block.

    Args:
        path: the name of the parameter, buffer or attribute, from the block.
        dim: the dimension.
        unit: int64, the unit of each place along it; -1: none.
    """

    path: str
    dim: int
    unit: Tensor

    @property
    def module(self) -> str:
        """The path of the module that holds the tensor."""
        return self.path.rpartition(".")[0]

    def places(self, kept: Tensor) -> Tensor:
        """Where the kept units, and what belongs to none, are; `kept` is a mask of units."""
        return (kept[self.unit.clamp(min=0)] | (self.unit < 0)).nonzero().view(-1)

    def cut(self, kept: Tensor) -> Side:
        """The same side when only these units are left."""
        return replace(self, unit=self.without(kept).unit[self.places(kept)])

    def without(self, kept: Tensor) -> Side:
        """The same places when only these units are left; those of the others belong to none."""
        number = torch.where(kept, kept.cumsum(0) - 1, -1)
        return replace(self, unit=torch.where(self.unit < 0, -1, number[self.unit.clamp(min=0)]))


@dataclass(frozen=True)
class Input:
    """A tensor given to a module from outside, with a part for each unit: a bias of the scores by head, ALiBi.

    Args:
        module: path of the module that takes it, from the block.
        key: position or name of the argument.
        dim: the dimension of the units.
        unit: the unit of each place of one period; the dimension holds one period or more.
        made: the module makes the tensor if it is given none, and gives it on.
    """

    module: str
    key: int | str
    dim: int
    unit: Tensor
    made: bool = False


@dataclass(frozen=True)
class Number:
    """A whole number that a module keeps and that shrinks with the units.

    Args:
        module: path of the module, from the block.
        attribute: its name; behind a dot, an attribute of the module's configuration.
        place: the index, where the attribute is a list or tuple.
    """

    module: str
    attribute: str
    place: int | None
    value: int


@dataclass(frozen=True)
class Pattern:
    """The units of one group, as they lie in a block.

    Args:
        kind: "heads" or "neurons".
        module: path of the module that the group is named after, from the block.
        core: path of the innermost module that holds all its matrices.
        count: how many units.
        writers: matrices whose rows make the units' features.
        reader: the matrix whose columns take them in.
        extras: other tensors with a place for each unit, cut along with the matrices: biases, tables.
        norms: modules of `extras` that divide by a mean over all units; they are rescaled.
        inputs: tensors from outside with a part for each unit.
        numbers: what has to be changed when units go.
        sizes: whole numbers that might count the units or their features.
        swaps: paths of modules whose class has to change, since theirs cannot have fewer heads.
        padded: the block computes with as many units as before: the writers make zeros for those that went.
    """

    kind: str
    module: str
    core: str
    count: int
    writers: tuple[Side, ...]
    reader: Side
    extras: tuple[Side, ...] = ()
    norms: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    numbers: tuple[Number, ...] = ()
    sizes: frozenset[int] = frozenset()
    swaps: tuple[str, ...] = ()
    padded: bool = False

    @property
    def matrices(self) -> tuple[Side, ...]:
        """The prunable ones, the reader last."""
        return (*self.writers, self.reader)

    def cut(self, kept: Tensor) -> Pattern:
        """The pattern of the block when only these units are left."""
        left = int(kept.sum())
        if self.padded:
            writers = tuple(side.cut(kept) for side in self.writers)
            return replace(self, count=left, writers=writers, reader=self.reader.without(kept))

        def scaled(value: int) -> int:
            return value * left // self.count

        return replace(
            self,
            count=left,
            writers=tuple(side.cut(kept) for side in self.writers),
            reader=self.reader.cut(kept),
            extras=tuple(side.cut(kept) for side in self.extras),
            inputs=tuple(replace(given, unit=Side("", 0, given.unit).cut(kept).unit) for given in self.inputs),
            numbers=tuple(replace(number, value=scaled(number.value)) for number in self.numbers),
            sizes=frozenset(scaled(value) for value in self.sizes),
        )
