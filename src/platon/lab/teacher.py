"""The teacher of a run: the dense twin, the model before training, or a model that the user names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from platon.engine.distillation.distillation import Distillation
from platon.lab import tasks
from platon.lab.attachment import Attachment
from platon.lab.errors import UserError
from platon.lab.settings import Settings
from platon.lab.tasks import Prepared, Request


def check_teacher(settings: Settings) -> None:
    """Refuse what a task without labels cannot do."""
    task = tasks.find(settings.task)
    if task.labelled:
        return
    if settings.teacher == "none":
        raise UserError(f"{task.name} has no labels, so it needs a teacher; leave out --teacher none")
    if settings.distil_weight != 1:
        raise UserError(
            f"{task.name} has no labels, so distil_weight must be 1, got {settings.distil_weight:g}; leave it out"
        )
    if settings.dense != "none":
        raise UserError(
            f"{task.name} is compared with the model that it starts from; leave out --dense {settings.dense}"
        )


def attach_teacher(
    settings: Settings, model: Any, prepared: Prepared, twin: Path | None = None
) -> dict[str, Attachment]:
    """The distillation that the settings ask for, attached to the model; nothing where there is no teacher.

    Args:
        settings: the run's.
        model: before training.
        prepared: the task.
        twin: the model of the dense twin, where there is one.
    """
    if settings.teacher == "none":
        return {}
    with torch.random.fork_rng(devices=[]):  # the run's random numbers are those of a run without a teacher
        teacher = _teacher(settings, prepared, twin)
    try:
        distillation = Distillation(
            model,
            teacher,
            weight=settings.distil_weight,
            temperature=settings.temperature,
            hidden_weight=settings.hidden_weight,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    return {"distillation": distillation}


def _teacher(settings: Settings, prepared: Prepared, twin: Path | None) -> Any:
    if settings.teacher != "dense":
        return _loaded(settings, prepared, settings.teacher)
    if twin is not None:
        return _loaded(settings, prepared, str(twin))
    if starts_at_random(prepared):
        raise UserError(
            "teacher dense without a dense twin is the model before training, and part of it starts from random "
            "values; train the twin first with --dense first, or give the folder of a trained model"
        )
    return "self"


def _loaded(settings: Settings, prepared: Prepared, name: str) -> Any:
    """A model for the same task, opened as a finished run's model is: it says which classes it knows."""
    request = replace(Request.from_settings(settings).for_evaluation(Path(name)), eval_rows=2, test=None)
    taught = tasks.find(settings.task).prepare(request)
    if _vocabulary(taught.processor) != _vocabulary(prepared.processor):
        raise UserError(f"the tokenizer of the teacher {name!r} is not the model's; they must have the same vocabulary")
    if starts_at_random(taught):
        raise UserError(
            f"the teacher {name!r} is not trained for {settings.task}: part of it starts from random values"
        )
    return taught.build()


def _vocabulary(processor: Any) -> dict[str, int]:
    """The tokens of a tokenizer; nothing for an image processor."""
    return dict(processor.get_vocab()) if hasattr(processor, "get_vocab") else {}


def starts_at_random(prepared: Prepared) -> bool:
    """Whether two models built under different seeds answer differently: then some weights are not in the files."""
    batch, answers = prepared.batch(2), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            answers.append(_tensors(prepared.build().eval()(**batch)))
    return not all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


def _tensors(output: Any) -> list[Tensor]:
    return [tensor for tensor in output.to_tuple() if isinstance(tensor, Tensor)]
