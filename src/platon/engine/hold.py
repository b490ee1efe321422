"""Holding zeros: further training of a pruned model that keeps it pruned."""

from torch import Tensor, nn
from torch.optim import Optimizer

from platon.engine import kernels
from platon.engine.hooks import Hooks
from platon.engine.shard import laid_out_as, local, ranks_of
from platon.engine.units import Units, weights


class Hold:
    """Keeps every weight at zero that was zero when this was built, through further training; see `hold`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, units: Units | None = None) -> None:
        """Remember which weights are zero, as bits, and attach."""
        self.units = weights(model) if units is None else units
        ranks_of(model, self.units.matrices)
        self._bits = {name: kernels.pack((local(matrix) != 0).view(-1)) for name, matrix in self.units.matrices.items()}
        self._hooks = Hooks(
            model, optimizer, self.units.matrices, reads=None, on_nonfinite=None, before=lambda: None, after=self._after
        )

    def _after(self) -> None:
        for name, matrix in self.units.matrices.items():
            kernels.hold_zero(local(matrix).view(-1), self._bits[name])

    def masks(self) -> dict[str, Tensor]:
        """A bool tensor a parameter, False = held at zero."""
        return {
            name: laid_out_as(matrix, kernels.unpack(self._bits[name], local(matrix).numel()))
            for name, matrix in self.units.matrices.items()
        }

    def detach(self) -> None:
        """Let the zeros go."""
        self._hooks.detach()


def hold(model: nn.Module, optimizer: Optimizer, units: Units | None = None) -> Hold:
    """Keep every prunable weight that is zero now at zero while `optimizer` trains `model` further."""
    return Hold(model, optimizer, units)
