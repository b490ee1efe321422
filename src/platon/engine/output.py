"""What a model gives out and what it was given, known by structure: transformers' outputs, dicts, tuples, tensors."""

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

IGNORED = -100  # the label of a position that does not count, as torch's cross entropy has it


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile's wrapper."""
    while True:
        inner = getattr(model, "module" if type(model).__name__ == "DistributedDataParallel" else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def setting(model: nn.Module, name: str) -> Any:
    """A field of the model's configuration; `None` where it has none."""
    return getattr(getattr(unwrapped(model), "config", None), name, None)


def predicts_next(model: nn.Module) -> bool:
    """Whether it is a causal language model: the logits of a position are for the token after it."""
    generates = getattr(unwrapped(model), "can_generate", None)
    return bool(callable(generates) and generates() and not setting(model, "is_encoder_decoder"))


def named_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a forward pass by name; a dict that is the only one (sentence-transformers) is taken apart."""
    if len(args) == 1 and isinstance(args[0], Mapping):
        return {**args[0], **kwargs}
    return {**dict(zip(argument_names(model), args, strict=False)), **kwargs}


def token_mask(inputs: Mapping[str, Any], like: Tensor) -> Tensor | None:
    """True where a token is no padding, for a tensor of rows × tokens; `None` where the inputs do not say."""
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = inputs.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape == like.shape[:2]:
            return mask.to(like.device) != 0
    return None


def argument_names(model: nn.Module) -> list[str]:
    """The arguments of the model's `forward` that can be given by position."""
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def is_label(name: str) -> bool:
    """Whether an input says what the answer should be, or how many answers there are."""
    return "label" in name or name in ("start_positions", "end_positions", "num_items_in_batch")


def field(output: Any, name: str) -> Tensor | None:
    """A named tensor of an output that has names."""
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return found if isinstance(found, Tensor) else None


def positional(output: Any) -> list[Tensor]:
    """The tensors of an output without names: itself, or a tuple's, without the loss that may come first."""
    found = [output] if isinstance(output, Tensor) else list(output) if isinstance(output, tuple) else []
    tensors = [tensor for tensor in found if isinstance(tensor, Tensor)]
    return tensors[1:] if isinstance(output, tuple) and tensors and _is_loss(tensors[0]) else tensors


def loss_of(output: Any) -> Tensor | None:
    """The loss in an output: a number under its name, or a tuple's first."""
    is_unnamed = isinstance(output, tuple) and not hasattr(output, "_fields")
    found = next(iter(output), None) if is_unnamed else field(output, "loss")
    return found if _is_loss(found) else None


def takes_loss(output: Any) -> bool:
    """Whether `with_loss` can put a loss there; a tensor or a tuple of answers alone has no place for one."""
    return loss_of(output) is not None or isinstance(output, Mapping) or "loss" in _names(output)


def with_loss(output: Any, loss: Tensor) -> Any:
    """A copy of the output with this loss."""
    if hasattr(output, "_replace"):
        return output._replace(loss=loss)
    if isinstance(output, tuple):
        return (loss, *output[1:])
    if "loss" in _names(output):
        return dataclasses.replace(output, loss=loss)
    changed = copy.copy(output)
    changed["loss"] = loss
    return changed


def _names(output: Any) -> Sequence[str]:
    """The fields of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(output):
        return [field.name for field in dataclasses.fields(output)]
    return getattr(output, "_fields", ())


def _is_loss(found: Any) -> bool:
    return isinstance(found, Tensor) and found.dim() == 0
