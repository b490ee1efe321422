"""What a module computes, but for its numbers: modules with equal outlines are tried once for all of them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from platon.deploy.packed import Packed
from platon.engine.module_hook import ModuleHook
from platon.engine.proof.replica import PLACES

OWN = frozenset(vars(nn.Module()))  # what every module holds: its tensors, its modules and its hooks
HOOKS = tuple(key for key in OWN if key.endswith(("hooks", "hooks_with_kwargs", "hooks_always_called")))
_LEFT_OUT = OWN | set(PLACES)
_CAPTURING = "transformers.utils.output_capturing"
_GLOBAL_HOOKS = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)


def outline(module: nn.Module, without: str | None = None) -> Hashable:
    """Classes, shapes, settings and all objects that a module and those inside it hold.

    Objects of other kinds than numbers and texts are the same only if they are one object, so that nothing that could
    decide what is computed is overlooked. Valid as long as the module lives.

    Args:
        module: the outer one.
        without: an attribute of the outer one that does not count.
    """
    inside = [("", module)]
    for name, one in inside:  # grows; `named_modules` takes three times as long, and models have hundreds of modules
        inside += [(f"{name}.{key}", child) for key, child in one._modules.items() if child is not None]
    return tuple((name, type(one), _contents(one, without if one is module else None)) for name, one in inside)


def is_hooked(module: nn.Module) -> bool:
    """Whether a copy of the module has hooks that do something in its forward pass."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(isinstance(hook, ModuleHook) for hook in hooks)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody waits for what goes into a module or comes out of it at this moment."""
    return _is_waiting(module._forward_hooks) or _is_waiting(module._forward_pre_hooks)


def _is_waiting(hooks: Mapping[int, Any]) -> bool:
    return any(not _is_idle(hook) or (_is_capturing() and not isinstance(hook, ModuleHook)) for hook in hooks.values())


def _is_idle(hook: Any) -> bool:
    """Whether a hook mostly does nothing.

    Those of transformers stay on modules once hidden states were asked for; those of a training stay on copies.
    """
    return (hook.call is None) if isinstance(hook, ModuleHook) else getattr(hook, "__module__", None) == _CAPTURING


def _is_capturing() -> bool:
    """Whether hidden states or attention maps are asked for in this call; the hooks of transformers do nothing else."""
    collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    return collector is None or bool(collector.get())


class Wiring:
    """Remembers the modules inside a module, to tell whether one was replaced since, or is watched.

    Hooks of the module itself do not count: whoever calls it runs them.
    """

    def __init__(self, module: nn.Module) -> None:
        _, *inner = inside = list(module.modules())
        self._held = [one._modules for one in inside]
        self._hooks = [hooks for one in inner for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._children = self._read()

    @classmethod
    def joined(cls, wirings: Sequence[Wiring]) -> Wiring:
        """What several modules held when each of them was looked at."""
        found = cls.__new__(cls)
        found._held = [one for wiring in wirings for one in wiring._held]
        found._hooks = [one for wiring in wirings for one in wiring._hooks]
        found._children = [one for wiring in wirings for one in wiring._children]
        return found

    def is_intact(self) -> bool:
        if any(self._hooks) and any(map(_is_waiting, self._hooks)):  # mostly there are no hooks
            return False
        return not any(_GLOBAL_HOOKS) and self._read() == self._children

    def _read(self) -> list[nn.Module | None]:
        return list(itertools.chain.from_iterable(map(dict.values, self._held)))


def _contents(module: nn.Module, without: str | None) -> Hashable:
    if isinstance(module, Packed):
        return module.outline()
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = tuple((key, tensor if tensor is None else (tensor.shape, tensor.dtype)) for key, tensor in tensors)
    held = vars(module)
    settings = tuple((key, _mark(value)) for key, value in held.items() if key not in _LEFT_OUT and key != without)
    hooks = [one for key in HOOKS if (one := held.get(key)) and not all(map(_is_idle, one.values()))]
    return shapes, settings, tuple(map(id, hooks))


def _mark(value: Any) -> Hashable:
    if isinstance(value, bool | int | float | str | None):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_mark(one) for one in value)
    return id(value)
