"""Distillation: the model that is trained also learns to answer as a teacher does. One forward hook on the model."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.distillation.hidden import Layers
from platon.engine.distillation.kind import KINDS, kind_of
from platon.engine.distillation.lesson import Lesson
from platon.engine.distillation.teacher import Precision, Teacher
from platon.engine.module_hook import ModuleHook, UncompiledHook
from platon.engine.output import loss_of, named_inputs, takes_loss, unwrapped, with_loss
from platon.engine.score import checked_choice

FORMAT = 1
_PATIENCE = 200  # training passes after which a projection must have moved


class Distillation:
    """Adds what a teacher says to the loss of `model`. Nothing else of the training loop changes.

    In training mode and with gradients on, each forward pass of the model runs the teacher on the same inputs, and the
    `loss` of the model's output becomes

        (1 - weight) · loss + weight · (outputs + hidden_weight · hidden)

    `outputs` compares the outputs: KL(teacher ‖ model) at the temperature T times T² for classes, words and the ends of
    spans, the squared error for regression, 1 - cosine for embeddings. `hidden` compares what the transformer blocks
    return: ‖model - teacher‖² / ‖teacher‖² over the tokens of a row that are not padding, mean over the layers. Both
    are means over the rows of the batch, or over its positions for tokens; labels of -100 and padding do not count.

    Examples:
        >>> distillation = platon.Distillation(model, "self", weight=0.5)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> for batch in data:
        ...     model(**batch).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> distillation.detach()

    Attach it before the optimizer is built and before the model is wrapped, sharded or compiled.

    Args:
        model: the one that is trained. Evaluation and inference are untouched.
        teacher: a module; "self" for a frozen copy of the model as it is now; or the folder or hub name of a model of
            the same class.
        weight: of the teacher, in [0, 1]. At 0 the teacher does not run; at 1 the model needs no labels.
        temperature: softens the distributions that are compared.
        hidden_weight: of the hidden states beside the outputs; at 0 they are not compared.
        layers: student's layer -> teacher's, counted from 0; by default both are paired evenly, last with last.
        kind: the kind of output, where it cannot be told from the output itself: "classes", "multi-label",
            "regression", "spans", "tokens", "causal", "embedding" or "states".
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | str,
        *,
        weight: float = 0.5,
        temperature: float = 2.0,
        hidden_weight: float = 0.0,
        layers: Mapping[int, int] | None = None,
        kind: str | None = None,
    ) -> None:
        """Take the teacher and attach to the model's forward pass; at weight 0 neither happens."""
        _check_numbers(weight, temperature, hidden_weight)
        if kind is not None:
            checked_choice(kind, "kind", tuple(KINDS))
        if layers is not None and not hidden_weight:
            raise ValueError("layers pairs hidden states, and hidden_weight is 0; give hidden_weight, or leave it out")
        self.weight, self.temperature, self.hidden_weight = float(weight), float(temperature), float(hidden_weight)
        self.kind = kind
        #: the terms of the last training pass, without gradients: "task", "outputs" and "hidden"
        self.terms: dict[str, Tensor] = {}
        self._model = model
        self._lesson: Lesson | None = None
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._by_number: bool | None = None  # whether the model divides its loss by num_items_in_batch; unknown yet
        self._active = False  # inside a training pass
        self._precision: Precision = None
        self._device = torch.device("cpu")
        self._warned = False
        self._passes = 0
        self._teacher: Teacher | None = None
        self._layers: Layers | None = None
        self._handles: list[Any] = []
        if self.weight == 0:
            return
        self._teacher = Teacher(model, teacher)
        if self.hidden_weight:
            self._layers = Layers(model, self._teacher.module, layers)
        self._handles = [
            model.register_forward_pre_hook(UncompiledHook(self._begin), with_kwargs=True),
            model.register_forward_hook(UncompiledHook(self._end), with_kwargs=True),
            *(child.register_forward_pre_hook(ModuleHook(self._see_precision)) for child in model.children()),
        ]

    @property
    def teacher(self) -> nn.Module | None:
        """The model that is run beside; `None` at weight 0 and after `detach`."""
        return None if self._teacher is None else self._teacher.module

    @property
    def projection(self) -> nn.Linear | None:
        """What brings the model's hidden states to the teacher's width; `None` where both have the same.

        It is a module of the model until `detach`, so optimizers, wrappers and checkpoints treat it as they treat the
        rest of the model.
        """
        return None if self._layers is None else self._layers.projection

    def loss(
        self,
        outputs: Any,
        task: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The distillation loss of the last training pass, for loops that compute their own loss.

        Args:
            outputs: what the model gave.
            task: the loop's own loss; with it, the mixture is returned.
            labels: where the model was not given them: items labelled -100 do not count.
            num_items_in_batch: what the sum over the items is divided by; their number in this batch by default. With
                the number in all batches of an accumulated step, the gradients add up to those of one big batch.
        """
        if self.weight == 0 and task is not None:
            return task
        done = self._lesson
        if done is None:
            why = "its weight is 0" if self.weight == 0 else "the model has not run in training mode with gradients"
            raise RuntimeError(f"there is no distillation loss: {why}")
        given = {"labels": labels, "num_items_in_batch": num_items_in_batch}
        if num_items_in_batch is not None:
            self._by_number = True
        done.inputs |= {name: value for name, value in given.items() if value is not None}
        return self._mixture(done, outputs, task)

    def detach(self) -> None:
        """Stop distilling. Hooks and projection are gone; the model's weights stay as they are."""
        for handle in self._handles:
            handle.remove()
        if self._layers is not None:
            self._layers.detach()
        self._handles, self._layers, self._teacher, self._lesson = [], None, None, None

    def state_dict(self) -> dict[str, Any]:
        """The settings, and a fingerprint of the teacher's weights; a projection is in the model's own state."""
        return {
            "format": FORMAT,
            "weight": self.weight,
            "temperature": self.temperature,
            "hidden_weight": self.hidden_weight,
            "kind": self.kind,
            "teacher": None if self._teacher is None else self._teacher.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state. There is nothing to restore, but a training with another teacher is refused."""
        for name, value in self.state_dict().items():
            if name not in state or state[name] != value:
                found = repr(state[name]) if name in state else "missing"
                hint = "; teacher='self' copies the model: attach before loading it" if name == "teacher" else ""
                raise ValueError(f"this state does not fit the distillation: {name} is {found}, not {value!r}{hint}")

    def __repr__(self) -> str:
        """The configuration."""
        teacher = "none" if self.teacher is None else type(unwrapped(self.teacher)).__name__
        return (
            f"Distillation(teacher={teacher}, weight={self.weight}, temperature={self.temperature}, "
            f"hidden_weight={self.hidden_weight})"
        )

    # --- one forward pass --------------------------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._layers is not None:
            self._layers.student.end()
        self._active = model.training and torch.is_grad_enabled()
        if not self._active:
            return
        self._warn_where_nothing_is_learned()
        self._lesson = None
        # Copies, because a model may write into a dict that it is given.
        self._inputs = tuple(dict(a) if isinstance(a, dict) else a for a in args), dict(kwargs)
        self._device = next(model.parameters()).device
        self._precision = _autocast(self._device)
        if self._layers is not None:
            self._layers.student.begin()

    def _see_precision(self, child: nn.Module, args: Any) -> None:
        """Note the precision inside the model: accelerate puts autocast around its `forward`, inside of our hooks."""
        if self._active:
            self._precision = _autocast(self._device)

    def _end(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._active or self._teacher is None:
            return None
        self._active = False
        (args, kwargs), self._inputs = self._inputs, ((), {})
        layers = self._layers
        taken = [] if layers is None else layers.student.end()
        if layers is not None:
            layers.teacher.begin()
        answer = self._teacher(self._device, self._precision, args, kwargs)
        shown = [] if layers is None else layers.teacher.end()

        inputs = named_inputs(model, args, kwargs)
        self._lesson = done = Lesson(model, inputs, kind_of(model, output, self.kind), output, answer)
        if layers is not None:
            done.compare_states(layers, taken, shown)
        task = loss_of(output)
        if task is not None and self._by_number is None:
            self._by_number = done.divides_by_number(output, task.detach())
        if not takes_loss(output) or (task is None and self.weight < 1):
            return None  # the loop asks for the loss, or a warning follows
        return with_loss(output, self._mixture(done, output, task))

    def _mixture(self, done: Lesson, output: Any, task: Tensor | None) -> Tensor:
        """The mixture of the task's loss and the teacher's; without a task's loss, the teacher's alone."""
        terms = done.terms(output, self.temperature, self._by_number is not False)
        done.used = True
        loss = terms["outputs"] + self.hidden_weight * terms["hidden"] if "hidden" in terms else terms["outputs"]
        self.terms = {name: term.detach() for name, term in terms.items()}
        if task is None:
            return loss
        self.terms["task"] = task.detach()
        return loss if self.weight == 1 else (1 - self.weight) * task + self.weight * loss

    def _warn_where_nothing_is_learned(self) -> None:
        """Warn once of a loop that does not use the loss, and of an optimizer without the projection."""
        self._passes += 1
        reason = None
        if self._lesson is not None and not self._lesson.used:
            reason = (
                "the model's output has no loss and distillation.loss(outputs) was not called, "
                "so the model learns nothing from the teacher"
            )
        elif self.projection is not None and self._passes == _PATIENCE and self.projection.weight._version <= 1:
            reason = (
                "no optimizer trains the projection of the hidden states; "
                "build the optimizer after Distillation, from model.parameters()"
            )
        if reason and not self._warned:
            self._warned = True
            warnings.warn(reason, stacklevel=2)


def _autocast(device: torch.device) -> Precision:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _check_numbers(weight: float, temperature: float, hidden_weight: float) -> None:
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must be in [0, 1], got {weight}; write 0.5 for half teacher, half labels")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0, got {temperature}; 2 is usual")
    if not 0 <= hidden_weight < math.inf:
        raise ValueError(f"hidden_weight must be at least 0, got {hidden_weight}")
