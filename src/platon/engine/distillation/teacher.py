"""The teacher: another model that sees the same inputs, without labels, gradients, dropout or any random number."""

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.output import argument_names, is_label, setting, unwrapped
from platon.engine.shard import is_sharded

#: the dtype of autocast, or `None` where it is off
Precision = torch.dtype | None


class Teacher:
    """Runs a frozen model on the inputs of another.

    Args:
        student: the model that is trained.
        teacher: a module; "self" for a frozen copy of the student as it is now; or the folder or hub name of a model
            of the student's class.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module | str) -> None:
        """Take or make the teacher, and refuse one that does not fit."""
        self.module = _taken(student, teacher)
        _check(student, self.module)
        self.module.eval()
        self._names = argument_names(student)
        self._fingerprint: str | None = None
        self._makes_decoder_inputs = getattr(unwrapped(student), "prepare_decoder_input_ids_from_labels", None)

    def __call__(
        self, device: torch.device, precision: Precision, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Its output for the student's inputs, in the precision of the student's pass."""
        args, kwargs = self._inputs(args, kwargs)
        if next(self.module.parameters()).device != device:
            self.module.to(device)
        if any(module.training for module in self.module.modules()):
            self.module.eval()
        enabled, dtype = precision is not None, precision or torch.get_autocast_dtype(device.type)
        with torch.no_grad(), untouched_random_state(device), torch.autocast(device.type, dtype, enabled):
            return self.module(*args, **kwargs)

    def fingerprint(self) -> str:
        """A short hash of its weights; they are frozen, so it is computed once."""
        if self._fingerprint is None:
            sha = hashlib.sha256()
            for name, tensor in self.module.state_dict().items():
                sha.update(name.encode())
                if isinstance(tensor, Tensor):
                    sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            self._fingerprint = sha.hexdigest()[:16]
        return self._fingerprint

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Without labels. A text decoder whose inputs the student makes from the labels gets them made."""
        labels = kwargs.get("labels")
        positional = [
            None if name is not None and is_label(name) else _without_labels(value)
            for name, value in zip([*self._names, *[None] * len(args)], args, strict=False)
        ]
        named = {name: value for name, value in kwargs.items() if not is_label(name)}
        if self._makes_decoder_inputs is not None and labels is not None and "decoder_input_ids" not in named:
            named["decoder_input_ids"] = self._makes_decoder_inputs(labels=labels)
        return positional, named


@contextmanager
def untouched_random_state(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the next number outside is the one that it would have been."""
    kind = device.type if device.type not in ("cpu", "meta") else "cuda"
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices, device_type=kind):
        yield


def _without_labels(value: Any) -> Any:
    """A copy of a dict of inputs, because some models write into theirs (sentence-transformers)."""
    return {name: v for name, v in value.items() if not is_label(str(name))} if isinstance(value, dict) else value


def _taken(student: nn.Module, teacher: nn.Module | str) -> nn.Module:
    inner = unwrapped(student)
    if isinstance(teacher, nn.Module):
        if unwrapped(teacher) is inner:
            raise ValueError("the teacher is the model that is trained; give teacher='self' for a copy of it as it is")
        return teacher
    if not isinstance(teacher, str):
        raise TypeError(f"teacher must be a module, 'self', a folder or a hub name, got {teacher!r}")
    if teacher != "self":
        return _loaded(inner, teacher)
    if any(is_sharded(parameter) for parameter in inner.parameters()):
        raise ValueError("the model is sharded already, so it has no copy on each rank; attach Distillation before")
    return copy.deepcopy(inner).requires_grad_(False)


def _loaded(student: nn.Module, name: str) -> nn.Module:
    """A saved model of the student's class, which has all its weights."""
    kind: Any = type(student)
    if not hasattr(kind, "from_pretrained"):
        raise ValueError(
            f"the teacher {name!r} is a name, and {kind.__name__} has no from_pretrained to load it with; give a module"
        )
    found, _ = kind.config_class.get_config_dict(name)
    ours = setting(student, "model_type")
    if found.get("model_type") != ours:
        raise ValueError(
            f"the teacher {name!r} is of type {found.get('model_type')!r} and the model of type {ours!r}; "
            "load the teacher with its own class and give the module"
        )
    loaded, report = kind.from_pretrained(name, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"the teacher {name!r} has no weights for {missing[0]!r}; give a model that was trained for this task"
        )
    module: nn.Module = loaded
    return module.requires_grad_(False)


def _check(student: nn.Module, teacher: nn.Module) -> None:
    """Refuse a teacher whose configuration says that its outputs mean something else."""
    for field, what in (("vocab_size", "tokens in the vocabulary"), ("num_labels", "labels")):
        ours, theirs = setting(student, field), setting(teacher, field)
        if ours is not None and theirs is not None and ours != theirs:
            raise ValueError(f"the teacher has {theirs} {what} and the model {ours}; they must have the same")
    ours, theirs = (_label_names(model) for model in (student, teacher))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(f"the teacher's labels are {theirs} and the model's {ours}; they must be the same")
    if next(teacher.parameters(), None) is None:
        raise ValueError(f"the teacher {type(teacher).__name__} has no weights; give a trained model")


def _label_names(model: nn.Module) -> list[str] | None:
    """The labels in order; `None` where they only have transformers' automatic names."""
    names = setting(model, "id2label")
    if not isinstance(names, Mapping) or all(str(name).startswith("LABEL_") for name in names.values()):
        return None
    return [str(names[place]) for place in sorted(names)]
