"""Scores: how important is each unit, and what does a method need from the pruner?

A score is a frozen dataclass of hyper-parameters and pure functions on tensors. The pruner owns the tensors and asks
the questions below; a new method overrides what it answers differently, in one file, and nothing else changes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from platon.engine.schedule import Schedule
from platon.engine.scope import Scope, checked_scope
from platon.engine.steering import Steering

State = dict[str, Tensor]
Timing = Literal["after", "before"]
Reading = Timing | Literal["inputs"]


@dataclass(frozen=True)
class StepInfo:
    """What a method may know about an optimizer step.

    Args:
        step: counts from 1; 0 before the first one.
        keep: the share that the schedule asks for at this step; `None`: no mask is due.
        share: the share on the schedule's curve, whether or not a mask is due.
        progress: how far the share has come down, from 0 (start of the descent) to 1 (final share).
        elapsed: how much of the descent's time has passed, from 0 to 1.
        rate: the optimizer's learning rate relative to its peak.
        penalty: the steered penalty, for methods that have one (see `Score.controller`).
    """

    step: int
    keep: float | None = None
    share: float = 1.0
    progress: float = 1.0
    elapsed: float = 1.0
    rate: float = 1.0
    penalty: float = 0.0


@dataclass(frozen=True)
class TopK:
    """Keep the highest scores: round(keep · N) of all N weights, or of the N weights of each matrix, group or row."""

    keep: float
    scope: Scope = "global"


@dataclass(frozen=True)
class Above:
    """Keep every unit whose score is above `value`, however many that is.

    Args:
        keep: the share on the schedule's curve, which this choice may or may not meet.
        value: units with a higher score stay.
        min_keep: the least share of each matrix (or group) that stays; its best units fill up to it.
        watched: also count the scores above this value; the controller steers by their share.
    """

    keep: float
    value: float
    min_keep: float = 0.0
    watched: float | None = None


Choice = TopK | Above


@dataclass(frozen=True, kw_only=True)
class Score(ABC):
    """What every method answers; only `value` has no default.

    `state` holds the tensors of a method by name, one number a unit, or single numbers that all units read; the pruner
    owns them, and stores them in its own state. `info` is a `StepInfo`, what a method may know about the step.

    Examples:
        >>> @dataclass(frozen=True)
        ... class SquaredMagnitude(platon.Score):
        ...     def value(self, state, weight):
        ...         return weight.float() ** 2
        >>> pruner = platon.Pruner(model, optimizer, score=SquaredMagnitude(), schedule=platon.Constant(0.5))

    Args:
        scope: rank all weights of the model together ("global"), those of each matrix ("matrix") or of each output
            feature ("row"), or every M neighbours in a row ("2:4": 2 of 4 stay).
    """

    scope: Scope = "global"

    #: True: the optimizer trains all weights, and the model holds them times their mask or gate; a weight that comes
    #: back has the value it had. False: pruned weights are zero in the model and grow again from there.
    keeps_weights_aside: ClassVar[bool] = False
    #: For units of many weights, `signal` is the mean of w·g over a unit, so that units of different size compare.
    #: False: the sum, which is the gradient of a number in front of the whole unit.
    averages_signal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checked_scope(self.scope)

    @property
    def reads(self) -> Reading | None:
        """When `update` reads w·g: before or after the optimizer moves the weights; `None`: not at all.

        "inputs": it reads ‖x‖ of the feature that each weight multiplied instead, after the step.
        """
        return None

    @property
    def works_untrained(self) -> bool:
        """Whether a model can be pruned without training: no gradient is read."""
        return self.reads in (None, "inputs")

    # --- state and equations ------------------------------------------------------------------------------------------

    def init(self, count: int, device: torch.device) -> State:
        """The state of `count` units, in float32 whatever the training dtype; empty by default."""
        return {}

    def numbers(self, info: StepInfo, unit_share: float) -> dict[str, float]:
        """The single numbers of the state that are set anew at each step, before `update`.

        `unit_share` is one unit's part in the mean over all matrices of the mean over a matrix.
        """
        return {}

    def factors(self, state: Mapping[str, Tensor]) -> State:
        """Single numbers that follow from those of the state; `update` finds them in its state and returns them too.

        Computed once for all units: inside `update` a compiled pass would compute them again for every few weights.
        """
        return {}

    @property
    def has_factors(self) -> bool:
        """Whether the method has `factors`."""
        return type(self).factors is not Score.factors

    def phase(self, step: int) -> int:
        """The form of `update` that this step needs, as a small number. Each value compiles its own kernel."""
        return 0

    def update(self, state: Mapping[str, Tensor], signal: Tensor | None, phase: int) -> State:
        """The next state. `signal` is w·g of each unit (or what `reads` says); `None` where there is none."""
        return dict(state)

    @abstractmethod
    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """The score of each unit, float32; the highest stay. `weight` holds the units' present weights."""

    # --- what to keep -------------------------------------------------------------------------------------------------

    def choose(self, info: StepInfo) -> Choice | None:
        """Which units stay after this step; `None`: the mask does not change."""
        return None if info.keep is None else TopK(info.keep, self.scope)

    def check_groups(self) -> None:
        """Raise an error if units of many weights cannot be ranked: they have no row and no input of their own."""
        if self.reads == "inputs" or self.scope not in ("global", "matrix"):
            raise ValueError(
                f"{type(self).__name__} with scope {self.scope!r} ranks single weights; prune weights, not groups"
            )

    @property
    def meets_share(self) -> bool:
        """Whether exactly the schedule's share is kept in the end; otherwise the share is a result."""
        return True

    def fitted(self, schedule: Schedule) -> Self:
        """The same method with settings that depend on the schedule filled in; an error if it cannot work with it."""
        return self

    def controller(self) -> Steering | None:
        """A fresh controller for the penalty, if the method lets one steer it."""
        return None

    # --- gates --------------------------------------------------------------------------------------------------------

    def gate(self, state: Mapping[str, Tensor], settled: bool) -> Tensor | None:
        """The number in front of each weight: this step's random one, or the `settled` one; `None`: it has no gates."""
        return None

    @property
    def gated(self) -> bool:
        """Whether the method has gates."""
        return type(self).gate is not Score.gate

    @property
    def noise_seed(self) -> int | None:
        """Seed of the random numbers that `state["noise"]` gets for each step; `None`: none are drawn."""
        return None

    def applies_mask(self, info: StepInfo) -> bool:
        """Whether the model holds masked weights after this step; a gated method may leave pruning to its gates."""
        return True


def nan_error(name: str) -> ValueError:
    """For scores of the matrix or group `name` that have no order."""
    return ValueError(
        f"a score of {name!r} is NaN, so there is no order; look for NaN among its weights or in the pruner's state"
    )


def checked_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    """Refuse a `value` that is not among `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
