"""Schedules: what share of the weights to keep at each step."""

import math
import numbers
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

# The defaults of every way to prune: `Cubic`, `PruningCallback` and the command line. `every` is what the authors' code
# does: between two masks zeroed weights grow freely and can come back. The shares are within the range of the paper's
# appendix, for trainings of any length.
EVERY, WARMUP, COOLDOWN = 10, 0.1, 0.3


class Schedule(Protocol):
    """`step -> keep`, or `None` for "leave the weights alone at this step". Steps count from 1."""

    def __call__(self, step: int) -> float | None: ...


@runtime_checkable
class Ramp(Schedule, Protocol):
    """A schedule that also answers between two masks: what a penalty needs that grows with the descent."""

    def share(self, step: int) -> float:
        """The share on the curve, whether or not a mask is due at this step."""

    def progress(self, step: int) -> float:
        """How far the share has come down: 0 before the descent, 1 from its end on."""

    def elapsed(self, step: int) -> float:
        """How much of the descent's time has passed: 0 before it, 1 from its end on."""


def checked_keep(keep: object, name: str = "keep") -> float:
    """`keep` as a float, if it is a share in (0, 1]; otherwise an error that says what to write."""
    value = float(keep) if isinstance(keep, numbers.Real) and not isinstance(keep, bool) else math.nan
    if not 0 < value <= 1:
        hint = f"write {value / 100:g} for {value:g} %" if 1 < value <= 100 else "give the share of weights that stays"
        raise ValueError(f"{name} must be in (0, 1], got {keep}; {hint}")
    return value


def checked_count(value: object, name: str, least: int = 0, most: float = math.inf) -> int:
    """`value`, if it is a whole number in this range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limit = "" if most == math.inf else f" and at most {most:,}"
        raise ValueError(f"{name} must be a whole number of at least {least}{limit}, got {value!r}")
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number; `True` and `False` are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Constant(Ramp):
    """The same share from the first step on.

    Args:
        keep: the share, in (0, 1].
    """

    keep: float

    def __post_init__(self) -> None:
        checked_keep(self.keep)

    def __call__(self, step: int) -> float | None:
        return self.keep

    def share(self, step: int) -> float:
        """The share at a step."""
        return self.keep

    def progress(self, step: int) -> float:
        """1: there is no descent."""
        return 1.0

    def elapsed(self, step: int) -> float:
        """1: there is no descent."""
        return 1.0


@dataclass(frozen=True)
class Cubic(Ramp):
    r"""The paper's schedule: dense, then a cubic descent, then the final share until the end.

    Examples:
        >>> schedule = platon.Cubic(final=0.1, total=1000)  # dense to step 100, 10 % from step 700 on
        >>> round(schedule(400), 4)
        0.2125
        >>> schedule(401) is None  # no mask at this step
        True

    r(t) = r_T + (r_0 - r_T) (1 - (t - t_i) / (T - t_i - t_f))³   for t_i ≤ t < T - t_f

    The fraction is the continuous one: the paper's appendix prints t - t_i - t_f as its numerator, with which r jumps
    at both ends.

    Args:
        final: r_T, the share kept at the end.
        total: T, the optimizer steps of the whole training.
        warmup: t_i, steps before the descent starts; below 1: a share of the training.
        cooldown: t_f, steps of training at the final share, with a mask at each of them; below 1: a share of the
            training.
        every: during the descent, masks fall on the multiples of this.
        initial: r_0, the share kept before the descent.
    """

    final: float
    total: int
    warmup: float = WARMUP
    cooldown: float = COOLDOWN
    every: int = EVERY
    initial: float = 1.0

    def __post_init__(self) -> None:
        checked_keep(self.final, "final")
        checked_keep(self.initial, "initial")
        if self.initial < self.final:
            raise ValueError(
                f"initial must not be below final ({self.final}), got {self.initial}; pruning only removes"
            )
        checked_count(self.total, "total", least=1)
        checked_count(self.every, "every", least=1)
        if self.start > self.end:
            raise ValueError(
                f"warmup + cooldown must not exceed total, got {self.start} + {self.total - self.end} > {self.total}; "
                "shorten one of them or train for longer"
            )

    @property
    def start(self) -> int:
        """t_i: the step at which the descent starts."""
        return steps_of(self.warmup, self.total, "warmup")

    @property
    def end(self) -> int:
        """T - t_f: the first step of the final phase."""
        return self.total - steps_of(self.cooldown, self.total, "cooldown")

    def __call__(self, step: int) -> float | None:
        if step >= self.end:
            return self.final
        if step % self.every or (step < self.start and self.initial == 1):
            return None
        return self.share(step)

    def share(self, step: int) -> float:
        """The share on the curve, whether or not a mask is due at this step."""
        return self.final + (self.initial - self.final) * (1 - self.elapsed(step)) ** 3

    def progress(self, step: int) -> float:
        """How far the share has come down, from 0 to 1: cubic in time, as the share is."""
        return 1 - (1 - self.elapsed(step)) ** 3

    def elapsed(self, step: int) -> float:
        """How much of the descent's time has passed, from 0 to 1."""
        if step >= self.end:
            return 1.0
        return (step - self.start) / (self.end - self.start) if step > self.start else 0.0


def steps_of(value: float, total: int, name: str) -> int:
    """A number of steps; a value below 1 is a share of `total`."""
    if not is_number(value) or value < 0 or (value >= 1 and value != round(value)):
        raise ValueError(f"{name} must be a whole number of steps, or a share of the training below 1, got {value!r}")
    return round(value * total) if value < 1 else int(value)
