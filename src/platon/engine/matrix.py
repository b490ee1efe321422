"""A prunable matrix: its place in the model, its weights and its gradient."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.shard import Ranks, local, rows_of
from platon.engine.topology import is_conv1d

#: (the children of a module, or its parameters; a key; what is found there), from the model down to a parameter
_Path = list[tuple[Mapping[str, Any], str, Any]]


class Matrix:
    """A parameter that is pruned, or this rank's rows of it.

    Args:
        name: its name in the model.
        parameter: the parameter itself.
        path: how the model leads to it.
        start: the position of its first weight among all prunable ones.
        inputs_first: whether it is stored with inputs as rows (GPT-2's Conv1D).
    """

    def __init__(self, name: str, parameter: nn.Parameter, path: _Path, start: int, inputs_first: bool = False) -> None:
        self.name, self.parameter, self.path, self.inputs_first = name, parameter, path, inputs_first
        self.rows, self.shape = rows_of(parameter), local(parameter).shape
        self.size, self.total = local(parameter).numel(), parameter.numel()  #: weights here, and on all ranks
        #: the position of the first weight that is here
        self.start = start + self.rows[0] * (self.total // max(parameter.shape[0], 1) if parameter.dim() else 1)
        self.device = parameter.device

    @property
    def inputs(self) -> int:
        """How many features it reads."""
        return self.parameter.shape[0 if self.inputs_first else 1]

    def by_output(self, values: Tensor) -> Tensor:
        """Flat numbers of its weights as a row for each output feature; a view."""
        if self.inputs_first and self.size != self.total:
            raise ValueError(f"the rows of {self.name!r} are spread over several processes; use scope 'matrix'")
        shaped = values.view(self.shape)
        return shaped.T if self.inputs_first else shaped

    def flat(self, values: Tensor) -> Tensor:
        """The reverse of `by_output`; a copy of its own memory."""
        return (values.T if self.inputs_first else values).reshape(-1).clone(memory_format=torch.contiguous_format)

    def by_input(self, numbers: Tensor) -> Tensor:
        """For each weight, flat, the number of the input feature that it multiplies."""
        if self.inputs_first:
            return numbers[self.rows[0] : self.rows[1], None].expand(self.shape).reshape(-1)
        return numbers.expand(self.shape).reshape(-1)

    @property
    def weight(self) -> Tensor:
        """The weights, flat; a view."""
        return local(self.parameter).view(-1)

    @property
    def gradient(self) -> Tensor | None:
        """This step's gradient, flat."""
        return None if self.parameter.grad is None else local(self.parameter.grad).reshape(-1)

    @property
    def version(self) -> int:
        """Grows with every change of the weights that PyTorch knows of."""
        return local(self.parameter)._version

    def make_gradient_contiguous(self) -> None:
        """So that `gradient` is a view, and writing to it reaches the optimizer."""
        gradient = self.parameter.grad
        if gradient is not None and not local(gradient).is_contiguous():
            self.parameter.grad = gradient.contiguous()

    def check(self, model: nn.Module) -> None:
        """Raise an error if the model no longer trains the parameter, or if its memory changed."""
        moved = any(held.get(key) is not what for held, key, what in self.path)
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
        if not local(self.parameter).is_contiguous() or local(self.parameter).numel() != self.size:
            raise RuntimeError(
                f"parameter {self.name!r} is no longer contiguous in memory, or has another shape than when the pruner "
                "was built; change it first, then build the optimizer and the pruner"
            )


def locate(model: nn.Module, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> list[Matrix]:
    """The parameters' places in the model, checked for what would go wrong later."""
    paths = {id(parameter): _path(model, name) for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: list[Matrix] = []
    start = 0
    for name, parameter in parameters.items():
        if id(parameter) not in paths:
            raise ValueError(f"the model does not hold {name!r}; build units from the model that the pruner gets")
        if not local(parameter).is_contiguous():
            raise ValueError(
                f"{name!r} is not contiguous in memory; give it contiguous data before building the optimizer"
            )
        path = paths[id(parameter)]
        found.append(Matrix(name, parameter, path, start, len(path) > 1 and is_conv1d(path[-2][2])))
        start += parameter.numel()
    # Over all ranks, so that each of them stops where one does.
    unsound = ranks.any(torch.tensor([not is_finite(matrix.weight) for matrix in found], device=found[0].device))
    for matrix, bad in zip(found, unsound.tolist(), strict=True):
        if bad:
            raise ValueError(
                f"{matrix.name!r} holds a weight that is NaN or infinite; load or train a sound model first"
            )
    return found


def is_finite(tensor: Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor  # an embedding's gradient may be sparse
    return bool(values.isfinite().all())


def _path(model: nn.Module, name: str) -> _Path:
    *parents, leaf = name.split(".")
    path: _Path = []
    for key in parents:
        path.append((model._modules, key, model._modules[key]))
        model = model.get_submodule(key)
    path.append((model._parameters, leaf, model._parameters[leaf]))
    return path
