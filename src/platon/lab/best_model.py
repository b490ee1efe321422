"""The best model of a run: the best evaluation at the final share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.lab.checkpoint_callback import CheckpointCallback
from platon.lab.file import link_error, remove
from platon.lab.folder import RunFolder
from platon.lab.measure import Measure


class BestModelCallback(TrainerCallback):
    """Saves the model whenever an evaluation of the final phase is better than those before it.

    An evaluation before the final share is reached does not count: it is of a denser model.

    Args:
        folder: the run's.
        first_step: the first step at the final share.
        headline: the logged name of the metric that decides.
        measure: which of two values of it is better.
        checkpoints: carries step and value of the best evaluation in `extra["best"]`.
    """

    def __init__(
        self, folder: RunFolder, first_step: int, headline: str, measure: Measure, checkpoints: CheckpointCallback
    ) -> None:
        self.folder, self.first_step, self.checkpoints = folder, first_step, checkpoints
        self.headline, self.measure = headline, measure

    @property
    def best(self) -> dict[str, Any] | None:
        """Step, value and share kept of the best evaluation so far."""
        return self.checkpoints.extra.get("best")

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if metrics is None or state.global_step < self.first_step:
            return
        value = metrics[self.headline]
        if self.best is None or self.measure.is_better(value, self.best["value"]):
            pruner = self.checkpoints.pruner
            kept = 1.0 if pruner is None else pruner.kept()
            self.checkpoints.extra["best"] = {"step": state.global_step, "value": value, "kept": kept}
            if state.is_world_process_zero:
                save_model(kwargs["model"], self.folder.best(state.global_step))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove earlier best models, now that no checkpoint refers to them."""
        if state.is_world_process_zero and self.best is not None:
            for path in self.folder.best_models():
                if path != self.folder.best(self.best["step"]):
                    remove(path)


def save_model(model: Any, folder: Path) -> None:
    """`save_pretrained` to a temporary folder that is then renamed, so that `folder` is complete or not there."""
    if folder.is_symlink():
        raise link_error(folder)
    temporary = folder.with_name(f".{folder.name}")
    remove(temporary)
    model.save_pretrained(temporary)
    remove(folder)
    temporary.replace(folder)
