"""A prunable matrix: its place in the model, and its weights as the optimizer and as the forward pass see them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.shard import Ranks, local, rows_of

#: (the children of a module, or its parameters; a key; what stands there), from the model down to a parameter
_Place = list[tuple[Mapping[str, Any], str, Any]]


class Matrix:
    """A parameter that is pruned, or this rank's rows of it.

    Args:
        name: its name in the model.
        parameter: it.
        place: how the model leads to it.
        start: the position of its first weight among all prunable ones.
    """

    def __init__(self, name: str, parameter: nn.Parameter, place: _Place, start: int) -> None:
        self.name, self.parameter, self.place = name, parameter, place
        self.rows, self.shape = rows_of(parameter), local(parameter).shape
        self.size, self.whole = local(parameter).numel(), parameter.numel()  #: weights here, and on all ranks
        #: the position of the first weight that is here
        self.start = start + self.rows[0] * (self.whole // max(parameter.shape[0], 1) if parameter.dim() else 1)
        self.device = parameter.device
        self.full: Tensor | None = None  #: the weights behind mask and gates, where pruned weights come back

    @property
    def weight(self) -> Tensor:
        """The parameter's weights, flat; a view."""
        return local(self.parameter).view(-1)

    @property
    def gradient(self) -> Tensor | None:
        """This step's gradient, flat."""
        return None if self.parameter.grad is None else local(self.parameter.grad).reshape(-1)

    def put_aside(self) -> None:
        """Remember the weights as they are behind mask and gates."""
        if self.full is None:
            self.full = torch.empty_like(self.weight)
        self.full.copy_(self.weight)

    def bring_back(self) -> None:
        """Give the optimizer the weights behind mask and gates."""
        assert self.full is not None
        self.weight.copy_(self.full)

    def free_gradient(self) -> None:
        """Make this step's gradient one that can be written to through a flat view."""
        gradient = self.parameter.grad
        if gradient is not None and not local(gradient).is_contiguous():
            self.parameter.grad = gradient.contiguous()

    def check(self, model: nn.Module) -> None:
        """That the model still trains the parameter that this was built for."""
        moved = any(held.get(key) is not what for held, key, what in self.place)
        # A module that was wrapped in place (compiled, checkpointed) still trains it.
        if moved and all(parameter is not self.parameter for parameter in model.parameters()):
            raise RuntimeError(
                f"parameter {self.name!r} was replaced after the pruner was built; build the pruner last"
            )
        if self.parameter.device != self.device:
            raise RuntimeError(
                f"parameter {self.name!r} moved from {self.device} to {self.parameter.device} after the pruner was "
                "built; move the model first, then build the optimizer and the pruner"
            )


def locate(model: nn.Module, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> list[Matrix]:
    """The parameters' places in the model, checked for what would go wrong later."""
    places = {id(parameter): _path(model, name) for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: list[Matrix] = []
    start = 0
    for name, parameter in parameters.items():
        if id(parameter) not in places:
            raise ValueError(f"the model does not hold {name!r}; build units from the model that the pruner gets")
        if not local(parameter).is_contiguous():
            raise ValueError(
                f"{name!r} is not contiguous in memory; give it contiguous data before building the optimizer"
            )
        found.append(Matrix(name, parameter, places[id(parameter)], start))
        start += parameter.numel()
    # Over all ranks, so that each of them stops where one does.
    unsound = ranks.any(torch.tensor([not _is_sound(matrix.weight) for matrix in found], device=found[0].device))
    for matrix, bad in zip(found, unsound.tolist(), strict=True):
        if bad:
            raise ValueError(
                f"{matrix.name!r} holds a weight that is NaN or infinite; load or train a sound model first"
            )
    return found


def _is_sound(weight: Tensor) -> bool:
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def _path(model: nn.Module, name: str) -> _Place:
    *parents, leaf = name.split(".")
    path: _Place = []
    for key in parents:
        path.append((model._modules, key, model._modules[key]))
        model = model.get_submodule(key)
    path.append((model._parameters, leaf, model._parameters[leaf]))
    return path
