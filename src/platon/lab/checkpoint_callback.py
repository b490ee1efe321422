"""The Trainer callback that completes checkpoints, and reads them when training resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.engine.pruner import Pruner
from platon.lab import checkpoint, process_group
from platon.lab.attachment import Attachment
from platon.lab.errors import UserError


class CheckpointCallback(TrainerCallback):
    """Completes each checkpoint that Trainer writes, and reads it again when training resumes.

    Trainer calls `on_save` after it has written its files and removed old checkpoints. A checkpoint counts only once
    the marker `complete.json` is in it, so old ones are removed here, after that: `save_total_limit` counts complete
    checkpoints, and the last complete one is never removed.

    Args:
        resume_from: the checkpoint to read, if it is not in the `output_dir` of the training.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        self.resume_from = None if resume_from is None else Path(resume_from)
        self.pruner: Pruner | None = None
        self.attached: dict[str, Attachment] = {}  #: objects whose state checkpoints carry, by name
        self.extra: dict[str, Any] = {}  #: plain values that checkpoints carry
        self.clock: Callable[[], float] = lambda: 0.0  #: seconds that the run has taken, over all its resumptions
        self._limit: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over the removal of old checkpoints; when training resumes, load the states."""
        self._limit, args.save_total_limit = args.save_total_limit or self._limit, None
        if state.global_step == 0:
            return
        folder = self.resume_from or Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        wrong = checkpoint.problem(folder) if folder.is_dir() else f"there is no {str(folder)!r}"
        if wrong:
            raise UserError(f"cannot resume: {wrong}; {self._advice(folder)}")
        checkpoint.complete_weights(kwargs["model"], folder)
        self.extra = checkpoint.read_state(folder, self.pruner, self.attached)

    def _advice(self, folder: Path) -> str:
        """What to do when `folder` is no checkpoint to resume from."""
        if not folder.is_dir():
            name = type(self).__name__
            return f"say where Trainer resumes from: {name}(resume_from=...), the same as its resume_from_checkpoint"
        last, _ = checkpoint.last_complete(folder.parent)
        if last is None:
            return f"no checkpoint in {str(folder.parent)!r} is complete, so start afresh"
        return f"the last complete one is before it: train(resume_from_checkpoint={str(last)!r})"

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that Trainer has just written, then remove old ones."""
        if self.pruner is not None:
            self.pruner.check_ranks()
        process_group.wait_for_all()  # each process writes a file with its own random state
        if not state.is_world_process_zero:
            return
        output = Path(str(args.output_dir))
        self.extra["seconds"] = self.clock()
        folder = output / f"checkpoint-{state.global_step}"
        checkpoint.write_state(folder, state.global_step, self.pruner, self.extra, self.attached)
        if self._limit:
            best = state.best_model_checkpoint  # what load_best_model_at_end will load
            checkpoint.rotate(output, self._limit, spare=None if best is None else Path(best))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave model, optimizer and arguments as they were."""
        args.save_total_limit = self._limit
        self.detach()

    def detach(self) -> None:
        """Remove the hooks of the pruner and of the attachments; the weights stay as they are."""
        if self.pruner is not None:
            self.pruner.detach()
        for one in self.attached.values():
            one.detach()
