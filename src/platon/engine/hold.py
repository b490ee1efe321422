"""Holding zeros: further training of a pruned model that keeps it pruned."""

from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from platon.engine import bits
from platon.engine.hooks import StepHook, attach
from platon.engine.shard import laid_out_as, local, ranks_of
from platon.engine.units import Units, weights


class Hold:
    """Keeps every weight at zero that was zero when this was built, through further training; see `hold`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, units: Units | None = None) -> None:
        """Remember which weights are zero, as bits, and attach."""
        self.units = weights(model) if units is None else units
        ranks_of(model, self.units.matrices)  # refuses ways to shard that are not supported
        self._bits = {name: bits.pack((local(matrix) != 0).view(-1)) for name, matrix in self.units.matrices.items()}
        self._hook = StepHook(model, self.units.matrices, None, None, lambda: None, self._after)
        self._hooks = attach(optimizer, self._hook)

    def _after(self) -> None:
        for name, matrix in self.units.matrices.items():
            bits.zero_pruned(local(matrix).view(-1), self._bits[name])

    def masks(self) -> dict[str, Tensor]:
        """A bool tensor a parameter, False = held at zero."""
        return {
            name: laid_out_as(matrix, bits.unpack(self._bits[name], local(matrix).numel()))
            for name, matrix in self.units.matrices.items()
        }

    def detach(self) -> None:
        """From now on the optimizer trains all weights."""
        self._hooks.detach(self._hook)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a hold cannot be copied or pickled, because its hooks stay with its own optimizer; "
            "call platon.hold on the copied model and optimizer"
        )


def hold(model: nn.Module, optimizer: Optimizer, units: Units | None = None) -> Hold:
    """Keep every prunable weight that is zero now at zero while `optimizer` trains `model` further."""
    return Hold(model, optimizer, units)
