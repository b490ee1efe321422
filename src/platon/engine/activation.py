"""What the linear layers of a model read: the norm of each input feature, for scores that use it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from platon.engine.matrix import Matrix
from platon.engine.module_hook import ModuleHook
from platon.engine.output import named_inputs, token_mask
from platon.engine.shard import everyone
from platon.engine.topology import is_conv1d


class InputNorms:
    """√Σ x² of each feature that a matrix multiplies, over all tokens that are no padding.

    Counted in forward passes in training mode, from one `take` to the next; during `calibration`, in all of them.
    """

    def __init__(self, model: nn.Module, matrices: Sequence[Matrix]) -> None:
        wanted = {id(matrix.parameter): matrix.name for matrix in matrices}
        held = [(module, p) for module in model.modules() for p in module._parameters.values() if id(p) in wanted]
        for module, parameter in held:
            if not isinstance(module, nn.Linear) and not is_conv1d(module):
                raise ValueError(
                    f"the inputs of {wanted[id(parameter)]!r} cannot be read, because its module, "
                    f"{type(module).__name__}, is no linear layer; leave it out with exclude, or use magnitude"
                )
        self._model, self._readers = model, [(module, wanted[id(parameter)]) for module, parameter in held]
        self._squares: dict[str, Tensor] = {}
        self._inputs: Mapping[str, Any] = {}
        self._counting = self._calibrating = False
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Count from now on."""
        self._handles = [self._model.register_forward_pre_hook(ModuleHook(self._begin), with_kwargs=True)]
        for module, name in self._readers:
            self._handles.append(module.register_forward_pre_hook(ModuleHook(partial(self._count, name))))

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs = named_inputs(model, args, kwargs)
        self._counting = self._calibrating or (model.training and torch.is_grad_enabled())

    @torch.no_grad()
    def _count(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._counting:
            return
        x: Tensor = args[0].detach()
        mask = token_mask(self._inputs, x) if x.dim() == 3 else None
        if mask is not None:
            x = x * mask[..., None]
        square = torch.linalg.vector_norm(x.flatten(0, -2), dim=0, dtype=torch.float32).double() ** 2
        self._squares[name] = square + self._squares.get(name, 0)

    def take(self, matrix: Matrix) -> Tensor | None:
        """The norms since the last call, in float32, a mean over processes; `None` if nothing was multiplied."""
        square, ranks = self._squares.pop(matrix.name, None), everyone()
        if ranks.group is not None:
            # On every process, whether or not it has seen inputs of this matrix: all of them must take part.
            square = torch.zeros(matrix.inputs, dtype=torch.float64, device=matrix.device) if square is None else square
            square = ranks.sum(square) / ranks.count  # with the same batch everywhere, the square of one process
        return None if square is None or not bool(square.any()) else square.sqrt().float()

    @contextmanager
    def calibration(self, matrices: Sequence[Matrix]) -> Iterator[None]:
        """Count in every pass; an error at the end names the first matrix that has multiplied nothing."""
        self._calibrating = True
        try:
            yield
        finally:
            self._calibrating = False
        for matrix in matrices:
            if matrix.name not in self._squares:
                raise ValueError(
                    f"no input of {matrix.name!r} was seen; give batches for which the model runs the layer it is in"
                )

    def detach(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
