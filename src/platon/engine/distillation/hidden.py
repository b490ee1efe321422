"""Hidden states: what the transformer blocks of student and teacher return, compared layer by layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from platon.engine.distillation.divergence import relative_error, widened
from platon.engine.module_hook import ModuleHook
from platon.engine.output import setting, token_mask, unwrapped
from platon.engine.topology import blocks, is_conv1d, weights_of

#: for each call of a block, whether it belongs to a decoder that reads an encoder, and the state that it returned
Taken = list[tuple[bool, Tensor]]

PROJECTION = "distillation_projection"  #: its name in the model while distillation lasts


class BlockHooks:
    """Takes down what the blocks of a model return, in the order in which they are called.

    Hooks on the blocks and not `output_hidden_states`: the latter is transformers' alone, and some models apply the
    last norm to the last state, or return states of other modules.
    """

    def __init__(self, model: nn.Module, role: str) -> None:
        """Attach to the blocks; nothing is taken before `begin`."""
        found = blocks(model)
        if not found:
            raise ValueError(
                f"hidden_weight needs transformer blocks, and the {role} {type(model).__name__} has none; "
                "use hidden_weight=0"
            )
        self._role = role
        self._taking = False
        self._taken: Taken = []
        decoder = _decoder_modules(model)
        self._handles: list[RemovableHandle] = [
            block.register_forward_hook(ModuleHook(self._hook(id(block) in decoder))) for block in found.values()
        ]

    def _hook(self, in_decoder: bool) -> Any:
        def take(block: nn.Module, args: Any, output: Any) -> None:
            if not self._taking:
                return  # an evaluation, or a block that gradient checkpointing runs again in the backward pass
            if self._role == "student" and not torch.is_grad_enabled():
                raise ValueError(
                    "hidden states of the student have no gradients under reentrant gradient checkpointing; "
                    "use gradient_checkpointing_kwargs={'use_reentrant': False}, or hidden_weight=0"
                )
            self._taken.append((in_decoder, output[0] if isinstance(output, tuple | list) else output))

        return take

    def begin(self) -> None:
        """Take down what follows."""
        self._taken, self._taking = [], True

    def end(self) -> Taken:
        """What was taken since `begin`."""
        taken, self._taken, self._taking = self._taken, [], False
        return taken

    def detach(self) -> None:
        """Leave the blocks as they were."""
        for handle in self._handles:
            handle.remove()


class Layers:
    """Compares the hidden states of student and teacher: the mean over layers of ‖s - t‖² / ‖t‖².

    Args:
        student: the model that is trained.
        teacher: the frozen one.
        layers: student's layer -> teacher's, counted from 0; `None` pairs them evenly, the last with the last.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, layers: Mapping[int, int] | None) -> None:
        """Attach to both, and add a projection to the student where the widths differ."""
        self._layers = layers
        self._model = student
        self.student, self.teacher = BlockHooks(student, "student"), BlockHooks(teacher, "teacher")
        widths = _width(student), _width(teacher)
        self.projection: nn.Linear | None = None
        if widths[0] != widths[1]:
            if unwrapped(student) is not student or hasattr(student, "set_reshard_after_forward"):
                self.detach()
                raise ValueError(
                    f"the student's states have {widths[0]} numbers and the teacher's {widths[1]}, so a projection is "
                    "trained with the model: attach Distillation before wrapping, sharding or compiling the model"
                )
            self.projection = _projection(student, *widths)
            student.add_module(PROJECTION, self.projection)

    def compare(
        self,
        student: Taken,
        teacher: Taken,
        rows: int,
        encoder: Mapping[str, Any],
        decoder: Mapping[str, Any],
    ) -> Tensor:
        """One number a row: the mean over the paired layers.

        Args:
            student: what its `BlockHooks` took.
            teacher: likewise.
            rows: how many the batch has.
            encoder: the inputs by name, whose `attention_mask` leaves padding out.
            decoder: the same for states of a decoder that reads an encoder.
        """
        errors = []
        for ours, theirs in self._pairs(len(student), len(teacher)).items():
            in_decoder, state = student[ours]
            target = teacher[theirs][1]
            if self.projection is not None:
                state = nn.functional.linear(widened(state), widened(self.projection.weight))
            if state.shape != target.shape:
                raise ValueError(
                    f"layer {ours} of the student gives states of shape {tuple(state.shape)} and layer {theirs} of "
                    f"the teacher {tuple(target.shape)}; pair others with layers=, or use hidden_weight=0"
                )
            if state.shape[0] != rows and state.dim() > 2 and state.shape[1] == rows:
                state, target = state.transpose(0, 1), target.transpose(0, 1)  # tokens come first in some models
            tokens = token_mask(decoder if in_decoder else encoder, state)
            errors.append(relative_error(state, target, tokens))
        return torch.stack(errors).mean(0)

    def _pairs(self, ours: int, theirs: int) -> Mapping[int, int]:
        if self._layers is None:
            return paired(ours, theirs)
        for layer, target in self._layers.items():
            if not (0 <= layer < ours and 0 <= target < theirs):
                raise ValueError(
                    f"layers pairs {layer} with {target}, but the student has layers 0 to {ours - 1} "
                    f"and the teacher 0 to {theirs - 1}"
                )
        return self._layers

    def detach(self) -> None:
        """Leave both models as they were; the projection is thrown away."""
        self.student.detach()
        self.teacher.detach()
        self._model._modules.pop(PROJECTION, None)


def paired(ours: int, theirs: int) -> dict[int, int]:
    """As many pairs as the shallower of both has layers, evenly spread over the deeper one; last with last."""
    few = min(ours, theirs)
    return {(i + 1) * ours // few - 1: (i + 1) * theirs // few - 1 for i in range(few)}


def _projection(model: nn.Module, ours: int, theirs: int) -> nn.Linear:
    """A linear layer from the student's width to the teacher's that all layers share (as in TinyBERT).

    It is drawn from a generator of its own: attaching a teacher does not change the random state.
    """
    weight = torch.empty(theirs, ours)
    nn.init.orthogonal_(weight, generator=torch.Generator().manual_seed(0))
    like = next(model.parameters())
    layer = nn.Linear(ours, theirs, bias=False, device="meta").to_empty(device=like.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def _width(model: nn.Module) -> int:
    """The size of a hidden state: what the first matrix of the first block multiplies."""
    block = next(iter(blocks(model).values()))
    module, weight = next((part, weight) for part in block.modules() for weight in weights_of(part))
    return weight.shape[0] if is_conv1d(module) else weight.shape[1]


def _decoder_modules(model: nn.Module) -> set[int]:
    """The modules of a decoder that reads an encoder's states."""
    inner = unwrapped(model)
    if not setting(inner, "is_encoder_decoder") or not hasattr(inner, "get_decoder"):
        return set()
    decoder: nn.Module = inner.get_decoder()  # type: ignore[operator]
    return {id(module) for module in decoder.modules()}
