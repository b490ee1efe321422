"""Pruning inside PyTorch Lightning: one callback. Needs `pip install 'platon[lightning]'`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from platon.engine.pruner import Pruner
from platon.engine.pruner_settings import PrunerSettings, check_target
from platon.engine.schedule import COOLDOWN, EVERY, WARMUP, Schedule
from platon.engine.score import Score
from platon.engine.units import Units

__all__ = ["PruningCallback"]


class PruningCallback(Callback):
    """Prunes the module of a Lightning `Trainer` while it trains.

    Examples:
        >>> trainer = Trainer(max_epochs=3, callbacks=[PruningCallback(keep=0.1)])
        >>> trainer.fit(module, data)                          # the module's weights are the pruned weights
        >>> trainer.fit(module, data, ckpt_path="last.ckpt")   # goes on where that checkpoint was taken

    Accumulation, clipping, mixed precision, manual optimization and checkpoints stay as they are: pruning happens in
    the optimizer's own hooks, and the pruner's state is in every checkpoint that Lightning writes. `keep` and `kept`
    are logged. A `ModelCheckpoint` with a metric counts only models at the final share as best; denser ones would win.

    Args:
        keep: the share of the prunable weights that is kept at the end.
        warmup: steps before pruning starts; a float below 1 is a share of the training.
        cooldown: steps at the final share; a float below 1 is a share of the training.
        every: steps between masks while the share falls.
        score: the method; PLATON by default.
        schedule: instead of keep, warmup, cooldown and every.
        units: what is pruned, or a function of the module that returns it; every weight of the blocks by default.
        total: steps of the optimizer in the whole training; by default what Lightning expects. Needed where
            `training_step` calls the optimizer itself and not after every batch.
        on_nonfinite: "raise" or "skip", see `platon.Pruner`.
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
        total: int | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        self.settings = PrunerSettings(keep, warmup, cooldown, every, score, schedule, units, on_nonfinite)
        self.total = total
        self.pruner: Pruner | None = None
        self._target: float | None = None  # the share at the end of the training
        self._saved: dict[str, Any] | None = None  # the state in the checkpoint that the training goes on from

    # --- start and end ------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the pruner; Lightning has restored weights and optimizer by now, if it resumes."""
        self._detach()
        steps = self._steps(trainer)
        saved, self._saved = self._saved, None
        if saved is None and trainer.global_step:
            raise ValueError(
                "cannot resume: the checkpoint belongs to a training without pruning; load its weights into the module "
                "and start afresh"
            )
        self.pruner = self.settings.build(pl_module, trainer.optimizers, steps)
        self._target = self.pruner.schedule(steps)
        if saved is not None:
            check_target(saved["target"], self._target)
            self.pruner.load_state_dict(saved["pruner"])

    def _steps(self, trainer: Trainer) -> int:
        """How many steps the optimizer will take."""
        expected = trainer.estimated_stepping_batches if self.total is None else self.total
        if not math.isfinite(expected) or expected < 1:
            raise ValueError(
                f"the length of the training is not known ({expected} steps), and the share kept falls with it; give "
                "Trainer(max_steps=...), or PruningCallback(total=...)"
            )
        return int(expected)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the weights as they are, and say so if the training was too short."""
        pruner, target = self.pruner, self._target
        self._detach()
        if pruner is not None and target is not None and pruner.keep > target:
            warnings.warn(
                f"the training ended after {pruner.step_count} steps of the optimizer, at {pruner.keep:.4g} kept and "
                f"not {target:.4g}; if it was not stopped early, give PruningCallback(total={pruner.step_count})",
                stacklevel=2,
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks; after Ctrl-C, too."""
        self._detach()

    def _detach(self) -> None:
        if self.pruner is not None:
            self.pruner.detach()

    # --- each batch ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Train with random gates again, where the method has them."""
        assert self.pruner is not None
        self.pruner.unsettle()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Validation and saving come next: they see the deterministic gates."""
        pruner = self.pruner
        assert pruner is not None
        pruner.settle()
        pl_module.log_dict({"keep": pruner.keep, "kept": pruner.kept()}, prog_bar=True)
        if self._target is not None and pruner.keep > self._target:
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    _forget_best(callback)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What Lightning puts into its checkpoints."""
        return {} if self.pruner is None else {"target": self._target, "pruner": self.pruner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the state; the pruner takes it over when the training starts."""
        self._saved = dict(state_dict) or None


def _forget_best(checkpoint: ModelCheckpoint) -> None:
    """Make a `ModelCheckpoint` count from here on; what it has saved stays on disk."""
    if checkpoint.monitor is None:
        return
    kept: dict[str, Tensor] = {}
    checkpoint.best_k_models, checkpoint.kth_best_model_path = kept, ""
    checkpoint.best_model_path, checkpoint.best_model_score, checkpoint.current_score = "", None, None
