"""Calls of a model's blocks in a forward pass: what each is given, and which of its outputs go on to other blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from platon.engine.proof.replica import UnfitError
from platon.engine.proof.sample import Arguments, Case, attempts


def short(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def run(model: nn.Module, case: Case, record: Callable[[], None] = lambda: None) -> Any:
    """A forward pass on the first arguments that the model takes; `record` is called before each attempt."""
    said = "its forward pass asks for inputs of an unknown kind"
    for args, kwargs in attempts(model, case):
        record()
        try:
            return model(*args, **kwargs)
        except Exception as error:  # whatever a model says to inputs that it does not take
            said = f"its forward pass failed on small random inputs ({short(error)})"
    raise UnfitError(said)


@dataclass
class Call:
    """One call of a block in a pass through its model.

    Args:
        arguments: clones, without gradients.
        passed: which of the tensors that it gives another block gets; the first of them is the hidden state.
    """

    arguments: Arguments
    passed: set[int] = field(default_factory=set)


def record_blocks(model: nn.Module, blocks: dict[str, nn.Module], case: Case) -> dict[str, list[Call]]:
    """The calls of each block in one forward pass of the model."""
    seen: dict[str, list[Call]] = {}
    given: dict[int, tuple[Tensor, Call, int]] = {}

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for tensor in tensors_in((args, kwargs)):
                if id(tensor) in given:
                    _, call, place = given[id(tensor)]
                    call.passed.add(place)
            seen.setdefault(name, []).append(Call((cloned(args), cloned(kwargs))))

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for place, tensor in enumerate(tensors_in(output)):
                given.setdefault(id(tensor), (tensor, seen[name][-1], place))

        return hook

    handles = [block.register_forward_pre_hook(enter(name), with_kwargs=True) for name, block in blocks.items()]
    handles += [block.register_forward_hook(leave(name)) for name, block in blocks.items()]
    try:
        run(model, case, seen.clear)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def cloned(value: Any) -> Any:
    """The same structure with copies of its tensors."""
    return mapped(value, lambda tensor: tensor.detach().clone())


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure with changed tensors; what is no tuple, list or dict of tensors is shared."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(one, change) for one in value)
    if type(value) is dict:
        return {key: mapped(one, change) for key, one in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists, dicts and model outputs, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
