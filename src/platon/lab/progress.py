"""The callback that shows the progress of a training: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.lab.checkpoint_callback import CheckpointCallback
from platon.lab.duration import in_words
from platon.lab.measure import Measure
from platon.lab.percent import percent
from platon.lab.printer import Bar, Printer

TIMED = 5  # steps after which the time of the whole is estimated; the first is slower, and left out


class ProgressCallback(TrainerCallback):
    """Shows the step, the share kept, the metric of the last evaluation, and the time that is left.

    Args:
        total: steps of the training.
        headline: the logged name of the metric.
        checkpoints: holds the pruner.
        printer: where to print.
        title: what the bar is called.
    """

    def __init__(
        self, total: int, headline: str, checkpoints: CheckpointCallback, printer: Printer, title: str = "training"
    ) -> None:
        self.total, self.headline, self.checkpoints = total, headline, checkpoints
        self.printer, self.title = printer, title
        self._bar: Bar | None = None
        self._metric = self._kept = ""
        self._start = self._first = 0  # step at which this process started, and after which time is measured
        self._began = 0.0  # when that was

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start = self._first = state.global_step
        self._began = time.monotonic()
        if self.printer.bar is not None:
            self._bar = self.printer.bar(self.title, self.total)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        if step == self._start + 1 and self.total > TIMED:
            self._first, self._began = step, time.monotonic()
        if self._bar is not None:
            self._bar.update(step, self._shown())
        elif step == self._start + TIMED and self.total - step > TIMED:
            self.printer.row("time", f"about {in_words(self._left(step))}: {self._step_time(step)} a step")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # The pruner's numbers are there already: its callback comes before this one.
        if logs is not None and "kept" in logs:
            self._kept = f"{percent(logs['kept'])} kept"

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if metrics is None:
            return
        step, pruner = state.global_step, self.checkpoints.pruner
        split, _, name = self.headline.removeprefix("eval_").partition("_")
        self._metric = f"{name.replace('_', ' ')} {Measure(name).text(metrics[self.headline])}"
        if pruner is not None:
            self._kept = f"{percent(pruner.kept())} kept"
        if self._bar is not None:
            self._bar.update(step, self._shown())
            return
        left = f", about {in_words(self._left(step))} left" if step < self.total else ""
        kept = f", {self._kept}" if self._kept else ""
        self.printer.line(f"step {step:,} of {self.total:,}: {split} {self._metric}{kept}{left}")

    def _shown(self) -> str:
        return ", ".join(one for one in (self._kept, self._metric) if one)

    def _seconds(self, step: int) -> float:
        return (time.monotonic() - self._began) / max(step - self._first, 1)

    def _left(self, step: int) -> float:
        return self._seconds(step) * (self.total - step)

    def _step_time(self, step: int) -> str:
        seconds = self._seconds(step)
        return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"

    def close(self) -> None:
        """The training has ended, or was stopped; call it again, and nothing happens."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
