"""The Trainer of a run: its row order, its optimizer, and its evaluation of every split by the task's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Sampler, Subset
from transformers import Trainer, get_scheduler

from platon.lab.convergence import is_constant
from platon.lab.optimizer import make_optimizer
from platon.lab.order import RowOrder
from platon.lab.settings import Settings
from platon.lab.step_count import StepCounts
from platon.lab.tasks import Prepared, Rows

Results = dict[str, dict[str, float]]  # split -> metric -> value


class LabTrainer(Trainer):
    """Trainer for a prepared task."""

    def __init__(self, settings: Settings, steps: StepCounts, prepared: Prepared, **kwargs: Any) -> None:
        self.lab_settings, self.steps, self.prepared = settings, steps, prepared
        #: split -> whether the last measurement found the same prediction for every row
        self.constant: dict[str, bool] = {}
        #: step of the last evaluation, and its results
        self.evaluated: tuple[int, Results] | None = None
        lengths = prepared.lengths.get("train") if settings.group_by_length else None
        self.order = RowOrder(len(prepared.train), settings.batch, settings.seed, lengths)
        super().__init__(
            train_dataset=prepared.train,
            eval_dataset=next(iter(prepared.evaluation.values())),
            data_collator=prepared.collate,
            processing_class=prepared.processor,
            preprocess_logits_for_metrics=prepared.condense,
            **kwargs,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return self.order

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Suppress Trainer's warning about missing names: `checkpoint.complete_weights` loads these tensors."""

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
                self.lab_settings.decay, optimizer, self.steps.lr_warmup, num_training_steps
            )
        return self.lr_scheduler

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate every split of the task, and log it as `eval_<split>_<metric>`."""
        results = self.measure()
        self.evaluated = self.state.global_step, results
        logs = {f"eval_{split}_{name}": value for split, found in results.items() for name, value in found.items()}
        self.log(logs)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
        return logs

    def measure(self, splits: Mapping[str, Rows] | None = None) -> Results:
        """The task's metrics on these splits; by default on those that are measured during the training."""
        results: Results = {}
        for split, rows in (self.prepared.evaluation if splits is None else splits).items():
            predictions, labels = self.outputs(split, rows)
            results[split] = self.prepared.score(split, predictions, labels)
            self.constant[split] = (self.prepared.is_constant or is_constant)(predictions)
        return results

    def outputs(self, split: str, rows: Any) -> tuple[Any, Any]:
        """The model's outputs for the rows of a split, and their labels, in row order.

        Rows of similar length are computed together, for less padding.
        """
        order = np.argsort(self.prepared.lengths.get(split, [0] * len(rows)), kind="stable")
        loop = self.evaluation_loop(
            self.get_eval_dataloader(Subset(rows, order.tolist())),
            description=split,
            prediction_loss_only=False,
            metric_key_prefix="eval",
        )
        back = np.argsort(order)
        return reordered(loop.predictions, back), reordered(loop.label_ids, back)


def reordered(found: Any, order: Any) -> Any:
    """The rows of an array in this order; of each array where a model returns a tuple of them; None without labels."""
    if found is None:
        return None
    return tuple(reordered(one, order) for one in found) if isinstance(found, tuple) else found[order]
