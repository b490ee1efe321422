"""Lets an attention with fewer heads use biases of the scores that are made for all heads.

MPNet and T5 make a bias for each head once and hand it to every layer; BLOOM hands on the slopes of ALiBi. Layers lose
different heads, so the bias stays whole and each attention takes the part of the heads that it has left.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.proof.pattern import Input

CHOSEN = "bias_heads"  # buffer of such a module: the places that it takes; saved with the weights


class Chooser:
    """Hooks of a module: it gets the chosen places of an argument, and gives the whole argument on.

    Args:
        key: position or name of the argument.
        dim: the dimension of the heads.
        period: how many places belong to one row; rows follow one another where rows and heads share a dimension.
    """

    def __init__(self, key: int | str, dim: int, period: int) -> None:
        self.key, self.dim, self.period = key, dim, period
        self._pair: tuple[Tensor, Tensor] | None = None

    def take(self, module: Any, whole: Tensor) -> Tensor:
        """The chosen places."""
        before, after = whole.shape[: self.dim], whole.shape[self.dim + 1 :]
        rows = whole.reshape(*before, -1, self.period, *after).index_select(self.dim + 1, module.bias_heads)
        taken = rows.flatten(self.dim, self.dim + 1)
        self._pair = taken, whole
        return taken

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the forward pass."""
        self._pair = None
        places: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        given = places.get(self.key)
        if not isinstance(given, Tensor) or given.shape[self.dim] % self.period:
            return None
        taken = self.take(module, given)
        if isinstance(self.key, str):
            return args, {**kwargs, self.key: taken}
        return (*args[: self.key], taken, *args[self.key + 1 :]), kwargs

    def give(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After the forward pass: what was taken goes on whole."""
        pair, self._pair = self._pair, None
        if pair is None or not isinstance(output, tuple):
            return None
        return tuple(pair[1] if one is pair[0] else one for one in output)


class Maker(Chooser):
    """The same for T5's attention, which makes the bias if it is given none, and gives it to the next layer."""

    def give(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._pair is None and isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], Tensor):
            # Made of zeros, the same for all heads: cross-attention has no positions.
            whole = (
                output[1]
                .narrow(self.dim, 0, 1)
                .expand(*(self.period if d == self.dim else -1 for d in range(output[1].ndim)))
            )
            return (output[0], whole, *output[2:])
        return super().give(module, args, output)


class Made:
    """In place of a method that makes the bias for all heads: the part of the heads that are left."""

    def __init__(self, module: nn.Module, chooser: Chooser) -> None:
        self.module, self.chooser = module, chooser

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        cls: Any = type(self.module)
        return self.chooser.take(self.module, cls.compute_bias(self.module, *args, **kwargs))


def makes_bias(module: Any) -> bool:
    """Whether a module makes a bias for each head if it is given none, as T5's attention does."""
    return hasattr(module, "compute_bias") and "position_bias" in inspect.signature(module.forward).parameters


def choose(module: Any, given: Input, units: Tensor) -> None:
    """Let a module take these units' part of an argument from now on."""
    places = torch.cat([(given.unit == unit).nonzero().view(-1) for unit in units.tolist()])
    before = getattr(module, CHOSEN, None)
    if before is None:
        chooser = (Maker if given.made else Chooser)(given.key, given.dim, len(given.unit))
        module.register_forward_pre_hook(chooser, with_kwargs=True)
        module.register_forward_hook(chooser.give)
        if given.made:
            module.compute_bias = Made(module, chooser)
    else:  # places of the tensor as it is given, not of what earlier cuts left
        places = before.cpu()[places]
    module.register_buffer(CHOSEN, places.to(next(module.parameters()).device))
