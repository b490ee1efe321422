"""How long a run will take: the time of a step, measured on a few of them."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.engine.distillation.distillation import Distillation
from platon.lab import tasks
from platon.lab.attachment import Attachment
from platon.lab.settings import ResolvedSettings, Settings
from platon.lab.step_count import count_steps
from platon.lab.tasks import Prepared, Request
from platon.lab.training import make_trainer


class StepTimer(TrainerCallback):
    """Measures the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds.append(time.monotonic() - self._began)

    def median(self) -> float:
        """Without the first step, in which memory is allocated and kernels are compiled."""
        return float(np.median(self.seconds[1:] or self.seconds))


def _stand_in(settings: Settings, model: Any, prepared: Prepared) -> dict[str, Attachment]:
    """A teacher of the model's size, for the time that it takes: the real one may not be trained yet."""
    if settings.teacher == "none":
        return {}
    weight, hidden_weight = settings.distil_weight, settings.hidden_weight
    return {"distillation": Distillation(model, "self", weight=weight, hidden_weight=hidden_weight)}


def measure_step(resolved: ResolvedSettings, tried: int = 4) -> tuple[int, float]:
    """The steps that a run will have, and the seconds that one of them takes on this machine."""
    settings = resolved.settings
    prepared = tasks.find(settings.task).prepare(Request.from_settings(settings))
    steps = count_steps(resolved, len(prepared.train))
    timer = StepTimer()
    with tempfile.TemporaryDirectory() as place:
        trainer, checkpoints = make_trainer(settings, steps, prepared, Path(place), attach=_stand_in)
        trainer.args.max_steps, trainer.args.eval_strategy, trainer.args.save_strategy = tried, "no", "no"
        trainer.callback_handler.callbacks[0:0] = [checkpoints, timer]
        trainer.train()
    return steps.total, timer.median()
