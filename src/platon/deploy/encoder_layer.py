"""Whole encoder layers in one call of the kernel: queries, keys and values, attention, and two sums with a norm.

For one short text the modules of a layer, and what lies between them, take longer than its arithmetic. Which modules
do what is a guess from what a layer holds, which a trial on random tokens has to confirm.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from platon.deploy.attention import FEWEST_QUERIES
from platon.deploy.encoder_call import MASK, Arguments, EncoderCall, Guess, Parts
from platon.deploy.layer import SparseLinear
from platon.deploy.outline import Wiring, outline
from platon.deploy.sparse_sum import SparseSum, parts_of

_ROWS, _TOKENS = 2, FEWEST_QUERIES  # of the shortest trial
_LEAST_CHANGE = 2e-3  # of an output, by another attention: a hundred times what is taken for rounding


class Trials:
    """Finds out what the layers of a model compute. One trial tells for all that are alike but for their numbers.

    A layer may do something else with longer texts, such as to attend to near tokens alone. So trials have as many
    tokens as the calls that rely on them, and wait for these: loading a model does not pay for them.
    """

    def __init__(self) -> None:
        self.layers: list[EncoderLayer] = []

    def run(self, tokens: int) -> None:
        length = max(_TOKENS, 1 << (tokens - 1).bit_length())
        groups: dict[Hashable, list[EncoderLayer]] = {}
        for layer in self.layers:
            if layer.call.is_intact():
                groups.setdefault(outline(layer.parts.module, without="forward"), []).append(layer)
        for alike in groups.values():
            # Nearly empty layers attend to all tokens alike, whatever their heads are: the fullest one tells most.
            guess = _confirmed(max(alike, key=lambda layer: layer.parts.fullness), length)
            for layer in alike:
                layer.verdict = guess, length


class EncoderLayer:
    """The `forward` of a layer that computes h = norm(out(attention(x)) + x), and then norm(feed_forward(h) + h).

    A call that asks for more, or whose modules have hooks or were replaced, is left to the module's own `forward`; so
    are all calls if no trial confirmed what the layer computes.
    """

    def __init__(self, parts: Parts, trials: Trials) -> None:
        self.parts, self._trials = parts, trials
        trials.layers.append(self)
        self.verdict: tuple[Guess | None, int] = None, 0  # what a trial confirmed, and its tokens; one, for threads
        self.call = EncoderCall([parts], Wiring(parts.module))
        self._arguments = Arguments(parts.module)

    def guess(self, tokens: int) -> Guess | None:
        """What a trial confirmed for texts of so many tokens; `None`: nothing."""
        if tokens > self.verdict[1]:
            self._trials.run(tokens)
        guess, length = self.verdict
        return guess if tokens <= length else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = self._arguments.read(args, kwargs)
        if asked is not None and self.call.takes(asked[0]) and (guess := self.guess(asked[0].shape[1])) is not None:
            found = self.call.answer(*asked, [guess])
            if found is not None:
                return found
        return self.original(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own `forward`."""
        return type(self.parts.module).forward(self.parts.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        self.guess(_TOKENS)
        return {**self.__dict__, "_trials": None}  # a copy of one layer is no copy of all

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _trials=Trials())
        self._trials.layers.append(self)


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


def _guesses(parts: Parts) -> Iterator[Guess]:
    """Every order of the layers, with every number that a module holds and that may be the number of heads."""
    held = [(name, own) for one in parts.module.modules() for name, own in vars(one).items() if type(own) is int]
    held.sort(key=lambda pair: "heads" not in pair[0])
    for order in itertools.permutations(range(3)):
        for heads in dict.fromkeys(number for _, number in held if number > 0):
            if all(layer.out_features % heads == 0 for layer in parts.inward):
                yield order, heads


@torch.no_grad()
def _confirmed(layer: EncoderLayer, length: int) -> Guess | None:
    """The first guess that explains what the module makes of a few random tokens, if it does so of many too."""
    few = _Trial.of(layer, _TOKENS)
    if few is None or not layer.parts.hold_all():
        return None
    for order, heads in _guesses(layer.parts):
        if few.explains((order, heads)):
            # If keys can take the place of queries, all tokens are attended to alike, and this trial shows nothing.
            q, k, v = order
            if _is_close(layer.call.answer(few.x, None, [((k, q, v), heads)]), few.want, _LEAST_CHANGE):
                return None
            many = few if length == _TOKENS else _Trial.of(layer, length)
            return (order, heads) if many is not None and many.explains((order, heads)) else None
    return None


class _Trial(NamedTuple):
    """Random tokens, and what a layer makes of them, without a mask and with one."""

    layer: EncoderLayer
    x: Tensor
    mask: Tensor
    want: Tensor
    masked: Tensor

    @staticmethod
    def of(layer: EncoderLayer, length: int) -> _Trial | None:
        """A trial with so many tokens; `None`: the layer takes other arguments, or gives more than tokens."""
        random = torch.Generator().manual_seed(0)
        x = 10 * torch.randn(_ROWS, length, layer.parts.inward[0].in_features, generator=random)
        mask = torch.rand(_ROWS, 1, length, length, generator=random) < 0.5
        try:
            with warnings.catch_warnings(), torch.autocast("cpu", enabled=False):
                warnings.simplefilter("ignore")
                want, masked = layer.original(x.clone()), layer.original(x.clone(), **{MASK: mask})
        except Exception:  # whatever it says
            return None
        both = isinstance(want, Tensor) and isinstance(masked, Tensor)
        return _Trial(layer, x, mask, want, masked) if both else None

    def explains(self, guess: Guess) -> bool:
        """Whether a guess gives the same."""
        with contextlib.suppress(ValueError):  # the kernel refuses layers that do not fit each other
            found = [self.layer.call.answer(self.x, own, [guess]) for own in (None, self.mask)]
            return _is_close(found[0], self.want) and _is_close(found[1], self.masked)
        return False


def _is_close(got: Tensor | None, want: Tensor, by: float = 2e-5) -> bool:
    return got is not None and got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=by)
