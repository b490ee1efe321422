"""Trainer with our data order, our optimizer, our metrics, and the best model at the target share."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Sampler, Subset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler

from platon.engine.topology import blocks
from platon.lab import job
from platon.lab.convergence import gives_one_answer
from platon.lab.record import append_history
from platon.lab.settings import Plan, Settings
from platon.lab.tasks import Prepared
from platon.lab.trainer import SealedCheckpoints


class Order(Sampler[int]):
    """The order of an epoch's rows: a function of (seed, epoch) and of nothing else, so that a resumed run has it too.

    With lengths, rows of like length share a batch: shuffled, cut into chunks of fifty batches, sorted inside each, and
    the batches shuffled again.
    """

    def __init__(self, count: int, batch: int, seed: int, lengths: Sequence[int] | None = None) -> None:
        self.count, self.batch, self.seed = count, batch, seed
        self.lengths = None if lengths is None else np.asarray(lengths)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(self.count)
        if self.lengths is not None:
            chunk = 50 * self.batch
            order = np.concatenate(
                [
                    part[np.argsort(-self.lengths[part], kind="stable")]
                    for part in np.split(order, range(chunk, self.count, chunk))
                ]
            )
            batches = np.split(order, range(self.batch, self.count, self.batch))
            # The last batch may be short, and stays the last.
            shuffled = [batches[place] for place in random.permutation(len(batches) - 1)]
            order = np.concatenate([*shuffled, batches[-1]])
        return iter(order.tolist())


class LabTrainer(Trainer):
    """Trainer for a prepared task."""

    def __init__(self, settings: Settings, plan: Plan, prepared: Prepared, **kwargs: Any) -> None:
        self.lab_settings, self.plan, self.prepared = settings, plan, prepared
        self.one_answer: dict[str, bool] = {}  #: split -> whether the last measurement found one answer to every row
        #: step of the last evaluation, and what it found
        self.evaluated: tuple[int, dict[str, dict[str, float]]] | None = None
        lengths = prepared.lengths.get("train") if settings.group_by_length else None
        self.order = Order(len(prepared.train), settings.batch, settings.seed, lengths)
        super().__init__(
            train_dataset=prepared.train,
            eval_dataset=next(iter(prepared.evaluation.values())),
            data_collator=prepared.collate,
            processing_class=prepared.processor,
            **kwargs,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return self.order

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Silence: what Trainer finds no name for, `SealedCheckpoints` loads."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            assert self.model is not None
            self.optimizer = make_optimizer(self.model, self.lab_settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            assert optimizer is not None
            self.lr_scheduler = get_scheduler(
                self.lab_settings.decay, optimizer, self.plan.lr_warmup, num_training_steps
            )
        return self.lr_scheduler

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Every split of the task, logged as `eval_<split>_<metric>`."""
        results = self.measure()
        self.evaluated = self.state.global_step, results
        logs = {f"eval_{split}_{name}": value for split, own in results.items() for name, value in own.items()}
        self.log(logs)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
        return logs

    def measure(self) -> dict[str, dict[str, float]]:
        """Every split of the task, by the task's own metrics. Rows of like length are taken together, and put back."""
        results: dict[str, dict[str, float]] = {}
        rows: Any
        for split, rows in self.prepared.evaluation.items():
            order = np.argsort(self.prepared.lengths.get(split, [0] * len(rows)), kind="stable")
            loop = self.evaluation_loop(
                self.get_eval_dataloader(Subset(rows, order.tolist())),
                description=split,
                prediction_loss_only=False,
                metric_key_prefix="eval",
            )
            back = np.argsort(order)
            predictions, labels = reordered(loop.predictions, back), reordered(loop.label_ids, back)
            results[split] = self.prepared.score(split, predictions, labels)
            self.one_answer[split] = gives_one_answer(predictions)
        return results


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer, with weight decay on matrices alone; fused where torch has that, for it is much faster."""
    if settings.freeze_embeddings:
        freeze_embeddings(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    rate = settings.learning_rate
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum, fused=True)
    if settings.optimizer == "adamax":
        return torch.optim.Adamax(groups, lr=rate)
    return torch.optim.AdamW(groups, lr=rate, fused=True)


def freeze_embeddings(model: nn.Module) -> None:
    """Stop training every embedding table outside the transformer blocks."""
    inside = {id(module) for block in blocks(model).values() for module in block.modules()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module) not in inside:
            module.weight.requires_grad_(False)


def reordered(found: Any, order: Any) -> Any:
    """The rows of an array in this order, or those of each array of a tuple: a model may give several."""
    return tuple(reordered(own, order) for own in found) if isinstance(found, tuple) else found[order]


class Trained(Exception):  # noqa: N818  # it is no error
    """The checkpoint that was resumed from is the last one: there is nothing left to train."""


class Clock(TrainerCallback):
    """How long steps take."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds.append(time.monotonic() - self._began)

    def middle(self) -> float:
        """The median, without the first, which pays for what is done once."""
        return float(np.median(self.seconds[1:] or self.seconds))


class Watch(TrainerCallback):
    """What a run needs beside pruning: the epoch's order, the history, the best model, and a clean stop."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        headline: str,
        order: Order,
        sealed: SealedCheckpoints,
        tell: Callable[[str], None],
    ) -> None:
        self.folder, self.plan, self.headline, self.order, self.sealed = folder, plan, headline, order, sealed
        self.tell = tell
        self.stop_signal: int | None = None
        self._began = (0, 0.0)  # step and time at which this process took over

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began = (state.global_step, time.monotonic())

    @property
    def best(self) -> dict[str, Any] | None:
        """Step and value of the best evaluation at the target share; it rides along in checkpoints."""
        return self.sealed.extra.get("best")

    def best_folder(self, step: int) -> Path:
        return self.folder / f"best-{step}"

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            raise Trained  # Trainer itself would take one more step
        epoch = math.floor((state.epoch or 0.0) + 1e-6)
        self.order.set_epoch(epoch)
        rows = kwargs["train_dataloader"].dataset  # when it skips batches, accelerate does not tell the rows
        if hasattr(rows, "set_epoch"):
            rows.set_epoch(epoch)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A signal reaches the processes of a job at different steps; they stop at the same one.
        self.stop_signal = job.most(self.stop_signal or 0) or None
        if self.stop_signal is not None and state.global_step < state.max_steps:
            control.should_save = True
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Each logged line is a line of the history."""
        if logs and not math.isfinite(logs.get("loss", 0.0)):
            self.sealed.extra.setdefault("not_finite", f"the loss was not finite at step {state.global_step}")
        if state.is_world_process_zero and logs and ("loss" in logs or any(name.startswith("eval_") for name in logs)):
            numbers = {name: value for name, value in logs.items() if math.isfinite(value)}
            append_history(self.folder, {"step": state.global_step, **numbers})

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the best model of the final phase; a score from before the target share is reached never counts."""
        if metrics is None:
            return
        value = metrics[self.headline]
        self._tell(state.global_step, value)
        if state.global_step < self.plan.total - self.plan.cooldown:
            return
        if self.best is None or value > self.best["value"]:
            pruner = self.sealed.pruner
            kept = 1.0 if pruner is None else pruner.kept()
            self.sealed.extra["best"] = {"step": state.global_step, "value": value, "kept": kept}
            if state.is_world_process_zero:
                save_whole(kwargs["model"], self.best_folder(state.global_step))

    def _tell(self, step: int, value: float) -> None:
        first, began = self._began
        left = (time.monotonic() - began) / max(step - first, 1) * (self.plan.total - step)
        kept = "" if self.sealed.pruner is None else f", {self.sealed.pruner.kept():.1%} kept"
        name = self.headline.removeprefix("eval_").replace("_", " ")
        ahead = f", about {left:.0f} s left" if step < self.plan.total else ""
        self.tell(f"step {step} of {self.plan.total}: {name} {100 * value:.2f}{kept}{ahead}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Earlier best models go once a checkpoint no longer points to them."""
        if state.is_world_process_zero and self.best is not None:
            for folder in self.folder.glob("best-*"):
                if folder != self.best_folder(self.best["step"]):
                    shutil.rmtree(folder, ignore_errors=True)


def save_whole(model: Any, folder: Path) -> None:
    """`save_pretrained` under a temporary name, then renamed: the folder is there whole or not at all."""
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
