"""`PruningCallback`: pruning in a `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerControl, TrainerState, TrainingArguments

from platon.engine.pruner_settings import PrunerSettings, check_target
from platon.engine.schedule import COOLDOWN, EVERY, WARMUP, Schedule
from platon.engine.score import Score
from platon.engine.units import Units
from platon.lab.checkpoint_callback import CheckpointCallback
from platon.lab.errors import UserError


class PruningCallback(CheckpointCallback):
    """Prunes the model of a `transformers.Trainer` while it trains.

    Examples:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[PruningCallback(keep=0.1)])
        >>> trainer.train()                                  # the model's weights are the pruned weights
        >>> trainer.train(resume_from_checkpoint=True)       # goes on where the last checkpoint was taken

    It logs `keep`, `kept` and `cut` with Trainer's own lines and in its progress bar, and stores the pruner's state in
    every checkpoint (see `CheckpointCallback`).

    Args:
        keep: the share of the prunable weights that is kept at the end.
        warmup: steps before pruning starts; a float below 1 is a share of the training.
        cooldown: steps at the final share; a float below 1 is a share of the training.
        every: steps between masks while the share falls.
        score: the method; PLATON by default.
        schedule: instead of keep, warmup, cooldown and every.
        units: what is pruned, or a function of the model that returns it; every weight of the blocks by default.
        on_nonfinite: "raise" or "skip", see `Pruner`.
        resume_from: the checkpoint to take the pruner's state from, if it is not in the `output_dir` of the training.
    """

    def __init__(
        self,
        keep: float = 0.1,
        *,
        warmup: float = WARMUP,
        cooldown: float = COOLDOWN,
        every: int = EVERY,
        score: Score | None = None,
        schedule: Schedule | None = None,
        units: Units | Callable[[nn.Module], Units] | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        resume_from: str | Path | None = None,
    ) -> None:
        super().__init__(resume_from)
        self.settings = PrunerSettings(keep, warmup, cooldown, every, score, schedule, units, on_nonfinite)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Build the pruner; when training resumes, load its state."""
        if self.pruner is not None:
            self.detach()
        try:
            self.pruner = self.settings.build(kwargs["model"], [kwargs["optimizer"]], state.max_steps)
            super().on_train_begin(args, state, control, **kwargs)
            target = self.pruner.schedule(state.max_steps)
            check_target(self.extra.get("target") if state.global_step else None, target)
        except ValueError as error:
            self.detach()
            raise UserError(str(error)) from error
        self.extra["target"] = target

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Train with random gates again, where the method has them.

        Also make Trainer forget its best model until the target share is reached: a denser one would win.
        """
        assert self.pruner is not None
        self.pruner.unsettle()
        target = self.pruner.schedule(state.max_steps)
        if target is not None and self.pruner.keep > target:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluation and saving come next: they see the deterministic gates."""
        assert self.pruner is not None
        self.pruner.settle()

    def numbers(self) -> dict[str, float]:
        """What is logged: the share asked for, the share kept, and the score at the boundary or the penalty."""
        assert self.pruner is not None
        pruner = self.pruner
        numbers = {"keep": round(pruner.keep, 6), "kept": round(pruner.kept(), 6)}
        if not pruner.score.meets_share:
            del numbers["keep"]
        more = {"cut": pruner.cut, "penalty": pruner.penalty}
        return numbers | {name: value for name, value in more.items() if value is not None}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the pruner's numbers to the line that Trainer logs, and to its progress bar."""
        if self.pruner is None or logs is None or "loss" not in logs:
            return
        numbers = self.numbers()
        logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)
        for bar in getattr(tqdm, "_instances", ()):  # Trainer does not give callbacks its progress bar
            if bar.total == state.max_steps:
                bar.set_postfix(kept=f"{numbers['kept']:.3f}", refresh=False)
