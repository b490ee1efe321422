"""A faster `forward` for a module: what the module computes is guessed, and a trial on random tokens confirms it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy.attention import FEWEST_QUERIES
from platon.deploy.layer import SparseLinear
from platon.deploy.outline import outline

ROWS, TOKENS = 2, FEWEST_QUERIES  # of the shortest trial
LEAST_CHANGE = 2e-3  # of an output, by another attention: a hundred times what is taken for rounding

Guess = tuple[tuple[int, ...], int]  # which layers make queries, keys and values, and the number of heads


class Trials:
    """Finds out what the modules of a model compute. One trial tells for all that are alike but for their numbers.

    A module may do something else with longer texts, such as to attend to near tokens alone. So trials have as many
    tokens as the calls that rely on them, and wait for these: loading a model does not pay for them.
    """

    def __init__(self) -> None:
        self.guessed: list[Guessed] = []

    def run(self, tokens: int) -> None:
        length = max(TOKENS, 1 << (tokens - 1).bit_length())
        groups: dict[Hashable, list[Guessed]] = {}
        for one in self.guessed:
            if one.is_intact():
                groups.setdefault((type(one), outline(one.module, without="forward")), []).append(one)
        for alike in groups.values():
            # Nearly empty layers attend to all tokens alike, whatever their heads are: the fullest one tells most.
            guess = max(alike, key=lambda one: one.fullness).confirmed(length)
            for one in alike:
                one.verdict = guess, length


class Guessed:
    """The `forward` of a module with attention in it that may be computed faster, if a trial confirms what it computes.

    Args:
        module: whose `forward` it is.
        inward: the layers that make queries, keys and values, in an order that is not known.
        trials: shared by all of a model.
    """

    def __init__(self, module: nn.Module, inward: Sequence[SparseLinear], trials: Trials) -> None:
        self.module, self.inward, self._trials = module, inward, trials
        trials.guessed.append(self)
        self.verdict: tuple[Any, int] = None, 0  # what a trial confirmed, and its tokens; one tuple, for threads

    def is_intact(self) -> bool:
        """Whether the modules inside are those that were found, and nobody waits for what they compute."""
        raise NotImplementedError

    def used(self) -> Sequence[nn.Module]:
        """The modules that the answer is computed with."""
        raise NotImplementedError

    def cases(self, guess: Guess, length: int, random: torch.Generator) -> list[dict[str, Tensor]]:
        """What the module is given in a trial, besides tokens; first, nothing."""
        raise NotImplementedError

    def answer(self, x: Tensor, guess: Guess, **asked: Tensor) -> Tensor | None:
        """What the module computes if a guess is right; `None`: the kernel cannot read what it is given."""
        raise NotImplementedError

    def tokens_of(self, output: Any) -> Tensor | None:
        """The tokens that the module gives, if it gives nothing else."""
        raise NotImplementedError

    def size_of(self, output: Tensor) -> float:
        """How large an output is, to which differences are related; that of a norm has about this size."""
        return 1.0

    @property
    def fullness(self) -> int:
        """How many weights decide about attention."""
        return sum(layer.values.numel() for layer in self.inward)

    @torch.no_grad()
    def confirmed(self, length: int) -> Any:
        """The first guess that explains what the module makes of a few random tokens, if it does so of many too."""
        for guess in guesses(self.module, self.inward) if self._uses_all() else ():
            if self._explains(guess, TOKENS):
                (q, k, v), heads = guess
                # If keys can take the place of queries, all tokens are attended to alike, and a trial shows nothing.
                if self._explains(((k, q, v), heads), TOKENS, LEAST_CHANGE, cases=1):
                    return None
                return guess if length == TOKENS or self._explains(guess, length) else None
        return None

    def _uses_all(self) -> bool:
        """Whether the module has no other tensors than those that the answer is computed with."""
        used = {id(one) for part in self.used() for one in (*part.parameters(), *part.buffers())}
        return used == {id(one) for one in (*self.module.parameters(), *self.module.buffers())}

    def _explains(self, guess: Guess, length: int, by: float = 2e-5, cases: int | None = None) -> bool:
        """Whether the module gives what a guess says, within a difference, in the first cases or in all."""
        random = torch.Generator().manual_seed(0)
        x = 10 * torch.randn(ROWS, length, self.inward[0].in_features, generator=random)
        try:
            with warnings.catch_warnings(), torch.autocast("cpu", enabled=False):
                warnings.simplefilter("ignore")
                for asked in self.cases(guess, length, random)[:cases]:
                    want, got = self.tokens_of(self.original(x.clone(), **asked)), self.answer(x, guess, **asked)
                    if want is None or got is None or got.shape != want.shape:
                        return False
                    if not torch.allclose(got, want, rtol=0, atol=by * self.size_of(want)):
                        return False
        except Exception:  # it takes other arguments, or the kernel refuses layers that do not fit each other
            return False
        return True

    def guess(self, tokens: int) -> Any:
        """What a trial confirmed for texts of so many tokens; `None`: nothing."""
        if tokens > self.verdict[1]:
            self._trials.run(tokens)
        guess, length = self.verdict
        return guess if tokens <= length else None

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own `forward`."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __code__(self) -> CodeType:
        """As a function has it, for `torch.export`."""
        code: CodeType = type(self.module).forward.__code__
        return code

    def __getstate__(self) -> dict[str, Any]:
        self.guess(TOKENS)
        return {**self.__dict__, "_trials": None}  # a copy of one module is no copy of all

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _trials=Trials())
        self._trials.guessed.append(self)


def guesses(module: nn.Module, inward: Sequence[SparseLinear]) -> Iterator[Guess]:
    """Every order of three layers, with every number that a module holds and that may be the number of heads."""
    held = [(name, own) for one in module.modules() for name, own in vars(one).items() if type(own) is int]
    held.sort(key=lambda pair: "heads" not in pair[0])
    for order in itertools.permutations(range(3)):
        for heads in dict.fromkeys(number for _, number in held if number > 0):
            if all(layer.out_features % heads == 0 for layer in inward):
                yield order, heads
