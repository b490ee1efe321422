"""Hooks on the modules of a model, for as long as something is attached to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ModuleHook:
    """A hook that copies of the model are without, whether they are made by `copy.deepcopy` or with pickle.

    What a hook belongs to knows one model. A copy of it, such as a snapshot or what `sparsify` returns, would otherwise
    bring along copies of all that is attached: a teacher, or the graph of the last pass, which cannot be copied.

    Args:
        call: what is called; `None` in a copy, which does nothing.
    """

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook says, if it is not that of a copy."""
        return None if self.call is None else self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        """The hook of a copy."""
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        """The hook of a copy."""
        return ModuleHook, ()


class UncompiledHook(ModuleHook):
    """A hook that runs as it is beside a compiled model: `torch.compile` does not look into it."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook says."""
        return super().__call__(*args, **kwargs)
