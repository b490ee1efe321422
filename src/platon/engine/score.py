"""Scores: how important is each unit? Hyper-parameters and equations; the tensors belong to the pruner.

A score is a frozen dataclass of pure functions on tensors. The pruner holds the state, and kernels.py fuses the
functions into the passes over memory, so a new method writes its equations and nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

State = dict[str, Tensor]
Timing = Literal["after", "before"]
Scope = Literal["global", "matrix"]


def checked_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    """Refuse a `value` that is not among `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Score(ABC):
    """What every method answers.

    Args:
        scope: rank all weights of the model together ("global") or each matrix by itself ("matrix").
    """

    scope: Scope = "global"

    def __post_init__(self) -> None:
        """Refuse an unknown scope."""
        checked_choice(self.scope, "scope", ("global", "matrix"))

    @property
    def reads(self) -> Timing | None:
        """Whether `update` takes w·g before or after the optimizer moves the weights; `None`: it does not want it."""
        return None

    def init(self, count: int, device: torch.device) -> State:
        """The state of `count` units, float32 whatever the training dtype; none by default.

        A tensor has a number a unit, or is a single number that all units read.
        """
        return {}

    def phase(self, step: int) -> int:
        """What `update` needs to know of the step, as a small number: each one is a fused pass of its own."""
        return 0

    def update(self, state: Mapping[str, Tensor], signal: Tensor | None, phase: int) -> State:
        """The next state. `signal` is w·g of each unit; `None` where the step gave no gradient."""
        return dict(state)

    @abstractmethod
    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """The score of each unit, float32; the highest stay. `weight` holds the units' present weights."""


@dataclass(frozen=True)
class Smoothed(Score):
    r"""What PLATON and its ablations share: two averages of how the loss answers to each unit.

    I = |w g|;  Ī ← β1 Ī + (1-β1) I;  Ū ← β2 Ū + (1-β2) |I - Ī|

    Args:
        beta1: how long sensitivity is remembered, in [0, 1).
        beta2: how long its variation is remembered, in [0, 1).
        window: 1 is the paper. With more, |w g| is first averaged over the steps of a window; each multiple of `window`
            folds the finished window into Ī and Ū and opens the next one with its own |w g|.
        timing: measure |w g| "after" the optimizer moved the weights and before they are masked, as the authors' code
            does, so that a zeroed weight can earn its way back; or "before", as Algorithm 1 is written.
    """

    beta1: float = 0.85
    beta2: float = 0.85
    window: int = 1
    timing: Timing = "after"

    def __post_init__(self) -> None:
        """Refuse averages that never settle, and unknown words."""
        super().__post_init__()
        for name in ("beta1", "beta2"):
            beta = getattr(self, name)
            if not isinstance(beta, int | float) or not 0 <= beta < 1:
                raise ValueError(f"{name} must be in [0, 1), got {beta}; 0 forgets at once, 0.99 averages 100 steps")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window must be a whole number of at least 1, got {self.window!r}")
        checked_choice(self.timing, "timing", ("after", "before"))

    @property
    def reads(self) -> Timing:
        """The setting."""
        return self.timing

    def init(self, count: int, device: torch.device) -> State:
        """Ī and Ū at zero; with a window also its running sum and how many steps are in it."""
        names = ("sensitivity", "uncertainty") + (("window",) if self.window > 1 else ())
        state = {name: torch.zeros(count, dtype=torch.float32, device=device) for name in names}
        if self.window > 1:
            state["samples"] = torch.zeros((), dtype=torch.float32, device=device)
        return state

    def phase(self, step: int) -> int:
        """1 where a finished window is folded into the averages."""
        return int(self.window > 1 and step % self.window == 0)

    def update(self, state: Mapping[str, Tensor], signal: Tensor | None, phase: int) -> State:
        """Algorithm 1, lines 6 to 9; with a window, its finished mean takes the place of |w g|."""
        sensitivity = None if signal is None else signal.abs()
        if self.window == 1:
            return dict(state) if sensitivity is None else self._fold(state, sensitivity)
        total, samples = state["window"], state["samples"]
        if phase == 0:
            if sensitivity is None:
                return dict(state)
            return {**state, "window": total + sensitivity, "samples": samples + 1}
        folded = self._fold(state, total / samples)
        # A window in which this matrix never had a gradient says nothing about it.
        folded = {name: torch.where(samples > 0, folded[name], state[name]) for name in folded}
        fresh = torch.zeros_like(total) if sensitivity is None else sensitivity
        return {**folded, "window": fresh, "samples": torch.full_like(samples, sensitivity is not None)}

    def _fold(self, state: Mapping[str, Tensor], sensitivity: Tensor) -> State:
        average = self.beta1 * state["sensitivity"] + (1 - self.beta1) * sensitivity
        variation = (sensitivity - average).abs()  # the new average, as in the paper
        return {
            "sensitivity": average,
            "uncertainty": self.beta2 * state["uncertainty"] + (1 - self.beta2) * variation,
        }


@dataclass(frozen=True)
class Platon(Smoothed):
    r"""Upper confidence bound of importance (Zhang et al., 2022): S = Ī Ū^c, with the averages of `Smoothed`.

    Args:
        exponent: c, how much uncertainty counts; 1 is the paper, 0 is smoothed sensitivity alone.
    """

    exponent: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an exponent that would punish uncertainty: that is another method."""
        super().__post_init__()
        if isinstance(self.exponent, bool) or not isinstance(self.exponent, int | float) or not 0 <= self.exponent < 64:
            raise ValueError(f"exponent must be in [0, 64), got {self.exponent!r}; for S = Ī/Ū use platon.Ratio()")

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """(Ī Ū^c)^(1 / (1+c)), √Ī √Ū for the paper: the order of Ī Ū^c, but no underflow before that of a factor."""
        if self.exponent == 1:
            return state["sensitivity"].sqrt() * state["uncertainty"].sqrt()
        share = self.exponent / (1 + self.exponent)
        return state["sensitivity"] ** (1 - share) * state["uncertainty"] ** share


@dataclass(frozen=True)
class Sensitivity(Smoothed):
    r"""Ablation of the paper: S = Ī, importance without its uncertainty."""

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """Ī."""
        return state["sensitivity"]


@dataclass(frozen=True)
class Uncertainty(Smoothed):
    r"""Ablation of the paper: S = Ū, uncertainty alone."""

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """Ū."""
        return state["uncertainty"]


@dataclass(frozen=True)
class Ratio(Smoothed):
    r"""Ablation of the paper: S = Ī / Ū, which keeps what is surely important. 0 / 0 is 0: such a unit did nothing."""

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """Ī / Ū; infinite where only Ū is zero."""
        sensitivity = state["sensitivity"]
        return torch.where(sensitivity > 0, sensitivity / state["uncertainty"], 0.0)


@dataclass(frozen=True)
class Magnitude(Score):
    r"""Gradual magnitude pruning (Zhu & Gupta, 2018): S = |w|; zeroed weights go on being updated."""

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """|w|, in float32."""
        return weight.float().abs()
