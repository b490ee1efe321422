"""Where pruned weights live: as zeros in the model, or aside, with a mask or gate in front of them."""

import torch
from torch import Tensor

from platon.engine.matrix import Matrix
from platon.engine.ranking.ranking import Ranking
from platon.engine.score import StepInfo


class InPlace:
    """Pruned weights are zero in the model itself; the optimizer trains what is there."""

    def take_changes(self) -> None:
        """Take over weights that somebody else wrote to the model since `show`."""

    def restore(self) -> None:
        """Before the optimizer's step: give it the weights that it trains."""

    def mask_gradients(self, info: StepInfo) -> None:
        """Before the optimizer's step: make gradients those of the weights behind the mask of the step in `info`."""

    def stash(self) -> None:
        """After the optimizer's step: remember the weights that it trained."""

    def show(self, info: StepInfo, settled: bool, is_masked: bool = False) -> None:
        """Write the weights that the forward pass after the step in `info` sees; `settled`: for evaluation.

        `is_masked`: the weights in the model are trained and masked ones already, so only gates are missing.
        """

    def show_last(self, info: StepInfo) -> None:
        """Write the weights that the model keeps when pruning ends."""

    def reload(self, info: StepInfo, settled: bool) -> None:
        """`show` after `tensors` were read from a checkpoint."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by name."""
        return {}


class Aside(InPlace):
    """All weights are kept in a copy; the model holds them times their mask or gate."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._full = {matrix.name: torch.empty_like(matrix.weight) for matrix in ranking.matrices}
        self._versions: dict[str, int] = {}  # of each matrix, after the last write from here
        self._shown: tuple[StepInfo, bool] = (StepInfo(0), False)  # what the model's weights were written for
        self.stash()

    def take_changes(self) -> None:
        """Each number that differs from the one written from here, as after `model.load_state_dict`, is taken over."""
        changed = self._changed()
        if changed:
            self.reload(*self._shown)
            for matrix, new in changed:
                full = self._full[matrix.name]
                full.copy_(torch.where(new != matrix.weight, new, full))

    def restore(self) -> None:
        self.take_changes()
        for matrix in self._ranking.matrices:
            matrix.weight.copy_(self._full[matrix.name])
            matrix.make_gradient_contiguous()

    def mask_gradients(self, info: StepInfo) -> None:
        if self._ranking.score.applies_mask(info):
            self._ranking.hold("gradient")

    def stash(self) -> None:
        for matrix in self._ranking.matrices:
            self._full[matrix.name].copy_(matrix.weight)

    def show(self, info: StepInfo, settled: bool, is_masked: bool = False) -> None:
        score = self._ranking.score
        masks = settled or score.applies_mask(info)
        if score.gated:
            is_masked = is_masked and masks
            self._ranking.write_gated(None if is_masked else self._full, settled)
        if not is_masked and masks:
            self._ranking.hold("weight")
        self._shown = info, settled
        self._versions = {matrix.name: matrix.version for matrix in self._ranking.matrices}

    def show_last(self, info: StepInfo) -> None:
        """With settled gates; a matrix that somebody else has written to since `show` stays as it is."""
        changed = self._changed()
        self.show(info, settled=True)
        for matrix, new in changed:
            matrix.weight.copy_(new)

    def reload(self, info: StepInfo, settled: bool) -> None:
        for matrix in self._ranking.matrices:
            matrix.weight.copy_(self._full[matrix.name])
        self.show(info, settled)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}:full": tensor for name, tensor in self._full.items()}

    def _changed(self) -> list[tuple[Matrix, Tensor]]:
        """The matrices whose version tells that somebody else has written to them, with copies of their weights."""
        return [
            (matrix, matrix.weight.clone())
            for matrix in self._ranking.matrices
            if self._versions.get(matrix.name, matrix.version) != matrix.version
        ]
