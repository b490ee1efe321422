"""Learned scores: trained beside the weights, by an AdamW of their own that runs inside the pruner.

The forward pass uses w ⊙ z, where the mask or gate z follows from the score S. The model's parameter holds w ⊙ z, so
autograd gives G = ∂L/∂(w ⊙ z); the chain rule then gives G · w · ∂z/∂S for the score and G · z for the weight. The
pruner keeps w aside, hands it to the optimizer for its step, and writes w ⊙ z back afterwards.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from platon.engine.schedule import Ramp, Schedule, is_number
from platon.engine.scope import Scope
from platon.engine.score import Above, Choice, Score, State, StepInfo, TopK
from platon.engine.steering import Steering

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8  # AdamW's usual settings


@dataclass(frozen=True)
class Learned(Score):
    """A score that gradient descent learns. A pruned weight keeps its value aside and comes back with it.

    Args:
        score_learning_rate: the peak learning rate of the scores; it follows the user's own learning-rate schedule.
        score_init: the value of every score at the start.
    """

    score_learning_rate: float = 1e-2
    score_init: float = 0.0

    reads: ClassVar[Literal["before"]] = "before"  # the gradient belongs to the weights before the step
    keeps_weights_aside: ClassVar[bool] = True
    averages_signal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.score_learning_rate) or self.score_learning_rate <= 0:
            raise ValueError(f"score_learning_rate must be above 0, got {self.score_learning_rate!r}; 0.01 is usual")
        if not is_number(self.score_init):
            raise ValueError(f"score_init must be a number, got {self.score_init!r}")

    def init(self, count: int, device: torch.device) -> State:
        """S, the two moments of its AdamW, and single numbers: steps taken and what `numbers` sets."""
        state = {name: torch.zeros(count, dtype=torch.float32, device=device) for name in ("score", "mean", "square")}
        state["score"].fill_(self.score_init)
        single = ("steps", *self.numbers(StepInfo(0), 0.0))
        return state | {name: torch.zeros((), dtype=torch.float32, device=device) for name in single}

    def numbers(self, info: StepInfo, unit_share: float) -> dict[str, float]:
        return {"rate": self.score_learning_rate * info.rate}

    def factors(self, state: Mapping[str, Tensor]) -> State:
        """AdamW's corrections for moments that start at zero: of the step by 1 - β1ᵗ, of its divisor by √(1 - β2ᵗ)."""
        steps = state["steps"] + 1
        # 1 - βᵗ, without the digits that float32 would lose in the difference.
        first, second = (-torch.expm1(steps * math.log(beta)) for beta in (_BETA1, _BETA2))
        return {"step_size": state["rate"] / first, "root": second.sqrt()}

    def gradient(self, state: Mapping[str, Tensor], signal: Tensor | None) -> Tensor | None:
        """∂L/∂S; `None` where the step gave no gradient. By default G · w: straight through the mask."""
        return signal

    def update(self, state: Mapping[str, Tensor], signal: Tensor | None, phase: int) -> State:
        """One step of AdamW on the scores, without weight decay."""
        gradient = self.gradient(state, signal)
        if gradient is None:
            return dict(state)
        mean = _BETA1 * state["mean"] + (1 - _BETA1) * gradient
        square = _BETA2 * state["square"] + (1 - _BETA2) * gradient * gradient
        score = state["score"] - state["step_size"] * (mean / (square.sqrt() / state["root"] + _EPSILON))
        return {**state, "score": score, "mean": mean, "square": square, "steps": state["steps"] + 1}

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
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
        penalty: λ, as in the papers: the schedule then only says when the penalty grows. `None`: λ is steered, so that
            at the end of the descent about the schedule's share is left, and in the final phase exactly that share of
            the highest scores stays.
        min_keep_per_matrix: the least share of each matrix that stays, whatever the penalty.
    """

    penalty: float | None = None
    min_keep_per_matrix: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.penalty is not None and (not is_number(self.penalty) or self.penalty < 0):
            raise ValueError(f"penalty must be at least 0, got {self.penalty!r}; None steers it towards the share")
        if not is_number(self.min_keep_per_matrix) or not 0 <= self.min_keep_per_matrix <= 1:
            raise ValueError(f"min_keep_per_matrix must be in [0, 1], got {self.min_keep_per_matrix!r}")

    def fitted(self, schedule: Schedule) -> Self:
        """The penalty grows with the descent, so the schedule must say how far the descent has come."""
        if not isinstance(schedule, Ramp):
            raise TypeError(
                f"{type(self).__name__} needs a schedule that says where it stands between two masks, "
                f"as platon.Cubic does, got {schedule!r}"
            )
        return self

    @property
    def meets_share(self) -> bool:
        return self.penalty is None

    def controller(self) -> Steering | None:
        return Steering() if self.penalty is None else None

    def numbers(self, info: StepInfo, unit_share: float) -> dict[str, float]:
        """Also the derivative of the penalty's mean by one unit's term."""
        return {**super().numbers(info, unit_share), "penalty": unit_share * self.strength(info)}

    def strength(self, info: StepInfo) -> float:
        """λ at this step."""
        if self.penalty is None:
            return info.penalty if info.progress > 0 else 0.0
        return self.penalty

    def choose(self, info: StepInfo) -> Choice:
        """All scores above the fixed value, at every step; with a steered penalty exactly the share at the end."""
        if self.penalty is None and info.progress == 1:
            return TopK(info.share if info.keep is None else info.keep, self.scope)
        watched = None
        if self.penalty is None and info.progress > 0:
            # A line from the initial score to the final boundary at constant speed, as scores move at most: by their
            # learning rate a step. So the share of scores above this line shows early whether enough of them will have
            # fallen below the boundary when the descent ends.
            watched = self.score_init + (self.boundary(1) - self.score_init) * info.elapsed
        return Above(info.share, self.boundary(info.progress), self.min_keep_per_matrix, watched)

    @abstractmethod
    def boundary(self, progress: float) -> float:
        """The score above which a unit stays."""


@dataclass(frozen=True)
class SoftMovement(Penalised):
    r"""Soft movement pruning (Sanh et al., 2020): a penalty pushes scores below the value at which units are pruned.

    z = 1 where σ(S) > τ, else 0;  ∂L/∂S = G w, straight through;  loss += λ · mean σ(S)

    Args:
        tau: τ at the end; τ and λ grow with the schedule's descent.
    """

    min_keep_per_matrix: float = 0.005
    tau: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.tau) or not 0 < self.tau < 1:
            raise ValueError(f"tau must be between 0 and 1, got {self.tau!r}")

    def strength(self, info: StepInfo) -> float:
        """A fixed λ grows as τ does."""
        return super().strength(info) * (1.0 if self.penalty is None else info.progress)

    def gradient(self, state: Mapping[str, Tensor], signal: Tensor | None) -> Tensor:
        """G w + λ σ'(S)."""
        sigmoid = state["score"].sigmoid()
        push = state["penalty"] * sigmoid * (1 - sigmoid)
        return push if signal is None else signal + push

    def boundary(self, progress: float) -> float:
        """The S at which σ(S) = τ."""
        return _logit(self.tau * progress)


@dataclass(frozen=True)
class Gated(Penalised):
    """A penalised score whose weights are multiplied by random gates while training.

    A subclass overrides `gate`. For each step the pruner fills `state["noise"]` with ln u - ln(1-u), u uniform in
    (0, 1), the same numbers for the same seed, step and position.

    Args:
        seed: of the random numbers.
    """

    seed: int = 0

    @property
    def noise_seed(self) -> int:
        return self.seed

    def init(self, count: int, device: torch.device) -> State:
        return super().init(count, device) | {"noise": torch.zeros(count, dtype=torch.float32, device=device)}

    @abstractmethod
    def gate(self, state: Mapping[str, Tensor], settled: bool) -> Tensor: ...

    def applies_mask(self, info: StepInfo) -> bool:
        """Only once the share is exact, in the final phase; before that the gates do the pruning."""
        return self.penalty is None and info.step > 0 and info.progress == 1


@dataclass(frozen=True)
class HardConcrete(Gated):
    r"""ℓ0 regularisation (Louizos et al., 2018): weights are multiplied by random gates that can be exactly 0 or 1.

    s = σ((ln u - ln(1-u) + S) / β);  z = min(1, max(0, s (ζ-γ) + γ));  loss += λ · mean σ(S - β ln(-γ/ζ))

    Evaluation takes σ(S) for s; a unit is kept if that gate is open.
    """

    score_learning_rate: float = 1e-1
    score_init: float = 2.197

    temperature: ClassVar[float] = 2 / 3  # β
    low: ClassVar[float] = -0.1  # γ
    high: ClassVar[float] = 1.1  # ζ

    def numbers(self, info: StepInfo, unit_share: float) -> dict[str, float]:
        """Also the least gate of a unit that is kept by rank, so that k kept units are k that are not zero."""
        by_rank = self.penalty is None and info.progress == 1
        return {**super().numbers(info, unit_share), "least": 0.01 if by_rank else 0.0}

    def gate(self, state: Mapping[str, Tensor], settled: bool) -> Tensor:
        """Z, at least `least` where it is settled."""
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

    def boundary(self, progress: float) -> float:
        """The S at which the settled gate opens."""
        return _logit(-self.low / (self.high - self.low))


def _logit(share: float) -> float:
    return math.log(share / (1 - share)) if share > 0 else -math.inf
