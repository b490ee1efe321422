"""Attention that a module computes step by step in PyTorch, by the kernel: that of MPNet, for example.

Most models of transformers look their attention up by name (`deploy/attention.py`). Others multiply queries and keys
themselves, which takes more time than all sparse layers together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy.attention import expanded
from platon.deploy.encoder_call import MASK, Arguments, are_tokens
from platon.deploy.layer import SparseLinear
from platon.deploy.outline import Wiring
from platon.deploy.sparse_operator import kernel
from platon.deploy.trial import ROWS, Guess, Guessed, Trials

_BIAS = "position_bias"  # what the modules of transformers call a bias that depends on positions


class SelfAttention(Guessed):
    """The `forward` of a module that computes softmax(q kᵀ / √size + mask + bias) v, and perhaps one layer of that.

    A call that asks for more is left to the module's own `forward`, as with an `EncoderLayer`.
    """

    def __init__(
        self, module: nn.Module, inward: list[SparseLinear], outward: SparseLinear | None, trials: Trials
    ) -> None:
        super().__init__(module, inward, trials)
        self.outward = outward
        self._wiring, self._arguments = Wiring(module), Arguments(module)
        self._rest: tuple[None, ...] | None = None  # what the module gives besides tokens; `None`: no tuple

    def is_intact(self) -> bool:
        return self._wiring.is_intact()

    def used(self) -> Sequence[nn.Module]:
        return self.inward if self.outward is None else [*self.inward, self.outward]

    def cases(self, guess: Guess, length: int, random: torch.Generator) -> list[dict[str, Tensor]]:
        """Without a mask, with one for keys and with one for queries too, and, where there can be one, with a bias."""
        keys = torch.randn(ROWS, 1, 1, length, generator=random)
        keys[0, 0, 0, ::3] = torch.finfo(keys.dtype).min
        found = [{}, {MASK: keys}, {MASK: torch.randn(ROWS, 1, length, length, generator=random)}]
        if _BIAS in self._arguments.names:
            bias = torch.randn(1, guess[1], length, length, generator=random)
            found += [{_BIAS: bias}, {_BIAS: bias.expand(ROWS, -1, -1, -1), MASK: keys}]
        return found

    def answer(self, x: Tensor, guess: Guess, **asked: Tensor) -> Tensor | None:
        order, heads = guess
        added = [one for one in asked.values() if one is not None]
        shape = (x.shape[0], heads, x.shape[1], x.shape[1])
        if any(one.dtype != torch.float32 for one in added) or None in [expanded(one, shape) for one in added]:
            return None
        mask = expanded(sum(added[1:], added[0]), shape) if added else None
        q, k, v = (self.inward[i](x).unflatten(-1, (heads, -1)).transpose(1, 2) for i in order)
        attended = kernel().attend(q, k, v, mask, q.shape[-1] ** -0.5).flatten(2)
        return attended if self.outward is None else self.outward(attended)

    def tokens_of(self, output: Any) -> Tensor | None:
        if isinstance(output, Tensor):
            self._rest = None
            return output
        if type(output) is not tuple or not output or any(one is not None for one in output[1:]):
            return None
        self._rest = output[1:]
        return output[0] if isinstance(output[0], Tensor) else None

    def size_of(self, output: Tensor) -> float:
        return max(1.0, float(output.abs().max()))

    def confirmed(self, length: int) -> Any:
        """The guess, and what the module gives besides tokens."""
        guess = super().confirmed(length)
        return None if guess is None else (guess, self._rest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = self._arguments.read(args, kwargs, MASK, _BIAS)
        if asked is not None and self._takes(asked[0]) and (found := self.guess(asked[0].shape[1])) is not None:
            (x, *added), (guess, rest) = asked, found
            given = {name: one for name, one in zip((MASK, _BIAS), added, strict=True) if one is not None}
            if all(isinstance(one, Tensor) for one in given.values()):
                answer = self.answer(x, guess, **given)
                if answer is not None:
                    return answer if rest is None else (answer, *rest)
        return self.original(*args, **kwargs)

    def _takes(self, x: Any) -> bool:
        """Whether tokens can be computed: the call is not traced, and nobody changed or watches a module inside."""
        return are_tokens(x) and x.dtype == torch.float32 and self.is_intact()


def attend_at_once(model: nn.Module) -> None:
    """Let modules that compute their attention themselves have it computed by the kernel, where a trial allows it."""
    trials = Trials()
    for module in model.modules():
        layers = [one for one in module.children() if isinstance(one, SparseLinear)]
        leaders = [one for one in layers if len(one.siblings) == 2]
        looks_it_up = hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
        if len(leaders) != 1 or len(layers) not in (3, 4) or looks_it_up or "forward" in vars(module):
            continue
        inward = [leaders[0], *leaders[0].siblings]
        outward = next((one for one in layers if one not in inward), None)
        if {*inward} <= {*layers} and MASK in Arguments(module).names:
            module.__dict__["forward"] = SelfAttention(module, inward, outward, trials)
