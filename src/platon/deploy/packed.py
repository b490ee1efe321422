"""Modules that are saved as the arrays that they compute with: described when a model is saved, rebuilt when it is
loaded.

A sparsified model is a model of transformers in which some modules were replaced. Storage knows none of their classes:
each `Packed` module says how it is written to a manifest, and its class builds it again. To add one, write a subclass
and name it in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Self

from torch import nn

Shapes = Mapping[str, tuple[int, ...]]
Description = Mapping[str, Any]

NOTHING = "nothing"  # the kind of a module whose work another one does now, such as an activation


class Packed(nn.Module):
    """A module that takes the place of another one, for inference; its buffers are what is stored of it."""

    kind: ClassVar[str]  # its name in a manifest
    rounded: ClassVar[tuple[str, ...]] = ()  # buffers that may be stored in half precision

    def portable(self) -> Packed:
        """What is stored of it: a module that every machine can load."""
        return self

    def description(self) -> dict[str, int | str]:
        """What it is built from, besides its buffers."""
        raise NotImplementedError

    def outline(self) -> Hashable:
        """What it computes, but for the numbers in its buffers."""
        there = tuple(key for key, buffer in self._buffers.items() if buffer is not None)
        return self.kind, tuple(self.description().items()), there

    @classmethod
    def unfilled(cls, description: Description, shapes: Shapes) -> Self:
        """A module with this description, whose buffers of these shapes have no memory (the meta device).

        Both come from a file: what cannot be is refused with a `ValueError`.
        """
        raise NotImplementedError

    @classmethod
    def replaced(cls, description: Description, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of the module that it replaces, matrices as [outputs, inputs]."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """What is wrong with the contents of its buffers; `None`: nothing."""
        raise NotImplementedError

    def checked(self) -> str | None:
        """The same; a module that checks itself when it is called may remember that it was checked."""
        return self.problem()

    def runnable(self) -> nn.Module:
        """What computes the same on this machine."""
        return self


def size(description: Description, key: str, least: int = 0, most: int = (1 << 32) - 1) -> int:
    """A number of a description, checked."""
    found = description.get(key)
    if type(found) is not int or not least <= found <= most:
        raise ValueError(f"the manifest is damaged: {key!r} of a packed module is {found!r}")
    return found
