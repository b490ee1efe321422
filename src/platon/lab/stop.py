"""Stopping a run by a signal: at the end of a step, after a checkpoint, in all processes at the same step."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.lab import process_group


class Interrupted(Exception):  # noqa: N818  # not an error
    """A signal stopped the run after a checkpoint; it can be resumed.

    Args:
        number: the signal.
        folder: the run to resume.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        super().__init__(f"stopped by {signal.Signals(number).name}")


class StopCallback(TrainerCallback):
    """Ends the training after the step in which a signal arrived, and has Trainer save a checkpoint first."""

    def __init__(self) -> None:
        self.signal: int | None = None  #: the signal that arrived

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A signal reaches the processes at different steps; all of them must stop at the same one.
        self.signal = process_group.highest(self.signal or 0) or None
        if self.signal is not None and state.global_step < state.max_steps:
            control.should_save = True
            control.should_training_stop = True

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM inside the block; a second one ends the process at once, without a checkpoint."""
        received = 0.0

        def stop(number: int, frame: Any) -> None:
            nonlocal received
            # A launcher repeats the signal that the terminal has already sent to all processes.
            if self.signal is not None and (process_group.count() == 1 or time.monotonic() - received > 5):
                raise KeyboardInterrupt
            self.signal, received = number, time.monotonic()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
