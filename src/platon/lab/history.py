"""The callback that writes the history of a run."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.lab.checkpoint_callback import CheckpointCallback
from platon.lab.file import append_line
from platon.lab.folder import RunFolder


class HistoryCallback(TrainerCallback):
    """Appends each logged line to `history.jsonl`.

    Args:
        folder: the run's.
        checkpoints: holds `extra["not_finite"]`, which is set here.
    """

    def __init__(self, folder: RunFolder, checkpoints: CheckpointCallback) -> None:
        self.folder, self.checkpoints = folder, checkpoints

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
