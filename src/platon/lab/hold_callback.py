"""`HoldCallback`: further training of a pruned model that keeps its zeros."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from platon.engine.hold import Hold
from platon.engine.units import weights
from platon.lab.checkpoint_callback import CheckpointCallback


class HoldCallback(CheckpointCallback):
    """Holds the weights at zero that are zero when this is built.

    A resumed training builds the model anew before it loads the checkpoint, so it holds the same weights as before; a
    weight that training has brought to exactly zero is not among them.

    Args:
        model: before training.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.masks = {name: matrix.detach() != 0 for name, matrix in weights(model).matrices.items()}
        self.hold: Hold | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.hold = Hold(kwargs["model"], kwargs["optimizer"], masks=self.masks)

    def detach(self) -> None:
        super().detach()
        if self.hold is not None:
            self.hold.detach()
