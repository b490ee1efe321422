"""The settings of a pruner that is built later, when a training starts: what the callbacks of both Trainers take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from platon.engine.pruner import Pruner
from platon.engine.schedule import Cubic, Schedule, checked_keep
from platon.engine.score import Score
from platon.engine.shard import is_sharded
from platon.engine.units import Units, weights


@dataclass(frozen=True)
class PrunerSettings:
    """What is known before a training's model, optimizer and length are; see `platon.PruningCallback` for each."""

    keep: float
    warmup: float
    cooldown: float
    every: int
    score: Score | None
    schedule: Schedule | None
    units: Units | Callable[[nn.Module], Units] | None
    on_nonfinite: Literal["raise", "skip"]

    def __post_init__(self) -> None:
        checked_keep(self.keep)

    def build(self, model: nn.Module, optimizers: Sequence[Optimizer], steps: int) -> Pruner:
        """The pruner of a training of so many steps, on the optimizer that trains what is pruned."""
        units = self.units(model) if callable(self.units) else self.units
        units = weights(model) if units is None else units
        first = next(iter(units.matrices.values()))
        if is_sharded(first):
            raise ValueError(
                "the model is sharded, and a callback cannot save the state of a sharded one; train with DDP, or use "
                "platon.Pruner in a loop of your own"
            )
        trains = (o for o in optimizers if any(p is first for group in o.param_groups for p in group["params"]))
        return Pruner(
            model,
            next(trains, optimizers[0]),  # if none does, the pruner says what is wrong
            score=self.score,
            schedule=self.schedule or Cubic(self.keep, steps, self.warmup, self.cooldown, self.every),
            units=units,
            on_nonfinite=self.on_nonfinite,
        )


def check_target(before: float | None, now: float | None) -> None:
    """Refuse to resume a training that kept another share at its end; `None`: that share is not known."""
    if before is not None and now is not None and before != now:
        raise ValueError(
            f"cannot resume: the checkpoint belongs to a training that keeps {before:g} at its end, and this one keeps "
            f"{now:g}; give the same keep, or start afresh"
        )
