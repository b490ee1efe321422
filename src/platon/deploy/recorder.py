"""The computed buffers of a model on the meta device: the calls that made them are recorded, and repeated for real.

Buffers that are not stored, such as positions, are computed while a model is built. A model that was built on the meta
device has their shapes alone, and building it a second time takes as long as the first time. The few calls that made
the buffers take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, PreTrainedConfig

from platon.deploy.outline import HOOKS, OWN

_PLAIN = frozenset(
    (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.layout, torch.memory_format)
)
_SETTLED = (type, BuiltinFunctionType, Enum, PreTrainedConfig, GenerationConfig)
# What code may decide by, and what is another one on the meta device.
_TELLING = tuple(getattr(torch.Tensor, name).__get__ for name in ("device", "is_meta", "is_cpu"))


class _Unknown(Exception):  # noqa: N818  # never leaves this file
    pass


class _Call(NamedTuple):
    """One call of a function of PyTorch."""

    function: Callable[..., Any]
    arguments: tuple[Any, Any] | None  # positional and named; `None`: they may have changed since
    made: Any

    def tensors(self) -> set[int]:
        """The ids of its tensors and the addresses of their memory, which others may share."""
        found = list(_tensors((self.arguments, self.made)))
        return {*map(id, found), *(tensor.untyped_storage()._cdata for tensor in found)}


class Recorder(TorchFunctionMode):
    """Remembers the calls of PyTorch's functions.

    To be entered after `torch.device("meta")`: calls then come here first, as they were written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._was_asked = False  # for the device of a tensor: another one might have been built for real

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.empty:  # nearly all calls, for parameters; a buffer that is made of one is not known
            return made
        if func.__name__ == "__get__" or isinstance(made, int | torch.Size):  # a tensor was only looked at
            self._was_asked |= func in _TELLING
            if not isinstance(made, Tensor):
                return made
        try:
            arguments = _copied(args), _copied(kwargs or {})
        except _Unknown:
            arguments = None
        self._calls.append(_Call(func, arguments, made))
        return made

    def fill(self, model: nn.Module, names: Iterable[str]) -> bool:
        """Give these buffers of a model that was built meanwhile the numbers that they have on the CPU.

        Returns:
            Whether that is all there is to do: `False`, and nothing is changed, unless it is certain that the model
            would be the same, had it been built on the CPU, but for the other tensors that are registered in it.
        """
        wanted, modules = [model.get_buffer(name) for name in names], list(model.modules())
        if self._was_asked or not all(map(_is_settled, modules)):
            return False
        try:
            made = self._repeat({id(buffer) for buffer in wanted if buffer.is_meta})
        except _Unknown:
            return False
        for module in modules:
            for key, buffer in module._buffers.items():
                module._buffers[key] = made.get(id(buffer), buffer)
        return True

    def _repeat(self, wanted: set[int]) -> Mapping[int, Tensor]:
        """What the calls make of the tensors with these ids, and of all that these have to do with, by id."""
        if not wanted:
            return {}
        made: dict[int, Tensor] = {}
        for call in self._calls_with(wanted):
            if call.arguments is None:
                raise _Unknown
            args, kwargs = _exchanged(call.arguments, made)
            results = call.function(*args, **kwargs)
            for before, now in zip(_tensors(call.made), _tensors(results), strict=True):
                if (before.shape, before.dtype) != (now.shape, now.dtype) or now.is_meta:
                    raise _Unknown
                made[id(before)] = now
        if not wanted <= made.keys():
            raise _Unknown
        return made

    def _calls_with(self, wanted: set[int]) -> list[_Call]:
        """All calls with one of these tensors, or with a tensor that was in a call with one, and so on."""
        linked = [(call, call.tensors()) for call in self._calls]
        found, before = set(wanted), 0
        while len(found) > before:
            before = len(found)
            for _, tensors in linked:
                if not found.isdisjoint(tensors):
                    found |= tensors
        return [call for call, tensors in linked if not found.isdisjoint(tensors)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _copied(value: Any) -> Any:
    """Arguments as they are now: lists are copied, and what else could change is not known."""
    if isinstance(value, tuple | list):
        return tuple(map(_copied, value)) if isinstance(value, tuple) else list(map(_copied, value))
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, slice):
        return slice(_copied(value.start), _copied(value.stop), _copied(value.step))
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return value
    raise _Unknown


def _exchanged(value: Any, made: Mapping[int, Tensor]) -> Any:
    """Arguments with the tensors that were made for real; one that is not among them came from elsewhere."""
    if isinstance(value, Tensor):
        if id(value) not in made:
            raise _Unknown
        return made[id(value)]
    if isinstance(value, tuple | list):
        return type(value)(_exchanged(one, made) for one in value)
    if isinstance(value, dict):
        return {key: _exchanged(one, made) for key, one in value.items()}
    return value


def _is_settled(module: nn.Module) -> bool:
    """Whether a module holds nothing but registered tensors and modules that the meta device could have changed."""
    held = vars(module)
    return all(_is_plain(held[key]) for key in held.keys() - OWN) and not any(held[key] for key in HOOKS)


def _is_plain(value: Any) -> bool:
    """Whether a value holds no tensors."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return type(value) in _PLAIN or isinstance(value, _SETTLED)
