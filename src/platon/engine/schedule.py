"""Schedules: what share of the weights to keep at each step."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class Schedule(Protocol):
    """`step -> keep`, or `None` for "leave the weights alone at this step". Steps count from 1."""

    def __call__(self, step: int) -> float | None: ...


@runtime_checkable
class Ramp(Schedule, Protocol):
    """A schedule that also says where it stands between two masks: what a penalty needs that grows with it."""

    def share(self, step: int) -> float:
        """The share on the curve, whether or not a mask falls on this step."""
        ...

    def progress(self, step: int) -> float:
        """0 before the descent, 1 from its end on."""
        ...


def checked_keep(keep: float, name: str = "keep") -> float:
    """`keep`, if it is a share; otherwise the sentence that says what to write."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        percent = isinstance(keep, int | float) and not isinstance(keep, bool) and 1 < keep <= 100
        hint = f"write {keep / 100:g} for {keep:g} %" if percent else "give the share of weights that stays"
        raise ValueError(f"{name} must be in (0, 1], got {keep}; {hint}")
    return float(keep)


def checked_count(value: int, name: str, least: int = 0) -> int:
    """`value`, if it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


@dataclass(frozen=True)
class Constant:
    """The same share from the first step on."""

    keep: float

    def __post_init__(self) -> None:
        """Refuse what is not a share."""
        checked_keep(self.keep)

    def __call__(self, step: int) -> float | None:
        """The share to keep after `step`."""
        return self.keep

    def share(self, step: int) -> float:
        """The same."""
        return self.keep

    def progress(self, step: int) -> float:
        """1: there is no descent."""
        return 1.0


@dataclass(frozen=True)
class Cubic:
    r"""The paper's schedule: dense, then a cubic descent, then the final share until the end.

    r(t) = r_T + (r_0 - r_T) (1 - (t - t_i) / (T - t_i - t_f))³   for t_i ≤ t < T - t_f

    The fraction is the continuous one: the paper's appendix prints t - t_i - t_f above the line, with which r jumps
    at both ends.

    Args:
        final: r_T, the share kept at the end.
        total: T, the optimizer steps of the whole training.
        warmup: t_i, steps before the descent starts.
        cooldown: t_f, steps of training at the final share, with a mask at each of them.
        every: during the descent, masks fall on the multiples of this.
        initial: r_0, the share kept before the descent.
    """

    final: float
    total: int
    warmup: int = 0
    cooldown: int = 0
    every: int = 1
    initial: float = 1.0

    def __post_init__(self) -> None:
        """Refuse shares that are none, and phases that do not fit into the training."""
        checked_keep(self.final, "final")
        checked_keep(self.initial, "initial")
        if self.initial < self.final:
            raise ValueError(
                f"initial must not be below final ({self.final}), got {self.initial}; pruning only removes"
            )
        checked_count(self.total, "total", least=1)
        checked_count(self.warmup, "warmup")
        checked_count(self.cooldown, "cooldown")
        checked_count(self.every, "every", least=1)
        if self.warmup + self.cooldown > self.total:
            raise ValueError(
                f"warmup + cooldown must not exceed total, got {self.warmup} + {self.cooldown} > {self.total}; "
                "shorten one of them or train for longer"
            )

    def __call__(self, step: int) -> float | None:
        """The share to keep after `step`, or `None` where no mask falls."""
        if step >= self.total - self.cooldown:
            return self.final
        if step % self.every or (step < self.warmup and self.initial == 1):
            return None
        return self.share(step)

    def share(self, step: int) -> float:
        """The share on the curve, whether or not a mask falls."""
        return self.final + (self.initial - self.final) * self._left(step) ** 3

    def progress(self, step: int) -> float:
        """0 before the descent, 1 from its end on, and cubic between them as the share is."""
        return 1 - self._left(step) ** 3

    def _left(self, step: int) -> float:
        if step >= self.total - self.cooldown:
            return 0.0
        if step < self.warmup:
            return 1.0
        return 1 - (step - self.warmup) / (self.total - self.warmup - self.cooldown)
