"""All layers of an encoder in one call of the kernel, which saves the time that Python takes between them.

Whether a module gives its tokens to its layers, one after the other and with the same mask, and does nothing else with
them, is seen at each call: its own `forward` runs with stand-ins for the layers, which only compare what they are
given, and with an object in place of the tokens that nothing can be computed from. The last stand-in computes all
layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from platon.deploy.encoder_call import Arguments, EncoderCall
from platon.deploy.encoder_layer import EncoderLayer
from platon.deploy.inference_layer import change_count
from platon.deploy.outline import is_watched


class _Tokens:
    """Goes through the stand-ins in place of the tokens."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.passed = 0  # layers that it went through
        self.mask: tuple[Any, int | None] = (None, None)  # that the first layer was given, and how often it was changed


class _OtherwiseError(Exception):
    """The module does not just pass the tokens on, or the kernel cannot compute these."""


class _StandIn:
    """Takes the place of one layer for a call. What else it is asked, the layer answers."""

    def __init__(self, stack: EncoderStack, place: int) -> None:
        self.stack, self.place, self.layer = stack, place, stack.layers[place].parts.module
        self.arguments = Arguments(self.layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tokens, mask = self.arguments.read(args, kwargs) or (None, None)
        if not isinstance(tokens, _Tokens) or tokens.passed != self.place:
            raise _OtherwiseError
        seen = mask, change_count(mask) if isinstance(mask, Tensor) else None
        if not self.place:
            tokens.mask = seen
        if seen[0] is not tokens.mask[0] or seen[1] != tokens.mask[1]:
            raise _OtherwiseError
        tokens.passed += 1
        return tokens if tokens.passed < len(self.stack.layers) else self.stack.compute(tokens.x, mask)

    def __getattr__(self, name: str) -> Any:
        if "layer" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.layer, name)


class EncoderStack:
    """The `forward` of a module that holds encoder layers in a list.

    A call that asks for more than tokens and a mask, or in which the module does more than to pass the tokens on, is
    left to the module's own `forward` with its own layers.
    """

    def __init__(self, module: nn.Module, name: str, layers: Sequence[EncoderLayer]) -> None:
        self.module, self.name, self.layers = module, name, list(layers)
        self._call = EncoderCall.joined([layer.call for layer in layers])
        self._arguments = Arguments(module)
        self._modules = [layer.parts.module for layer in layers]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x, mask = self._arguments.read(args, kwargs) or (None, None)
        if self._call.takes(x) and self._is_plain():
            with contextlib.suppress(Exception):  # whatever a module says to an object that is no tensor
                return self._passed_on(x, mask, args, kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @functools.cached_property
    def _stand_ins(self) -> list[_StandIn]:
        """Made at the first call: loading a model does not pay for them. No modules, whose calls take as long again."""
        return [_StandIn(self, place) for place in range(len(self.layers))]

    def _is_plain(self) -> bool:
        """Whether the module still has these layers, in their order, and nobody waits for what goes through them."""
        held = self.module._modules.get(self.name)
        if held is None or list(held._modules.values()) != self._modules or any(map(is_watched, self._modules)):
            return False
        return [vars(one).get("forward") for one in self._modules] == self.layers

    def _passed_on(self, x: Tensor, mask: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module's own `forward` makes of the last layer's result."""
        tokens = _Tokens(x)
        # A copy, because the module may write to its mask before it turns out that it does more than pass tokens on.
        copies = {id(x): tokens, id(mask): mask.clone() if isinstance(mask, Tensor) else mask}
        held = {**vars(self.module), "_modules": {**self.module._modules, self.name: self._stand_ins}}
        twin = object.__new__(type(self.module))
        twin.__dict__.update(held)
        own = [copies.get(id(one), one) for one in args]
        found = type(self.module).forward(twin, *own, **{key: copies.get(id(one), one) for key, one in kwargs.items()})
        if tokens.passed < len(self.layers) or not _is_plain_output(found) or vars(twin) != held:
            raise _OtherwiseError
        return found

    def compute(self, x: Tensor, mask: Any) -> Tensor:
        """What the last layer makes of tokens."""
        guesses = [guess for layer in self.layers if (guess := layer.guess(x.shape[1])) is not None]
        found = self._call.answer(x, mask, guesses) if len(guesses) == len(self.layers) else None
        if found is None:
            raise _OtherwiseError
        return found


def join_layers(model: nn.Module) -> None:
    """Let layers that are each computed in one call, and lie in one list, be computed in one call together."""
    for module in list(model.modules()):
        for name, held in module._modules.items():
            layers = [vars(one).get("forward") for one in held] if isinstance(held, nn.ModuleList) else []
            found = [layer for layer in layers if isinstance(layer, EncoderLayer)]
            if len(layers) > 1 and len(found) == len(layers) and "forward" not in vars(module):
                module.__dict__["forward"] = EncoderStack(module, name, found)


def _is_plain_output(found: Any) -> bool:
    """Whether an output consists of tensors and numbers alone: what stood in for the tokens is not in it."""
    if isinstance(found, Mapping):
        return all(map(_is_plain_output, found.values()))
    if isinstance(found, tuple | list):
        return all(map(_is_plain_output, found))
    if dataclasses.is_dataclass(found):
        return all(map(_is_plain_output, vars(found).values()))
    return found is None or isinstance(found, Tensor | bool | int | float | str)
