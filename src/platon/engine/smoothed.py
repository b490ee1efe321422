"""PLATON, its ablations, magnitude and Wanda: scores of w, w·g and x that need no training of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from platon.engine.schedule import Schedule, checked_count, is_number
from platon.engine.scope import Scope
from platon.engine.score import Score, State, Timing, checked_choice

WINDOW = 10
_LARGEST = 1e30  # |w g| saturates here: infinite values would make the averages NaN, and these can still be summed


@dataclass(frozen=True)
class Smoothed(Score):
    r"""What PLATON and its ablations share: two averages of how sensitive the loss is to each unit.

    I = |w g|;  Ī ← β1 Ī + (1-β1) I;  Ū ← β2 Ū + (1-β2) |I - Ī|

    Args:
        beta1: how long sensitivity is remembered, in [0, 1).
        beta2: how long its variation is remembered, in [0, 1).
        window: |w g| is averaged over so many steps before it enters Ī and Ū: each multiple of `window` folds the
            finished window in and opens the next one with its own |w g|. 1 is Algorithm 1 of the paper to the letter.
            By default 10, as in the authors' code, which made the paper's results; fewer where a mask is due earlier.
        timing: measure |w g| "after" the optimizer moved the weights and before they are masked, as the authors' code
            does, so that a zeroed weight can earn its way back; or "before", as Algorithm 1 is written.
    """

    beta1: float = 0.85
    beta2: float = 0.85
    window: int | None = None
    timing: Timing = "after"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            beta = getattr(self, name)
            if not is_number(beta) or not 0 <= beta < 1:
                raise ValueError(f"{name} must be in [0, 1), got {beta}; 0 forgets at once, 0.99 averages 100 steps")
        if self.window is not None:
            checked_count(self.window, "window", least=1)
        checked_choice(self.timing, "timing", ("after", "before"))

    @property
    def reads(self) -> Timing:
        return self.timing

    def fitted(self, schedule: Schedule) -> Self:
        """With a window that ends before the first mask: until then all scores are zero."""
        if self.window is not None:
            return self
        return replace(self, window=next((step for step in range(1, WINDOW) if schedule(step) is not None), WINDOW))

    @property
    def _steps(self) -> int:
        return WINDOW if self.window is None else self.window

    def init(self, count: int, device: torch.device) -> State:
        """Ī and Ū at zero; with a window also its running sum and how many steps are in it."""
        shapes: dict[str, tuple[int, ...]] = {"sensitivity": (count,), "uncertainty": (count,)}
        if self._steps > 1:
            shapes |= {"window": (count,), "samples": ()}
        return {name: torch.zeros(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}

    def phase(self, step: int) -> int:
        """1 where a finished window is folded into the averages."""
        return int(self._steps > 1 and step % self._steps == 0)

    def update(self, state: Mapping[str, Tensor], signal: Tensor | None, phase: int) -> State:
        """Algorithm 1, lines 6 to 9; with a window, its finished mean takes the place of |w g|."""
        sensitivity = None if signal is None else signal.abs().clamp(max=_LARGEST)
        if self._steps == 1:
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
        return {"sensitivity": average, "uncertainty": self.beta2 * state["uncertainty"] + (1 - self.beta2) * variation}


@dataclass(frozen=True)
class Platon(Smoothed):
    r"""Upper confidence bound of importance (Zhang et al., 2022): S = Ī Ū^c, with the averages of `Smoothed`.

    Args:
        exponent: c, how much uncertainty counts; 1 is the paper, 0 is smoothed sensitivity alone.
    """

    exponent: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.exponent) or not 0 <= self.exponent < 64:
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
        return state["sensitivity"]


@dataclass(frozen=True)
class Uncertainty(Smoothed):
    r"""Ablation of the paper: S = Ū, uncertainty alone."""

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        return state["uncertainty"]


@dataclass(frozen=True)
class Ratio(Smoothed):
    r"""Ablation of the paper: S = Ī / Ū. 0 / 0 is 0: the loss never depended on such a unit."""

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """Ī / Ū; infinite where only Ū is zero, and NaN, which is refused, where Ī is."""
        sensitivity = state["sensitivity"]
        return torch.where(sensitivity == 0, 0.0, sensitivity / state["uncertainty"])


@dataclass(frozen=True)
class Magnitude(Score):
    r"""Gradual magnitude pruning (Zhu & Gupta, 2018): S = |w|; zeroed weights go on being updated."""

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        return weight.float().abs()


@dataclass(frozen=True)
class Wanda(Score):
    r"""Pruning by weights and activations (Sun et al., 2024): S = |w| ‖x‖, with the input feature x that w multiplies.

    ‖x‖ is taken over the tokens that the model has read while it was trained, or while `prune_once` calibrated it.
    Scores are compared inside a row, that is among the weights of one output feature.
    """

    scope: Scope = field(default="row", kw_only=True)

    reads: ClassVar[Literal["inputs"]] = "inputs"

    def init(self, count: int, device: torch.device) -> State:
        return {"square": torch.zeros(count, dtype=torch.float32, device=device)}

    def update(self, state: Mapping[str, Tensor], signal: Tensor | None, phase: int) -> State:
        """`signal` is ‖x‖ of what each weight has multiplied since the last step."""
        return dict(state) if signal is None else {"square": state["square"] + signal**2}

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        return weight.float().abs() * state["square"].sqrt()
