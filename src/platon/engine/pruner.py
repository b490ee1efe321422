"""The pruner: holds the state and calls score, schedule, ranking and store in order, from the optimizer's own hooks."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from platon.engine import state as states
from platon.engine.activation import InputNorms
from platon.engine.hooks import StepHook, attach, learning_rate, relative_rate
from platon.engine.matrix import check_in_place, locate
from platon.engine.ranking.ranking import Ranking
from platon.engine.ranking.slice_ranking import SliceRanking
from platon.engine.ranking.weight_ranking import WeightRanking
from platon.engine.schedule import Ramp, Schedule, checked_keep
from platon.engine.scope import check_share
from platon.engine.score import Score, StepInfo, checked_choice
from platon.engine.shard import everyone, ranks_of, reshard
from platon.engine.smoothed import Platon
from platon.engine.steering import Steering
from platon.engine.store import Store
from platon.engine.units import Units, weights


class Pruner:
    """Prunes `model` while `optimizer` trains it. Nothing else of the training loop changes.

    Examples:
        >>> pruner = platon.Pruner(model, optimizer, schedule=platon.Cubic(final=0.1, total=steps))
        >>> for batch in data:
        ...     model(**batch).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Args:
        model: holds the weights. After a mask step they are the pruned weights: evaluate, save and export as usual.
        optimizer: any `torch.optim` optimizer that trains these weights (or accelerate's wrapper of one).
        score: the method; the paper's by default.
        schedule: the share to keep at each step.
        units: what is pruned; every weight of the transformer blocks by default.
        on_nonfinite: what a NaN or infinite gradient does, before the optimizer moves: "raise" an error that names the
            parameter, or "skip" the step and count it in `skipped_count`. Of several pruners on one optimizer, one that
            raises decides for all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        score: Score | None = None,
        schedule: Schedule,
        units: Units | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        checked_choice(on_nonfinite, "on_nonfinite", ("raise", "skip"))
        if score is not None and not isinstance(score, Score):
            raise TypeError(f"score must be a method such as platon.Platon(), got {score!r}")
        if not callable(schedule):
            raise TypeError(f"schedule must give a share for a step, as platon.Constant(0.1) does, got {schedule!r}")
        if units is not None and not isinstance(units, Units):
            raise TypeError(f"units must come from a function such as platon.heads(model), got {units!r}")
        self.score = (Platon() if score is None else score).fitted(schedule)
        self.schedule = schedule
        self._ramp = schedule if isinstance(schedule, Ramp) else None
        self.units = weights(model) if units is None else units
        self._model = model
        self.step_count = 0
        self.keep = 1.0  #: the share that the schedule asked for at the last mask step
        self._ranks = ranks_of(model, self.units.matrices)
        matrices = locate(model, self.units.matrices, self._ranks)
        if self._ramp is not None:
            check_share(self.score.scope, self._ramp.share(sys.maxsize))
        reads = self.score.reads
        self._norms = InputNorms(model, matrices) if reads == "inputs" else None
        if self.units.groups:
            self._ranking: Ranking = SliceRanking(self.score, matrices, self.units.groups, self._ranks)
        else:
            self._ranking = WeightRanking(self.score, matrices, self._ranks, self._norms)
        self._store = Store(self._ranking)
        self._controller = self.score.controller()
        self._settled = False
        self._hook = StepHook(model, self.units.matrices, reads, on_nonfinite, self._before, self._after, self._ranks)
        self._hooks = attach(optimizer, self._hook)
        if self._norms is not None:
            self._norms.attach()  # after all refusals: one leaves the model as it was
        self._initial_rate = learning_rate(self._hooks.optimizer)
        with torch.no_grad():
            self._show()

    # --- what users read ----------------------------------------------------------------------------------------------

    @property
    def skipped_count(self) -> int:
        """Steps cancelled because a gradient was not finite."""
        return self._hook.skipped_count

    @property
    def cut(self) -> float | None:
        """The score at the boundary of the last selection; `None` before it, and where each matrix has its own."""
        return None if self._ranking.cut is None else float(self._ranking.cut)

    @property
    def penalty(self) -> float | None:
        """The present value of a steered penalty; `None` for methods without one."""
        return None if self._controller is None else self._controller.penalty

    def kept(self) -> float:
        """The exact share of the prunable weights that the last selection kept."""
        return self._ranking.kept_count / self._ranking.total

    def masks(self) -> dict[str, Tensor]:
        """The last selection: a bool tensor a parameter, True = kept; sharded where the parameter is."""
        return self._ranking.masks()

    def fingerprint(self) -> str:
        """A short hash of the masks: the same wherever the same weights stay, on however many ranks they lie.

        Where parameters are sharded, all ranks must call it together.
        """
        return f"{self._ranking.digest() & 0xFFFFFFFFFFFFFFFF:016x}"

    def check_ranks(self) -> None:
        """Raise an error if the masks of the training's processes differ; all of them must call it together."""
        masks = torch.tensor([self._ranking.digest()], device=self._ranking.matrices[0].device)
        if bool((everyone().gather(masks) != masks).any()):
            raise RuntimeError(
                f"the masks of the ranks differ after step {self.step_count}; "
                "give every rank the same model, the same optimizer and gradients that are averaged over all of them"
            )

    def calibrating(self) -> contextlib.AbstractContextManager[None]:
        """Show a score that reads inputs what the weights multiply, in passes that do not train."""
        return contextlib.nullcontext() if self._norms is None else self._norms.calibration(self._ranking.matrices)

    def __repr__(self) -> str:
        progress = f"step {self.step_count}, kept {self.kept():.4f}"
        return f"Pruner(score={self.score}, schedule={self.schedule}, units={self.units}, {progress})"

    # --- evaluation and the end ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def deterministic(self) -> Iterator[None]:
        """The weights as they are for evaluation, saving and export.

        Only a method that draws random gates has others while it trains; for the rest this changes nothing.
        """
        was_settled = self._settled
        self.settle()
        try:
            yield
        finally:
            if not was_settled:
                self.unsettle()

    def settle(self) -> None:
        """Write the weights for evaluation, until `unsettle`; the optimizer must not step in between."""
        self._write_again(settled=True)

    def unsettle(self) -> None:
        """Write the weights for training again."""
        self._write_again(settled=False)

    @torch.no_grad()
    def _write_again(self, settled: bool) -> None:
        if self._is_attached() and self.score.gated and settled != self._settled:
            self._reshard()
            self._store.take_changes()
            self._store.show(self._info(self.step_count), settled)
        self._settled = settled and self._is_attached()

    @torch.no_grad()
    def detach(self) -> None:
        """Stop pruning; the weights stay as they are, gates settled. Weights that were loaded since are left alone."""
        if not self._is_attached():
            return
        if self.score.gated and not self._settled:
            self._reshard()
            self._store.show_last(self._info(self.step_count))
        self._hooks.detach(self._hook)
        if self._norms is not None:
            self._norms.detach()
        self._settled = False

    def _is_attached(self) -> bool:
        return self._hook in self._hooks.hooks

    def _reshard(self) -> None:
        if self._ranks.group is not None:
            reshard(self._model)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a pruner cannot be copied or pickled, because its hooks stay with its own optimizer; "
            "build a new pruner on the copied model and optimizer, and give it state_dict()"
        )

    # --- one optimizer step -------------------------------------------------------------------------------------------

    def _before(self) -> None:
        check_in_place(self._model, self._ranking.matrices)
        if self._settled:
            raise RuntimeError("the optimizer steps inside deterministic(); train outside of it")
        info = self._info(self.step_count + 1)
        self._store.restore()
        self._ranking.observe(info)
        self._store.mask_gradients(self._info(self.step_count))

    def _after(self) -> None:
        self.step_count += 1
        keep: Any = self.schedule(self.step_count)
        if keep is not None:  # the schedule may be the user's own
            share = keep.item() if isinstance(keep, Tensor) else keep
            keep = checked_keep(share, f"the schedule's share at step {self.step_count}")
        info = self._info(self.step_count, keep)
        self._store.stash()
        choice = self.score.choose(info)
        watched = self._ranking.advance(info, choice)
        if choice is not None:
            self.keep = choice.keep
            if self._controller is not None and watched is not None:
                self._controller.follow(watched, choice.keep)
        self._show(is_masked=choice is not None)

    def _show(self, is_masked: bool = False) -> None:
        """Write the weights that the next forward pass sees, with new random gates where the method has them."""
        self._ranking.draw(self.step_count + 1)
        if self.score.gated:
            self._reshard()
        self._store.show(self._info(self.step_count), self._settled, is_masked)

    def _info(self, step: int, keep: float | None = None) -> StepInfo:
        ramp, rate = self._ramp, relative_rate(self._hooks.optimizer, self._initial_rate)
        place = (self.keep, 1.0, 1.0) if ramp is None else (ramp.share(step), ramp.progress(step), ramp.elapsed(step))
        return StepInfo(step, keep, *place, rate, self.penalty or 0.0)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, whole: bool = False) -> dict[str, Any]:
        """All state: plain numbers and words, and under "tensors" what safetensors can hold.

        Args:
            whole: tensors in the shape of their parameter, and masks as bools: what `torch.distributed.checkpoint`
                can shard for another number of ranks. Sharded parameters have no other form. Otherwise nothing is
                copied, and masks are bits.
        """
        tensors = states.full_tensors if whole or self._ranks.group is not None else states.local_tensors
        return {
            "format": states.FORMAT,
            "method": type(self.score).__name__,
            "settings": dataclasses.asdict(self.score),
            "units": self.units.name,
            "shapes": {matrix.name: list(matrix.parameter.shape) for matrix in self._ranking.matrices},
            "step_count": self.step_count,
            "skipped_count": self.skipped_count,
            "keep": self.keep,
            "kept_count": self._ranking.kept_count,
            "steering": dataclasses.asdict(self._controller or Steering()),
            "cut": self.cut,
            "tensors": tensors(self._ranking, self._store),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, on however many ranks that was.

        Load the model's weights first. A state that does not fit, or is damaged, is refused, and nothing changes then.
        """
        ranking = self._ranking
        mine = {**self.state_dict(), "tensors": states.local_tensors(ranking, self._store)}
        state = states.checked(state, mine, ranking)
        for name, tensor in mine["tensors"].items():
            tensor.copy_(state["tensors"][name])
        self.step_count, self._hook.skipped_count = state["step_count"], state["skipped_count"]
        self.keep, ranking.kept_count, cut = float(state["keep"]), state["kept_count"], state["cut"]
        home = ranking.matrices[0].device
        ranking.cut = None if cut is None else torch.tensor(cut, dtype=torch.float32, device=home)
        if self._controller is not None:
            self._controller = Steering(**state["steering"])
        self._reshard()
        self._store.reload(self._info(self.step_count), self._settled)
