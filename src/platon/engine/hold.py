"""Holding zeros: further training of a pruned model that keeps it pruned."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from platon.engine.hooks import StepHook, attach
from platon.engine.ranking import bits
from platon.engine.shard import laid_out_as, local, ranks_of
from platon.engine.units import Units, weights


class Hold:
    """Keeps every weight at zero that was zero when this was built, through further training; `platon.hold` builds it.

    Args:
        model: the pruned model.
        optimizer: trains it.
        units: where zeros are held; every weight of the blocks by default.
        masks: hold these zeros instead, False = held, as `masks` returned them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        units: Units | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.units = weights(model) if units is None else units
        ranks_of(model, self.units.matrices)  # refuses ways to shard that are not supported
        if masks is not None:
            self._check(masks)
        kept = {name: matrix != 0 for name, matrix in self.units.matrices.items()} if masks is None else masks
        self._bits = {name: bits.pack(local(kept[name]).reshape(-1)) for name in self.units.matrices}
        self._hook = StepHook(model, self.units.matrices, None, None, lambda: None, self._after)
        self._hooks = attach(optimizer, self._hook)

    def _check(self, masks: Mapping[str, Tensor]) -> None:
        for name, matrix in self.units.matrices.items():
            if name not in masks:
                raise ValueError(f"there is no mask for {name!r}; give one for each matrix, as `masks()` returns them")
            mask = masks[name]
            if mask.dtype != torch.bool or mask.shape != matrix.shape:
                raise ValueError(
                    f"the mask of {name!r} must be a bool tensor of shape {tuple(matrix.shape)}, "
                    f"got {mask.dtype} of shape {tuple(mask.shape)}"
                )

    def _after(self) -> None:
        for name, matrix in self.units.matrices.items():
            bits.zero_pruned(local(matrix).view(-1), self._bits[name])

    def masks(self) -> dict[str, Tensor]:
        """A bool tensor a parameter, False = held at zero."""
        matrices = self.units.matrices.items()
        return {name: laid_out_as(own, bits.unpack(self._bits[name], local(own).numel())) for name, own in matrices}

    def detach(self) -> None:
        """From now on the optimizer trains all weights."""
        self._hooks.detach(self._hook)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a hold cannot be copied or pickled, because its hooks stay with its own optimizer; "
            "call platon.hold on the copied model and optimizer"
        )


def hold(
    model: nn.Module, optimizer: Optimizer, units: Units | None = None, masks: Mapping[str, Tensor] | None = None
) -> Hold:
    """Keep every prunable weight that is zero now at zero while `optimizer` trains `model` further.

    Args:
        model: the pruned model.
        optimizer: trains it.
        units: where zeros are held; every weight of the blocks by default.
        masks: hold these zeros instead, as `Hold.masks` returned them: a training that is resumed gives them again,
            because by then other weights may have become zero.
    """
    return Hold(model, optimizer, units, masks)
