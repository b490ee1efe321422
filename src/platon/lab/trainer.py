"""The bridge to transformers' Trainer: one callback that prunes, logs, checkpoints and resumes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.engine.pruner import Pruner
from platon.engine.schedule import Cubic, Schedule, checked_keep
from platon.engine.score import Score
from platon.engine.shard import is_sharded
from platon.engine.units import Units
from platon.lab import checkpoint, job
from platon.lab.errors import UserError


class SealedCheckpoints(TrainerCallback):
    """Completes each checkpoint that Trainer writes, and reads it again when training resumes.

    Trainer calls `on_save` after its own files and after its own rotation. So a checkpoint counts once the marker
    `complete.json` is there, and rotation is done here, after it: `save_total_limit` counts complete checkpoints.

    Args:
        resume_from: the checkpoint to read, if it is not in the `output_dir` of the training.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        """Nothing yet; training has not begun."""
        self.resume_from = None if resume_from is None else Path(resume_from)
        self.pruner: Pruner | None = None
        self.extra: dict[str, Any] = {}  #: plain values that ride along
        self.clock: Callable[[], float] = lambda: 0.0  #: seconds that the run has taken, over all its resumptions
        self._limit: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over rotation; when training resumes, give the pruner its state back."""
        self._limit, args.save_total_limit = args.save_total_limit or self._limit, None
        if state.global_step == 0:
            return
        folder = self.resume_from or Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        wrong = checkpoint.problem(folder) if folder.is_dir() else f"there is no {str(folder)!r}"
        if wrong:
            raise UserError(f"cannot resume: {wrong}; {self._way_on(folder)}")
        checkpoint.complete_weights(kwargs["model"], folder)
        self.extra = checkpoint.unseal(folder, self.pruner)

    def _way_on(self, folder: Path) -> str:
        """What to do when `folder` is no checkpoint to resume from."""
        if not folder.is_dir():
            name = type(self).__name__
            return f"say where Trainer resumes from: {name}(resume_from=...), the same as its resume_from_checkpoint"
        last, _ = checkpoint.last_complete(folder.parent)
        if last is None:
            return f"no checkpoint in {str(folder.parent)!r} is complete, so start afresh"
        return f"the last complete one is before it: train(resume_from_checkpoint={str(last)!r})"

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that Trainer has just written, then remove what is too many."""
        if self.pruner is not None:
            self.pruner.check_ranks()
        job.wait()  # for the other processes' files: each has a random state of its own
        if not state.is_world_process_zero:
            return
        output = Path(str(args.output_dir))
        self.extra["seconds"] = self.clock()
        checkpoint.seal(output / f"checkpoint-{state.global_step}", state.global_step, self.pruner, self.extra)
        if self._limit:
            best = state.best_model_checkpoint  # for Trainer's load_best_model_at_end
            checkpoint.rotate(output, self._limit, spare=None if best is None else Path(best))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give rotation back."""
        args.save_total_limit = self._limit


class PruningCallback(SealedCheckpoints):
    """Prunes the model of a `transformers.Trainer` while it trains.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[PruningCallback(keep=0.1)])
        >>> trainer.train()                                  # the model's weights are the pruned weights
        >>> trainer.train(resume_from_checkpoint=True)       # goes on where the last checkpoint was taken

    It logs `keep`, `kept` and `cut` with Trainer's own lines and in its progress bar, and stores the pruner's state in
    every checkpoint, as `SealedCheckpoints` says.

    Args:
        keep: the share of the prunable weights that stays at the end.
        warmup: steps before pruning starts; a float below 1 is a share of the training.
        cooldown: steps at the final share; a float below 1 is a share of the training.
        every: steps between masks while the share falls.
        score: the method; PLATON by default.
        schedule: instead of keep, warmup, cooldown and every.
        units: what is pruned, or a function of the model that says so; every weight of the blocks by default.
        on_nonfinite: "raise" or "skip", see `Pruner`.
        resume_from: the checkpoint to take the pruner's state from, if it is not in the `output_dir` of the training.
    """

    def __init__(
        self,
        keep: float = 0.1,
        *,
        warmup: float = 0.1,
        cooldown: float = 0.3,
        every: int = 1,
        score: Score | None = None,
        schedule: Schedule | None = None,
        units: Units | Callable[[nn.Module], Units] | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        resume_from: str | Path | None = None,
    ) -> None:
        """Only the settings; the pruner is built when training begins."""
        super().__init__(resume_from)
        checked_keep(keep)
        self.keep, self.warmup, self.cooldown, self.every = keep, warmup, cooldown, every
        self.score, self.schedule, self.units = score, schedule, units
        self.on_nonfinite: Literal["raise", "skip"] = on_nonfinite
        self._settled = ExitStack()  # holds the weights as they are for evaluation, whenever no step is under way

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Build the pruner; when training resumes, give it its state back."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.pruner is not None:
            self.pruner.detach()
        self._settled = ExitStack()
        self.pruner = Pruner(
            model,
            optimizer,
            score=self.score,
            schedule=self.schedule or self._cubic(state.max_steps),
            units=self.units(model) if callable(self.units) else self.units,
            on_nonfinite=self.on_nonfinite,
        )
        if any(is_sharded(matrix) for matrix in self.pruner.units.matrices.values()):
            self.pruner.detach()
            raise UserError(
                "Trainer shards this model, and the callback cannot save the state of a sharded one; train with DDP, "
                "or use platon.Pruner in a loop of your own"
            )
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget Trainer's own best model until the target share is reached: a denser one would win."""
        assert self.pruner is not None
        self._settled.close()
        target = self.pruner.schedule(state.max_steps)
        if target is not None and self.pruner.keep > target:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluation and saving come next: they see no random gates."""
        assert self.pruner is not None
        self._settled.enter_context(self.pruner.deterministic())

    def _cubic(self, total: int) -> Cubic:
        def steps(value: float) -> int:
            return round(value * total) if value < 1 else round(value)

        return Cubic(self.keep, total, steps(self.warmup), steps(self.cooldown), self.every)

    def numbers(self) -> dict[str, float]:
        """What is logged: the share asked for, the share kept, and the score at the boundary, or the penalty."""
        assert self.pruner is not None
        pruner = self.pruner
        numbers = {"keep": round(pruner.keep, 6), "kept": round(pruner.kept(), 6)}
        if getattr(pruner.score, "penalty", None) is not None:
            del numbers["keep"]  # the share is a result
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
        for bar in getattr(tqdm, "_instances", ()):  # Trainer does not hand its bar to callbacks
            if bar.total == state.max_steps:
                bar.set_postfix(kept=f"{numbers['kept']:.3f}", refresh=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the optimizer; the weights are the pruned ones."""
        super().on_train_end(args, state, control, **kwargs)
        if self.pruner is not None:
            self.pruner.detach()
