"""How long a training and its phases are, in optimizer steps."""

from __future__ import annotations

import dataclasses
from math import ceil
from typing import TYPE_CHECKING

from platon.lab.errors import UserError

if TYPE_CHECKING:
    from platon.lab.settings import ResolvedSettings


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """Lengths in optimizer steps: of the training and its phases, and between evaluations, log lines, checkpoints."""

    total: int
    warmup: int
    cooldown: int
    lr_warmup: int
    eval_every: int
    log_every: int
    checkpoint_every: int


def count_steps(resolved: ResolvedSettings, rows: int) -> StepCounts:
    """Turn epochs and shares into steps, for `rows` training rows.

    A recipe's warmup and cooldown are steps of a training of `reference_steps`; in a shorter training they shrink in
    proportion. Steps that the user gives are taken as they are.
    """
    s = resolved.settings
    if s.steps is None and s.epochs <= 0:
        raise UserError(f"epochs must be above 0, got {s.epochs:g}")
    if s.steps == 0:
        return StepCounts(0, 0, 0, 0, 1, 1, 1)
    total = s.steps if s.steps is not None else max(1, ceil(s.epochs * ceil(rows / s.batch)))

    def steps(name: str) -> int:
        value = getattr(s, name)
        if value < 1:
            return round(value * total)
        if s.reference_steps and resolved.sources[name] != "user":
            return round(value * total / s.reference_steps)
        return round(value)

    warmup, cooldown = steps("warmup"), steps("cooldown")
    if warmup + cooldown > total:
        raise UserError(
            f"warmup + cooldown must not exceed the {total} steps of the training, got {warmup} + {cooldown}; "
            "shorten one of them or train for longer"
        )
    return StepCounts(
        total=total,
        warmup=warmup,
        cooldown=cooldown,
        lr_warmup=min(steps("lr_warmup"), total),
        eval_every=s.eval_every or max(1, ceil(total / 10)),
        log_every=s.log_every or max(1, total // 100),
        checkpoint_every=s.checkpoint_every or max(1, ceil(total / 10)),
    )
