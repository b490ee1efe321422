"""Learned scores: trained beside the weights, by an AdamW of their own that the pruner keeps.

The forward pass uses w ⊙ z, a mask or a gate z that follows from the score S. Since the model's parameter *is* w ⊙ z,
autograd gives G = ∂L/∂(w ⊙ z), and everything else is written down here: G · w for the score, G · z for the weight. The
pruner keeps w aside, gives it to the optimizer for its step, and puts w ⊙ z back.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from platon.engine.score import Scope, Score, State

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8  # AdamW's, as everywhere


@dataclass(frozen=True)
class Moment:
    """What a learned score may know of a step, beside its signal.

    Args:
        rate: the user's learning rate now, as a share of its peak.
        progress: how much of the schedule's descent is over, from 0 to 1.
        pressure: the penalty that steers towards the schedule's share.
        share: one unit's part of the mean over all matrices of the mean over a matrix.
    """

    rate: float
    progress: float
    pressure: float
    share: float


@dataclass(frozen=True)
class Learned(Score):
    """A score that gradient descent learns. Masked weights keep their value aside, and come back with it.

    Args:
        score_learning_rate: the peak of its AdamW; it follows the user's own schedule.
        score_init: where every score starts.
    """

    score_learning_rate: float = 1e-2
    score_init: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what does not learn."""
        super().__post_init__()
        if not _is_number(self.score_learning_rate) or self.score_learning_rate <= 0:
            raise ValueError(f"score_learning_rate must be above 0, got {self.score_learning_rate!r}; 0.01 is usual")
        if not _is_number(self.score_init):
            raise ValueError(f"score_init must be a number, got {self.score_init!r}")

    @property
    def reads(self) -> Literal["before"]:
        """The gradient belongs to the weights before the step."""
        return "before"

    def init(self, count: int, device: torch.device) -> State:
        """S, the two moments of its AdamW, and single numbers: steps taken and this step's learning rate."""
        number = torch.zeros((), dtype=torch.float32, device=device)
        zeros = torch.zeros(count, dtype=torch.float32, device=device)
        start = torch.full_like(zeros, self.score_init)
        return {
            "score": start,
            "mean": zeros,
            "square": zeros.clone(),
            "steps": number,
            **{name: number.clone() for name in self.numbers(Moment(0, 0, 0, 0))},
        }

    def numbers(self, moment: Moment) -> dict[str, float]:
        """The single numbers of the state that this step sets."""
        return {"rate": self.score_learning_rate * moment.rate}

    def gradient(self, state: Mapping[str, Tensor], signal: Tensor | None) -> Tensor | None:
        """∂L/∂S; `None` where the step says nothing. Straight through the mask by default: G · w."""
        return signal

    def update(self, state: Mapping[str, Tensor], signal: Tensor | None, phase: int) -> State:
        """One step of AdamW, without decay."""
        gradient = self.gradient(state, signal)
        if gradient is None:
            return dict(state)
        steps = state["steps"] + 1
        mean = _BETA1 * state["mean"] + (1 - _BETA1) * gradient
        square = _BETA2 * state["square"] + (1 - _BETA2) * gradient * gradient
        # 1 - βᵗ, without the digits that float32 would lose in the difference.
        first, second = (-torch.expm1(steps * math.log(beta)) for beta in (_BETA1, _BETA2))
        step = mean / (square.sqrt() / second.sqrt() + _EPSILON)
        return {
            **state,
            "score": state["score"] - state["rate"] / first * step,
            "mean": mean,
            "square": square,
            "steps": steps,
        }

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """S."""
        return state["score"]


@dataclass(frozen=True)
class Movement(Learned):
    r"""Movement pruning (Sanh et al., 2020): S gathers -G w, so weights that move away from zero stay.

    z = 1 for the k highest S, else 0;  ∂L/∂S = G w, straight through the mask
    """

    scope: Scope = field(default="matrix", kw_only=True)


@dataclass(frozen=True)
class Penalised(Learned):
    """A learned score whose sparsity is a result: a unit stays while its score is above a fixed value.

    Args:
        penalty: λ, as in the papers: of the schedule only the descent counts then. `None`: λ is steered, so that by the
            end of the descent the schedule's share is left, and in its final phase exactly that share of the highest
            scores stays.
        min_keep_per_matrix: the least share of each matrix that stays, whatever the penalty.
    """

    penalty: float | None = None
    min_keep_per_matrix: float = 0.0

    def __post_init__(self) -> None:
        """Refuse penalties that reward."""
        super().__post_init__()
        if self.penalty is not None and (not _is_number(self.penalty) or self.penalty < 0):
            raise ValueError(f"penalty must be at least 0, got {self.penalty!r}; None steers it towards the share")
        if not _is_number(self.min_keep_per_matrix) or not 0 <= self.min_keep_per_matrix <= 1:
            raise ValueError(f"min_keep_per_matrix must be in [0, 1], got {self.min_keep_per_matrix!r}")

    def numbers(self, moment: Moment) -> dict[str, float]:
        """Also λ, as one unit feels it."""
        return {**super().numbers(moment), "penalty": moment.share * self.strength(moment)}

    def strength(self, moment: Moment) -> float:
        """λ at this step."""
        if self.penalty is None:
            return moment.pressure if moment.progress > 0 else 0.0
        return self.penalty

    @abstractmethod
    def opening(self, progress: float) -> float:
        """The score above which a unit stays."""

    def line(self, progress: float) -> float:
        """Where scores that are to fall should be by now: on the way from the start to the opening, at an even speed.

        Progress is cubic in time, but a score moves by its learning rate a step, and no faster.
        """
        return self.score_init + (self.opening(1) - self.score_init) * (1 - math.pow(1 - progress, 1 / 3))


@dataclass(frozen=True)
class SoftMovement(Penalised):
    r"""Soft movement pruning (Sanh et al., 2020): what stays is above a value, and a penalty pushes scores below it.

    z = 1 where σ(S) > τ, else 0;  ∂L/∂S = G w, straight through;  loss += λ · mean σ(S)

    Args:
        tau: τ at the end; τ and λ grow with the schedule's descent.
    """

    min_keep_per_matrix: float = 0.005
    tau: float = 0.1

    def __post_init__(self) -> None:
        """Refuse a τ that σ never takes."""
        super().__post_init__()
        if not _is_number(self.tau) or not 0 < self.tau < 1:
            raise ValueError(f"tau must be between 0 and 1, got {self.tau!r}")

    def strength(self, moment: Moment) -> float:
        """λ grows as τ does."""
        return super().strength(moment) * (1.0 if self.penalty is None else moment.progress)

    def gradient(self, state: Mapping[str, Tensor], signal: Tensor | None) -> Tensor:
        """G w + λ σ'(S)."""
        sigmoid = state["score"].sigmoid()
        push = state["penalty"] * sigmoid * (1 - sigmoid)
        return push if signal is None else signal + push

    def opening(self, progress: float) -> float:
        """The S at which σ(S) = τ."""
        return _logit(self.tau * progress)


@dataclass(frozen=True)
class Gated(Penalised):
    """A penalised score whose units are multiplied by random gates while training.

    Args:
        seed: of the draws.
    """

    seed: int = 0

    @abstractmethod
    def gate(self, state: Mapping[str, Tensor], settled: bool) -> Tensor:
        """z: of this step's draw, ln u - ln(1-u) in `state["noise"]`, or `settled` for evaluation."""


@dataclass(frozen=True)
class HardConcrete(Gated):
    r"""ℓ0 regularisation (Louizos et al., 2018): weights are multiplied by random gates that can be exactly 0 or 1.

    s = σ((ln u - ln(1-u) + S) / β);  z = min(1, max(0, s (ζ-γ) + γ));  loss += λ · mean σ(S - β ln(-γ/ζ))

    u is uniform, a new draw each step, and the same for the same seed, step and position. Evaluation takes σ(S) for s;
    a unit is kept if that gate is open.
    """

    score_learning_rate: float = 1e-1
    score_init: float = 2.197

    temperature: ClassVar[float] = 2 / 3  # β
    low: ClassVar[float] = -0.1  # γ
    high: ClassVar[float] = 1.1  # ζ

    def init(self, count: int, device: torch.device) -> State:
        """Also the noise of this step's draw, ln u - ln(1-u)."""
        state = super().init(count, device)
        return {**state, "noise": torch.zeros_like(state["score"])}

    def numbers(self, moment: Moment) -> dict[str, float]:
        """Also the least gate of a unit that stays by rank, so that k kept units are k that are not zero."""
        by_rank = self.penalty is None and moment.progress == 1
        return {**super().numbers(moment), "least": 0.01 if by_rank else 0.0}

    def gate(self, state: Mapping[str, Tensor], settled: bool) -> Tensor:
        """z: of this step's draw, or `settled` for evaluation."""
        gate = self._stretched(state, settled).clamp(0, 1)
        return torch.maximum(gate, state["least"]) if settled else gate

    def _stretched(self, state: Mapping[str, Tensor], settled: bool) -> Tensor:
        score = state["score"]
        place = score if settled else (state["noise"] + score) / self.temperature
        return place.sigmoid() * (self.high - self.low) + self.low

    def gradient(self, state: Mapping[str, Tensor], signal: Tensor | None) -> Tensor:
        """G w ∂z/∂S + λ ∂P(z > 0)/∂S."""
        open_chance = (state["score"] - self.temperature * math.log(-self.low / self.high)).sigmoid()
        push = state["penalty"] * open_chance * (1 - open_chance)
        if signal is None:
            return push
        stretched = self._stretched(state, settled=False)
        sigmoid = (stretched - self.low) / (self.high - self.low)
        slope = (self.high - self.low) / self.temperature * sigmoid * (1 - sigmoid)
        inside = (stretched >= 0) & (stretched <= 1)
        return signal * torch.where(inside, slope, 0.0) + push

    def opening(self, progress: float) -> float:
        """The S at which the settled gate opens."""
        return _logit(-self.low / (self.high - self.low))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _logit(share: float) -> float:
    return math.log(share / (1 - share)) if share > 0 else -math.inf
