"""`TrainingArguments` for a run, and for the evaluation of a finished one."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from platon.deploy import has_sparse_layers
from platon.lab import process_group
from platon.lab.errors import UserError
from platon.lab.settings import Settings
from platon.lab.step_count import StepCounts
from platon.lab.tasks import Prepared


def training_arguments(settings: Settings, steps: StepCounts, prepared: Prepared, folder: Path) -> TrainingArguments:
    """For a training with checkpoints in `folder`."""
    divisor = settings.accumulate * process_group.count()
    if settings.batch % divisor:
        raise UserError(f"batch must be a multiple of accumulate × processes, {divisor}, got {settings.batch}")
    if settings.precision == "fp16" and not torch.accelerator.is_available():
        raise UserError("precision fp16 needs a GPU, and there is none; choose bf16 or float32")
    if settings.report_to != "none" and find_spec(settings.report_to) is None:
        raise UserError(f"report_to {settings.report_to} needs a package: pip install {settings.report_to}")
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps.total,
        per_device_train_batch_size=settings.batch // divisor,
        gradient_accumulation_steps=settings.accumulate,
        max_grad_norm=settings.clip,
        gradient_checkpointing=settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=steps.log_every,
        logging_nan_inf_filter=False,  # so that a loss that is not finite is logged as it is
        eval_strategy="steps",
        eval_steps=steps.eval_every,
        save_strategy="steps",
        save_steps=steps.checkpoint_every,
        save_total_limit=settings.checkpoints,
        report_to=settings.report_to,
        disable_tqdm=True,  # `ProgressCallback` shows the progress
        seed=settings.seed,
        **_common(settings, prepared),
    )


def evaluation_arguments(settings: Settings, prepared: Prepared, folder: Path, model: nn.Module) -> TrainingArguments:
    """For measuring a model that was trained with `settings`; `folder` stays empty.

    A model trained in fp16 is measured in float32 where there is no GPU; one with sparse layers always is, because they
    compute in nothing else.
    """
    if has_sparse_layers(model):
        settings = replace(settings, precision="float32")
    return TrainingArguments(
        output_dir=str(folder), report_to="none", disable_tqdm=True, seed=settings.seed, **_common(settings, prepared)
    )


def _common(settings: Settings, prepared: Prepared) -> dict[str, Any]:
    on_cpu = not torch.accelerator.is_available()
    return {
        "per_device_eval_batch_size": settings.eval_batch,
        "use_cpu": on_cpu,  # otherwise Trainer refuses bf16 without a GPU
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16" and not on_cpu,
        "label_names": list(prepared.label_names),
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
