"""The callback that writes the history of a run, and prints its progress."""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.lab.checkpoint_callback import CheckpointCallback
from platon.lab.file import append_line
from platon.lab.folder import RunFolder
from platon.lab.printer import Printer


class HistoryCallback(TrainerCallback):
    """Appends each logged line to `history.jsonl`, and prints a line for each evaluation.

    Args:
        folder: the run's.
        total: steps of the training.
        headline: the logged name of the metric that is printed.
        checkpoints: holds the pruner, and `extra["not_finite"]`, which is set here.
        printer: where to print.
    """

    def __init__(
        self, folder: RunFolder, total: int, headline: str, checkpoints: CheckpointCallback, printer: Printer
    ) -> None:
        self.folder, self.total, self.headline = folder, total, headline
        self.checkpoints, self.printer = checkpoints, printer
        self._began = (0, 0.0)  # step and time at which this process started to train

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began = (state.global_step, time.monotonic())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and not math.isfinite(logs.get("loss", 0.0)):
            self.checkpoints.extra.setdefault("not_finite", f"the loss was not finite at step {state.global_step}")
        if state.is_world_process_zero and logs and ("loss" in logs or any(name.startswith("eval_") for name in logs)):
            numbers = {name: value for name, value in logs.items() if math.isfinite(value)}
            append_line(self.folder.history, {"step": state.global_step, **numbers})

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if metrics is None or self.printer.bar:
            return
        step, (first, began), pruner = state.global_step, self._began, self.checkpoints.pruner
        left = (time.monotonic() - began) / max(step - first, 1) * (self.total - step)
        name = self.headline.removeprefix("eval_").replace("_", " ")
        kept = "" if pruner is None else f", {pruner.kept():.1%} kept"
        remaining = f", about {left:.0f} s left" if step < self.total else ""
        self.printer.line(f"step {step} of {self.total}: {name} {100 * metrics[self.headline]:.2f}{kept}{remaining}")
