"""Whole encoder layers in one call of the kernel: queries, keys and values, attention, and two sums with a norm.

For one short text the modules of a layer, and what lies between them, take longer than its arithmetic. Which modules
do what is a guess from what a layer holds, which a trial on random tokens has to confirm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy.encoder_call import MASK, Arguments, EncoderCall, Parts
from platon.deploy.layer import SparseLinear
from platon.deploy.outline import Wiring
from platon.deploy.sparse_sum import SparseSum, parts_of
from platon.deploy.trial import ROWS, Guess, Guessed, Trials


class EncoderLayer(Guessed):
    """The `forward` of a layer that computes h = norm(out(attention(x)) + x), and then norm(feed_forward(h) + h).

    A call that asks for more, or whose modules have hooks or were replaced, is left to the module's own `forward`; so
    are all calls if no trial confirmed what the layer computes.
    """

    def __init__(self, parts: Parts, trials: Trials) -> None:
        super().__init__(parts.module, parts.inward, trials)
        self.parts = parts
        self.call = EncoderCall([parts], Wiring(parts.module))
        self._arguments = Arguments(parts.module)

    def is_intact(self) -> bool:
        return self.call.is_intact()

    def used(self) -> Sequence[nn.Module]:
        return [*self.parts.inward, *self.parts.onward, *self.parts.norms]

    def cases(self, guess: Guess, length: int, random: torch.Generator) -> list[dict[str, Tensor]]:
        """Without a mask, and with one."""
        return [{}, {MASK: torch.rand(ROWS, 1, length, length, generator=random) < 0.5}]

    def answer(self, x: Tensor, guess: Guess, **asked: Tensor) -> Tensor | None:
        return self.call.answer(x, asked.get(MASK), [guess])

    def tokens_of(self, output: Any) -> Tensor | None:
        return output if isinstance(output, Tensor) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x, mask = self._arguments.read(args, kwargs) or (None, None)
        if self.call.takes(x) and (guess := self.guess(x.shape[1])) is not None:
            found = self.call.answer(x, mask, [guess])
            if found is not None:
                return found
        return self.original(*args, **kwargs)


def shorten_layers(model: nn.Module) -> None:
    """Let the layers of an encoder be computed at once where a trial will show that this is the same."""
    trials = Trials()
    for module in _candidates(model):
        parts = _find_parts(module)
        if parts is not None:
            module.__dict__["forward"] = EncoderLayer(parts, trials)


def _candidates(model: nn.Module) -> list[nn.Module]:
    """The modules that hold two sums, and no smaller module that does; a `forward` that somebody else set stays."""
    held: dict[nn.Module, int] = {}
    found = []
    for module in reversed(list(model.modules())):  # children before their parents
        inside = [held.get(child, 0) for child in module.children()]
        held[module] = int(isinstance(module, SparseSum)) + sum(inside)
        if held[module] == 2 and max(inside, default=0) < 2 and "forward" not in vars(module):
            found.append(module)
    return found


def _find_parts(module: nn.Module) -> Parts | None:
    """Three layers that read the same tokens, those after them, and two norms, if a module has these and no others."""
    inside = list(module.modules())
    layers = [one for one in inside if isinstance(one, SparseLinear)]
    leaders = [one for one in layers if one.siblings]
    sums = [parts_of(one) for one in inside if isinstance(one, SparseSum)]
    norms = [norm for _, norm in sums if norm is not None]
    if len(sums) != 2 or len(norms) != 2 or len(leaders) != 1 or len(leaders[0].siblings) != 2:
        return None
    (first, _), (last, _) = sums
    inward, onward = [leaders[0], *leaders[0].siblings], [first, *last.before, last]
    fits = {*inward, *onward} == set(layers) and not first.before and len(last.before) < SparseLinear.most_siblings
    return Parts(module, inward, onward, norms) if fits else None
