"""A prunable matrix: its place in the model, its weights and its gradient."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from platon.engine.shard import Ranks, local, rows_of
from platon.engine.topology import inputs_first


class Matrix:
    """A parameter that is pruned, or this rank's rows of it; with `inputs_first`, rows are inputs (Conv1D)."""

    def __init__(self, name: str, parameter: nn.Parameter, start: int, inputs_first: bool = False) -> None:
        self.name, self.parameter, self.inputs_first = name, parameter, inputs_first
        self.rows, self.shape, self.device = rows_of(parameter), local(parameter).shape, parameter.device
        self.size, self.total = local(parameter).numel(), parameter.numel()  #: weights here, and on all ranks
        #: the position, among all prunable weights, of the first one that is here; `start` is that of the parameter's
        self.start = start + self.rows[0] * parameter.shape[1:].numel()

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
        by_weight = numbers[self.rows[0] : self.rows[1], None] if self.inputs_first else numbers
        return by_weight.expand(self.shape).reshape(-1)

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


def locate(model: nn.Module, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> list[Matrix]:
    """The parameters' places in the model, checked for what would go wrong later."""
    trained, transposed = set(map(id, model.parameters())), inputs_first(model)
    found: list[Matrix] = []
    start = 0
    for name, parameter in parameters.items():
        if id(parameter) not in trained:
            raise ValueError(f"the model does not hold {name!r}; build units from the model that the pruner gets")
        if not local(parameter).is_contiguous():
            raise ValueError(
                f"{name!r} is not contiguous in memory; give it contiguous data before building the optimizer"
            )
        found.append(Matrix(name, parameter, start, id(parameter) in transposed))
        start += parameter.numel()
    # Over all ranks, so that each of them stops where one does.
    unsound = ranks.any(torch.tensor([not is_finite(matrix.weight) for matrix in found], device=found[0].device))
    for matrix, bad in zip(found, unsound.tolist(), strict=True):
        if bad:
            raise ValueError(
                f"{matrix.name!r} holds a weight that is NaN or infinite; load or train a sound model first"
            )
    return found


def check_in_place(model: nn.Module, matrices: Sequence[Matrix]) -> None:
    """Raise an error if the model no longer trains one of the matrices, or if the memory of one changed."""
    trained = set(map(id, model.parameters()))
    for matrix in matrices:
        parameter = matrix.parameter
        if id(parameter) not in trained:
            reason, advice = "was replaced after the pruner was built", "build the pruner last"
        elif parameter.device != matrix.device:
            reason = f"moved from {matrix.device} to {parameter.device} after the pruner was built"
            advice = "move the model first, then build the optimizer and the pruner"
        elif not local(parameter).is_contiguous() or local(parameter).numel() != matrix.size:
            reason = "is no longer contiguous in memory, or has another shape than when the pruner was built"
            advice = "change it first, then build the optimizer and the pruner"
        else:
            continue
        raise RuntimeError(f"parameter {matrix.name!r} {reason}; {advice}")


def is_finite(tensor: Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor  # an embedding's gradient may be sparse
    return bool(values.isfinite().all())
