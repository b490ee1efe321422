"""Encoder layers in one call of the kernel, as long as nobody changes or watches what is inside them."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from platon.deploy.attention import FEWEST_QUERIES, MOST_KEYS, expanded
from platon.deploy.inference_layer import Snapshot, is_eager
from platon.deploy.layer import SparseLinear, is_readable, is_trained
from platon.deploy.outline import Wiring
from platon.deploy.sparse_operator import kernel
from platon.deploy.sparse_structure import Affine, Encoder, Layer
from platon.deploy.trial import Guess

MASK = "attention_mask"  # the argument of the modules of transformers


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


class _Packed(NamedTuple):
    """Layers as the kernel takes them, with what they were made of."""

    settings: tuple[Any, ...]
    snapshot: Snapshot
    matrices: list[Layer]  # kept: the encoders have pointers to them
    encoders: list[Encoder]


class EncoderCall:
    """Some encoder layers, one after the other, in one call of the kernel."""

    def __init__(self, layers: Sequence[Parts], wiring: Wiring) -> None:
        self._layers, self._wiring = layers, wiring
        self._norms = [norm for parts in layers for norm in parts.norms]
        self._packed: _Packed | None = None

    @classmethod
    def joined(cls, calls: Sequence[EncoderCall]) -> EncoderCall:
        """The layers of several calls in one."""
        layers = [parts for call in calls for parts in call._layers]
        return cls(layers, Wiring.joined([call._wiring for call in calls]))

    def is_intact(self) -> bool:
        """Whether the modules inside the layers are those that were found, and have no hooks."""
        return self._wiring.is_intact()

    def takes(self, x: Any) -> bool:
        """Whether tokens can be computed: the call is not traced, and nobody changed or watches a module inside."""
        return are_tokens(x) and self.is_intact() and not any(map(is_trained, self._norms))

    def answer(self, x: Tensor, mask: Any, guesses: Sequence[Guess]) -> Tensor | None:
        """What the last layer makes of tokens; `None`: the kernel cannot read the mask or a norm.

        Args:
            x: [rows, tokens, features], which `takes` accepts.
            mask: of every layer; `None`: each token sees all of its row.
            guesses: of each layer.
        """
        linears = [parts.inward[0] for parts in self._layers]
        next((one for one in linears if one.training), linears[0]).check(x)
        encoders = self._encoders(guesses)
        seen = None if mask is None else _seen(mask, x, {heads for _, heads in guesses})
        if encoders is None or (seen is None) != (mask is None):
            return None
        return kernel().encode(x, encoders, seen)

    def _encoders(self, guesses: Sequence[Guess]) -> list[Encoder] | None:
        """What the kernel takes, checked again if a tensor has changed; `None`: it cannot read a norm."""
        settings = (*guesses, *[norm.eps for norm in self._norms])
        packed = self._packed
        if packed is None or packed.settings != settings or not packed.snapshot.is_current():
            if not all(map(is_readable, self._norms)):
                return None
            self._packed = packed = self._pack(guesses, settings)
        return packed.encoders

    def _pack(self, guesses: Sequence[Guess], settings: tuple[Any, ...]) -> _Packed:
        encoders: list[Encoder] = []
        kept: list[Layer] = []
        holders: list[Mapping[str, Tensor | None]] = []
        for parts, (order, heads) in zip(self._layers, guesses, strict=True):
            linears = [*(parts.inward[i] for i in order), *parts.onward]
            matrices = [linear.packed() for linear in linears]
            pointers = list(map(ctypes.pointer, matrices))
            forward, norms = pointers[4:], map(Affine.of, parts.norms)
            encoders.append(Encoder((*pointers[:3],), pointers[3], (*forward,), len(forward), heads, *norms))
            kept += matrices
            holders += [*(linear._buffers for linear in linears), *(norm._parameters for norm in parts.norms)]
        return _Packed(settings, Snapshot(*holders), kept, encoders)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # a copy has tensors of its own


def are_tokens(x: Any) -> bool:
    """Whether this is [rows, tokens, features], of no traced call, with as many tokens as the kernel attends to."""
    return isinstance(x, Tensor) and is_eager(x) and x.dim() == 3 and FEWEST_QUERIES <= x.shape[1] <= MOST_KEYS


class Arguments:
    """What a module of transformers is given: tokens first, a mask by name, and perhaps more."""

    def __init__(self, module: nn.Module) -> None:
        self.names = _names(type(module).forward)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *names: str) -> tuple[Any, ...] | None:
        """Tokens of a call, and what it has by these names, by default the mask; `None`: it asks for more."""
        asked = {**dict(zip(self.names, args, strict=False)), **kwargs}
        found = tuple(asked.pop(name, None) for name in (self.names[0], *(names or (MASK,))))
        is_more = len(args) > len(self.names) or any(own is not None and own is not False for own in asked.values())
        return None if is_more else found


@functools.cache
def _names(method: Callable[..., Any]) -> list[str]:
    """The arguments of a method."""
    return list(inspect.signature(method).parameters)[1:]


def _seen(mask: Any, x: Tensor, heads: set[int]) -> Tensor | None:
    """The mask for each row, head, query and key of layers with so many heads; `None`: the kernel cannot read it."""
    seen = expanded(mask, (x.shape[0], max(heads), x.shape[1], x.shape[1]))
    # Layers with different numbers of heads can share a mask only if it is the same for all heads.
    return seen if len(heads) == 1 or seen is None or mask.shape[1] == 1 else None
