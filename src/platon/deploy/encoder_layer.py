"""Whole encoder layers in one call of the kernel: queries, keys and values, attention, and two sums with a norm.

For one short text the modules of a layer, and what lies between them, take longer than its arithmetic. Which modules
do what is a guess from what a layer holds, which a trial on random tokens has to confirm.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from platon.deploy.attention import FEWEST_QUERIES, MOST_KEYS, expanded
from platon.deploy.inference_layer import Snapshot, is_eager
from platon.deploy.layer import SparseLinear, is_readable
from platon.deploy.outline import is_hooked, outline
from platon.deploy.sparse_operator import kernel
from platon.deploy.sparse_structure import Affine, Encoder, Layer
from platon.deploy.sparse_sum import SparseSum, parts_of

_MASK = "attention_mask"  # the argument of the layers of transformers
_ROWS, _TOKENS = 2, FEWEST_QUERIES  # of a trial
_LEAST_CHANGE = 2e-3  # of an output, by another attention: a hundred times what is taken for rounding


_Guess = tuple[tuple[int, ...], int]  # which layers make queries, keys and values, and the number of heads


@dataclass(frozen=True)
class Parts:
    """What an encoder layer may be made of.

    Args:
        module: the layer.
        inward: the matrices that make queries, keys and values, in an order that is not known.
        onward: the matrix after attention, and those of the feed-forward part.
        norms: the two of them.
    """

    module: nn.Module
    inward: Sequence[SparseLinear]
    onward: Sequence[SparseLinear]
    norms: Sequence[nn.LayerNorm]

    def hold_all(self) -> bool:
        """Whether the module has no tensors but theirs."""
        theirs = (*self.inward, *self.onward, *self.norms)
        held = {id(one) for part in theirs for one in (*part.parameters(), *part.buffers())}
        return held == {id(one) for one in (*self.module.parameters(), *self.module.buffers())}

    @property
    def fullness(self) -> int:
        """How many weights decide about attention."""
        return sum(layer.values.numel() for layer in self.inward)


class _Packed(NamedTuple):
    """A layer as the kernel takes it, with what it was made of."""

    settings: tuple[Any, ...]
    snapshot: Snapshot
    layers: list[Layer]  # kept: `encoder` has pointers to them
    encoder: Encoder


class Alike:
    """Layers that are alike but for their numbers. One trial tells for all of them.

    The trial takes some milliseconds, so it waits for the first call: loading a model does not pay for it.
    """

    def __init__(self) -> None:
        self._layers: list[EncoderLayer] = []
        self._guess: _Guess | None = None

    def add(self, layer: EncoderLayer) -> None:
        self._layers.append(layer)

    def guess(self) -> _Guess | None:
        """What the trial confirmed; `None`: nothing."""
        if self._layers:
            # Nearly empty layers attend to all tokens alike, whatever their heads are: the fullest one tells most.
            fullest = max(self._layers, key=lambda layer: layer.parts.fullness)
            self._guess = _confirmed(fullest) if fullest.is_untouched() else None
            self._layers = []
        return self._guess

    def __getstate__(self) -> dict[str, Any]:
        return {"_layers": [], "_guess": self.guess()}  # a copy of one layer is no copy of all


class EncoderLayer:
    """The `forward` of a layer that computes h = norm(out(attention(x)) + x), and then norm(feed_forward(h) + h).

    A call that asks for more, or whose modules have hooks or were replaced, is left to the module's own `forward`; so
    are all calls if no trial confirmed what the layer computes.
    """

    def __init__(self, parts: Parts, alike: Alike) -> None:
        self.parts, self.alike = parts, alike
        self._inside = [(one, list(one._modules.values())) for one in parts.module.modules()]
        self._names = list(inspect.signature(type(parts.module).forward).parameters)[1:]  # the tokens come first
        self._packed: _Packed | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = {**dict(zip(self._names, args, strict=False)), **kwargs}
        x, mask = asked.pop(self._names[0], None), asked.pop(_MASK, None)
        is_more = len(args) > len(self._names) or any(own is not None and own is not False for own in asked.values())
        if not is_more and isinstance(x, Tensor) and self._is_plain(x) and (guess := self.alike.guess()) is not None:
            rows, tokens, _ = x.shape
            seen = None if mask is None else expanded(mask, (rows, guess[1], tokens, tokens))
            if (seen is None) == (mask is None):
                return self.compute(x, seen, guess)
        return self.original(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own `forward`."""
        return type(self.parts.module).forward(self.parts.module, *args, **kwargs)

    def _is_plain(self, x: Tensor) -> bool:
        """Whether a call can be computed at once: it is not traced, and nothing was replaced or waits inside."""
        if not is_eager(x) or x.dim() != 3 or not FEWEST_QUERIES <= x.shape[1] <= MOST_KEYS:
            return False
        return self.is_untouched() and all(map(is_readable, self.parts.norms))

    def is_untouched(self) -> bool:
        """Whether the modules inside are those that were found, and have no hooks."""
        for one, children in self._inside:
            if list(one._modules.values()) != children or (one is not self.parts.module and is_hooked(one)):
                return False
        return True

    def compute(self, x: Tensor, mask: Tensor | None, guess: _Guess) -> Tensor:
        """The layer's output for tokens [rows, tokens, features] and a mask [rows, heads, tokens, tokens]."""
        self.parts.inward[0].check(x)
        return kernel().encode(x, self._encoder(guess), mask)

    def _encoder(self, guess: _Guess) -> Encoder:
        """What the kernel takes; the numbers of the layer are checked if they have changed."""
        settings = (guess, *(norm.eps for norm in self.parts.norms))
        packed = self._packed
        if packed is None or packed.settings != settings or not packed.snapshot.is_current():
            self._packed = packed = self._pack(guess, settings)
        return packed.encoder

    def _pack(self, guess: _Guess, settings: tuple[Any, ...]) -> _Packed:
        order, heads = guess
        linears = [*(self.parts.inward[i] for i in order), *self.parts.onward]
        layers = [linear.packed() for linear in linears]
        pointers = list(map(ctypes.pointer, layers))
        forward = pointers[4:]
        norms = map(Affine.of, self.parts.norms)
        encoder = Encoder((*pointers[:3],), pointers[3], (*forward,), len(forward), heads, *norms)
        snapshot = Snapshot(*(linear._buffers for linear in linears), *(norm._parameters for norm in self.parts.norms))
        return _Packed(settings, snapshot, layers, encoder)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # a copy has tensors of its own


def shorten_layers(model: nn.Module) -> None:
    """Let the layers of an encoder be computed at once where a trial will show that this is the same."""
    found: dict[Any, Alike] = {}
    for module in _candidates(model):
        parts = _find_parts(module)
        if parts is not None:
            alike = found.setdefault(outline(module), Alike())
            module.__dict__["forward"] = layer = EncoderLayer(parts, alike)
            alike.add(layer)


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


def _guesses(parts: Parts) -> Iterator[_Guess]:
    """Every order of the layers, with every number that a module holds and that may be the number of heads."""
    held = [(name, own) for one in parts.module.modules() for name, own in vars(one).items() if type(own) is int]
    held.sort(key=lambda pair: "heads" not in pair[0])
    for order in itertools.permutations(range(3)):
        for heads in dict.fromkeys(number for _, number in held if number > 0):
            if all(layer.out_features % heads == 0 for layer in parts.inward):
                yield order, heads


@torch.no_grad()
def _confirmed(layer: EncoderLayer) -> _Guess | None:
    """The first guess with which random tokens give what the module gives, without a mask and with one."""
    random = torch.Generator().manual_seed(0)
    x = 10 * torch.randn(_ROWS, _TOKENS, layer.parts.inward[0].in_features, generator=random)
    mask = torch.rand(_ROWS, 1, _TOKENS, _TOKENS, generator=random) < 0.5
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", enabled=False):
            warnings.simplefilter("ignore")
            want, masked = layer.original(x.clone()), layer.original(x.clone(), **{_MASK: mask})
    except Exception:  # it takes other arguments
        return None
    if not isinstance(want, Tensor) or not isinstance(masked, Tensor) or not layer.parts.hold_all():
        return None
    for order, heads in _guesses(layer.parts):
        guess = order, heads
        with contextlib.suppress(ValueError):  # the kernel refuses layers that do not fit each other
            seen = mask.expand(-1, heads, -1, -1)
            if _is_close(layer.compute(x, None, guess), want) and _is_close(layer.compute(x, seen, guess), masked):
                # If keys can take the place of queries, all tokens are attended to alike, and this trial shows nothing.
                q, k, v = order
                swapped = layer.compute(x, None, ((k, q, v), heads))
                return None if float((swapped - want).abs().max()) < _LEAST_CHANGE else guess
    return None


def _is_close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=2e-5)
