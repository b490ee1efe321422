"""The kinds of output that a student can be compared with its teacher by, and how each kind is recognised.

A kind takes its tensors out of an output and gives one loss for each item, and which items count. An item is a row of
the batch or, for tokens, a position; the loss of a batch is the sum over its items by their number.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from platon.engine.distillation import divergence
from platon.engine.output import IGNORED, field, positional, predicts_next, setting, token_mask

Tensors = tuple[Tensor, ...]


class Kind(ABC):
    """One kind of output.

    Attributes:
        fields: the names of its tensors in an output that has names.
        dimensions: how many the first tensor may have.
    """

    fields: ClassVar[tuple[str, ...]] = ("logits",)
    dimensions: ClassVar[tuple[int, ...]] = (2,)

    def read(self, output: Any) -> Tensors | None:
        """Its tensors in an output; `None` where they are not there."""
        named = [field(output, name) for name in self.fields]
        found = [tensor for tensor in named if tensor is not None]
        if len(found) < len(self.fields):
            found = positional(output)[: len(self.fields)]
        right = len(found) == len(self.fields) and found[0].dim() in self.dimensions
        return tuple(found) if right else None

    def counts(self, tensors: Tensors, inputs: Mapping[str, Any]) -> Tensor:
        """Which items count: rows that no label of -100 leaves out."""
        rows = tensors[0].shape[0]
        return _labelled(inputs, (rows,), tensors[0].device)

    @abstractmethod
    def losses(
        self, student: Tensors, teacher: Tensors, counts: Tensor, inputs: Mapping[str, Any], temperature: float
    ) -> Tensor:
        """The loss of each item."""

    def task_loss(self, tensors: Tensors, labels: Tensor, counts: Tensor) -> Tensor | None:
        """The sum over the items of the usual loss for labels, without gradients; `None`: there is no usual one."""
        return None


class Classes(Kind):
    """Logits of classes that exclude each other: KL divergence at a temperature, times its square."""

    def losses(
        self, student: Tensors, teacher: Tensors, counts: Tensor, inputs: Mapping[str, Any], temperature: float
    ) -> Tensor:
        return divergence.divergence(student[0], teacher[0], counts, temperature)

    def task_loss(self, tensors: Tensors, labels: Tensor, counts: Tensor) -> Tensor | None:
        return divergence.cross_entropy(tensors[0], labels, counts) if labels.shape == counts.shape else None


class Labels(Kind):
    """Logits of labels that are independent of each other: the mean of their binary KL divergences."""

    def losses(
        self, student: Tensors, teacher: Tensors, counts: Tensor, inputs: Mapping[str, Any], temperature: float
    ) -> Tensor:
        return divergence.binary_divergence(student[0], teacher[0], temperature)

    def task_loss(self, tensors: Tensors, labels: Tensor, counts: Tensor) -> Tensor | None:
        logits = divergence.widened(tensors[0].detach())
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype)) * len(labels)


class Numbers(Kind):
    """Regression: the squared error. The temperature has no meaning here."""

    dimensions = (1, 2)

    def losses(
        self, student: Tensors, teacher: Tensors, counts: Tensor, inputs: Mapping[str, Any], temperature: float
    ) -> Tensor:
        return divergence.squared_error(student[0].unsqueeze(-1), teacher[0].unsqueeze(-1))

    def task_loss(self, tensors: Tensors, labels: Tensor, counts: Tensor) -> Tensor | None:
        return divergence.squared_error(tensors[0].detach(), labels.view(tensors[0].shape)).sum()


class Spans(Kind):
    """Where an answer starts and ends in a text: the mean of two KL divergences over the tokens, padding left out."""

    fields = ("start_logits", "end_logits")

    def losses(
        self, student: Tensors, teacher: Tensors, counts: Tensor, inputs: Mapping[str, Any], temperature: float
    ) -> Tensor:
        tokens = token_mask(inputs, student[0])
        total = torch.zeros((), device=student[0].device)
        for ours, theirs in zip(student, teacher, strict=True):
            if tokens is not None:
                # Far below every logit, and still finite after a division by the temperature.
                ours, theirs = (divergence.widened(logits).masked_fill(~tokens, -1e30) for logits in (ours, theirs))
            total = total + divergence.divergence(ours, theirs, counts, temperature)
        return total / 2


class Tokens(Classes):
    """Classes or words for each position: KL divergence over the positions that count."""

    dimensions = (3,)

    def counts(self, tensors: Tensors, inputs: Mapping[str, Any]) -> Tensor:
        shape = tensors[0].shape[:2]
        found = _labelled(inputs, shape, tensors[0].device)
        tokens = token_mask(inputs, tensors[0])
        return found if tokens is None else found & tokens


class NextTokens(Tokens):
    """A causal language model: a position counts where the token after it does."""

    def counts(self, tensors: Tensors, inputs: Mapping[str, Any]) -> Tensor:
        given = super().counts(tensors, inputs)
        found = torch.zeros_like(given)
        found[:, :-1] = given[:, 1:]  # nothing comes after the last position
        return found

    def task_loss(self, tensors: Tensors, labels: Tensor, counts: Tensor) -> Tensor | None:
        return super().task_loss(tensors, labels.roll(-1, 1), counts)


class Embedding(Kind):
    """One vector a row (sentence-transformers): 1 - cosine."""

    fields = ("sentence_embedding",)

    def losses(
        self, student: Tensors, teacher: Tensors, counts: Tensor, inputs: Mapping[str, Any], temperature: float
    ) -> Tensor:
        return divergence.cosine_distance(student[0], teacher[0])


class States(Kind):
    """A model without a head: the squared difference of its last states relative to the teacher's squared norm."""

    fields = ("last_hidden_state",)
    dimensions = (2, 3, 4)

    def losses(
        self, student: Tensors, teacher: Tensors, counts: Tensor, inputs: Mapping[str, Any], temperature: float
    ) -> Tensor:
        return divergence.relative_error(student[0], teacher[0], token_mask(inputs, student[0]))


KINDS: dict[str, Kind] = {
    "spans": Spans(),
    "regression": Numbers(),
    "multi-label": Labels(),
    "classes": Classes(),
    "causal": NextTokens(),
    "tokens": Tokens(),
    "embedding": Embedding(),
    "states": States(),
}


def kind_of(model: nn.Module, output: Any, wanted: str | None = None) -> Kind:
    """The kind that was asked for, or the one that the output's structure and the model's configuration show."""
    name = wanted or _recognised(model, output)
    if name is None or KINDS[name].read(output) is None:
        what = "is of no known kind" if name is None else f"is not of the kind {name!r}"
        raise ValueError(
            f"the output of {type(model).__name__} {what}: it has {_described(output)}; "
            f"give kind=, one of {', '.join(map(repr, KINDS))}"
        )
    return KINDS[name]


def _recognised(model: nn.Module, output: Any) -> str | None:
    named = _tensors(output)
    logits = named.get("logits", next(iter(positional(output)), None))
    if logits is None:
        return next((name for name in ("spans", "embedding", "states") if KINDS[name].fields[0] in named), None)
    if logits.dim() == 3:
        return "causal" if predicts_next(model) else "tokens"
    problem = setting(model, "problem_type")
    # One class alone has probability 1 whatever its logit is: a single number is a regression.
    if problem == "regression" or logits.dim() == 1 or (logits.dim() == 2 and logits.shape[1] == 1):
        return "regression"
    if logits.dim() == 2:
        return "multi-label" if problem == "multi_label_classification" else "classes"
    return None


def _labelled(inputs: Mapping[str, Any], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """True for each item whose label is not -100; all True where there are no labels of that shape."""
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and labels.shape == shape and not labels.is_floating_point():
        return labels.to(device) != IGNORED
    return torch.ones(shape, dtype=torch.bool, device=device)


def _tensors(output: Any) -> dict[str, Tensor]:
    names = [name for kind in KINDS.values() for name in kind.fields]
    return {name: found for name in names if (found := field(output, name)) is not None}


def _described(output: Any) -> str:
    named = {name: tuple(tensor.shape) for name, tensor in _tensors(output).items()}
    if named:
        return ", ".join(f"{name} of shape {shape}" for name, shape in named.items())
    shapes = [tuple(tensor.shape) for tensor in positional(output)]
    return f"tensors of shape {', '.join(map(str, shapes))}" if shapes else f"type {type(output).__name__}"
