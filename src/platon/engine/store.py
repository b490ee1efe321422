"""Where pruned weights live: as zeros in the model, or aside, with a mask or gate in front of them."""

import torch
from torch import Tensor

from platon.engine.matrix import Matrix
from platon.engine.ranking.ranking import Ranking
from platon.engine.score import StepInfo
from platon.engine.shard import local


class Store:
    """A copy of all weights, for a method that keeps them aside; the model holds them times their mask or gate.

    For the other methods nothing here does anything: pruned weights are zero in the model, and the optimizer trains
    what is there.
    """

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._matrices = ranking.matrices if ranking.score.keeps_weights_aside else []
        self._full = {matrix.name: torch.empty_like(matrix.weight) for matrix in self._matrices}
        self._versions: dict[str, int] = {}  # of each matrix, after the last write from here
        self._shown: tuple[StepInfo, bool] = (StepInfo(0), False)  # what the model's weights were written for
        self.stash()

    def take_changes(self) -> None:
        """Take over each number that somebody else wrote to the model since `show`, as `load_state_dict` does."""
        changed = self._changed()
        if changed:
            self.reload(*self._shown)
            for matrix, new in changed:
                full = self._full[matrix.name]
                full.copy_(torch.where(new != matrix.weight, new, full))

    def restore(self) -> None:
        """Before the optimizer's step: give it the weights that it trains."""
        self.take_changes()
        for matrix in self._matrices:
            matrix.weight.copy_(self._full[matrix.name])
            gradient = matrix.parameter.grad
            if gradient is not None and not local(gradient).is_contiguous():
                matrix.parameter.grad = gradient.contiguous()  # so that `matrix.gradient` is a view of it

    def mask_gradients(self, info: StepInfo) -> None:
        """Before the optimizer's step: make gradients those of the weights behind the mask of the step in `info`."""
        if self._matrices and self._ranking.score.applies_mask(info):
            self._ranking.hold("gradient")

    def stash(self) -> None:
        """After the optimizer's step: remember the weights that it trained."""
        for matrix in self._matrices:
            self._full[matrix.name].copy_(matrix.weight)

    def show(self, info: StepInfo, settled: bool, is_masked: bool = False) -> None:
        """Write the weights that the forward pass after the step in `info` sees; `settled`: for evaluation.

        `is_masked`: the weights in the model are trained and masked ones already, so only gates are missing.
        """
        if not self._matrices:
            return
        score = self._ranking.score
        masks = settled or score.applies_mask(info)
        if score.gated:
            is_masked = is_masked and masks
            self._ranking.write_gated(None if is_masked else self._full, settled)
        if not is_masked and masks:
            self._ranking.hold("weight")
        self._shown = info, settled
        self._versions = {matrix.name: matrix.version for matrix in self._matrices}

    def show_last(self, info: StepInfo) -> None:
        """When pruning ends: settle the gates; a matrix that somebody else wrote to since `show` stays as it is."""
        changed = self._changed()
        self.show(info, settled=True)
        for matrix, new in changed:
            matrix.weight.copy_(new)

    def reload(self, info: StepInfo, settled: bool) -> None:
        """`show` from the copy alone, as after `tensors` were read from a checkpoint."""
        for matrix in self._matrices:
            matrix.weight.copy_(self._full[matrix.name])
        self.show(info, settled)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by name."""
        return {f"{name}:full": tensor for name, tensor in self._full.items()}

    def _changed(self) -> list[tuple[Matrix, Tensor]]:
        """The matrices whose version tells that somebody else has written to them, with copies of their weights."""
        return [
            (matrix, matrix.weight.clone())
            for matrix in self._matrices
            if self._versions.get(matrix.name, matrix.version) != matrix.version
        ]
