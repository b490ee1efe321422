"""What one training pass of the model can learn from its teacher: the terms of the distillation loss."""

from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.distillation.hidden import Layers, Taken
from platon.engine.distillation.kind import Kind, Tensors
from platon.engine.output import IGNORED, setting


class Lesson:
    """The inputs of a pass, what the teacher answered, and which items count.

    Attributes:
        inputs: by name. `labels` and `num_items_in_batch` may be added later.
        used: whether a loss was made of it.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Any], kind: Kind, output: Any, answer: Any) -> None:
        """Refuse an answer that does not fit the output."""
        self.inputs = inputs
        self.used = False
        self._kind = kind
        self._reads_encoder = bool(setting(model, "is_encoder_decoder"))
        self._answer = kind.read(answer)
        self._hidden: Tensor | None = None  # one number a row
        self._rows = len(self._read(output)[0])

    def compare_states(self, layers: Layers, student: Taken, teacher: Taken) -> None:
        """Add the hidden states of the same pass."""
        with torch.autocast(student[0][1].device.type, enabled=False):
            self._hidden = layers.compare(student, teacher, self._rows, self.inputs, self._output_inputs())

    def terms(self, output: Any, temperature: float, by_number: bool) -> dict[str, Tensor]:
        """The loss of the outputs and, where there are any, of the hidden states: sums over items by their number.

        With `by_number`, they are divided by `num_items_in_batch`, where the model was given it: the number of items
        in all batches of an accumulated step. Otherwise by their number in this batch.
        """
        ours, inputs = self._read(output), self._output_inputs()
        assert self._answer is not None
        with torch.autocast(ours[0].device.type, enabled=False):
            counts = self._kind.counts(ours, inputs)
            number = self._number() if by_number else None
            number = counts.sum().clamp_min(1) if number is None else number.to(counts.device)
            losses = self._kind.losses(ours, self._answer, counts, inputs, temperature)
            found = {"outputs": torch.where(counts, losses, 0.0).sum() / number}
            if self._hidden is not None:
                # A row weighs as much as it has items, so that batches of any size add up.
                found["hidden"] = (self._hidden * counts.reshape(len(counts), -1).sum(1)).sum() / number
        return found

    def divides_by_number(self, output: Any, task: Tensor) -> bool | None:
        """Whether the task's loss is divided by `num_items_in_batch`; `None` where this pass does not show it.

        Trainer takes it for granted, but some models of transformers (BERT's classifiers) take the number and return
        the mean of the batch all the same. The distillation loss must follow: the mixture would be another one.
        """
        ours, labels, number = self._read(output), self.inputs.get("labels"), self._number()
        if number is None or not isinstance(labels, Tensor):
            return None
        labels, counts = labels.to(task.device), self._kind.counts(ours, self._output_inputs())
        total, count = self._kind.task_loss(ours, labels, counts), int(counts.sum())
        if total is None or count in (0, int(number)):
            return None
        by_number, by_count = float(total / number), float(total / count)
        return abs(float(task) - by_number) <= abs(float(task) - by_count)

    def _number(self) -> Tensor | None:
        number = self.inputs.get("num_items_in_batch")
        return None if number is None else torch.as_tensor(number)

    def _output_inputs(self) -> dict[str, Any]:
        """The inputs with the mask of the side that gives the output: the decoder, where there is an encoder too."""
        if not self._reads_encoder:
            return self.inputs
        mask, labels = self.inputs.get("decoder_attention_mask"), self.inputs.get("labels")
        if mask is None and isinstance(labels, Tensor):
            mask = labels != IGNORED
        return {**self.inputs, "attention_mask": mask}

    def _read(self, output: Any) -> Tensors:
        ours, theirs = self._kind.read(output), self._answer
        if ours is None or theirs is None or [t.shape for t in ours] != [t.shape for t in theirs]:
            raise ValueError(
                f"the model gives {_described(ours)} and the teacher {_described(theirs)}; "
                "give a teacher for the same task, with the same labels and vocabulary"
            )
        return ours


def _described(tensors: Tensors | None) -> str:
    if tensors is None:
        return "nothing of that kind"
    return "outputs of shape " + " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
