"""The pruner: holds the state and calls score, schedule and selection in order, from the optimizer's own hooks."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from platon.engine.group_ranking import GroupRanking
from platon.engine.hooks import Hooks, Rates
from platon.engine.learned import Gated, Learned, Penalised
from platon.engine.matrix import locate
from platon.engine.ranking import Ranking, WeightRanking
from platon.engine.schedule import Ramp, Schedule, checked_keep
from platon.engine.score import Platon, Score, checked_choice
from platon.engine.shard import give_back, ranks_of, same_on_all
from platon.engine.steering import Steering
from platon.engine.units import Units, weights

FORMAT = 2


class Pruner:
    """Prunes `model` while `optimizer` trains it. Nothing else of the training loop changes.

    Example:
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
            parameter, or "skip" the step and count it in `skipped_count`.
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
        """Attach to the optimizer; nothing is pruned before the schedule says so."""
        checked_choice(on_nonfinite, "on_nonfinite", ("raise", "skip"))
        if score is not None and not isinstance(score, Score):
            raise TypeError(f"score must be a method such as platon.Platon(), got {score!r}")
        if not callable(schedule):
            raise TypeError(f"schedule must give a share for a step, as platon.Constant(0.1) does, got {schedule!r}")
        self.score = Platon() if score is None else score
        self.schedule = schedule
        self.units = weights(model) if units is None else units
        if isinstance(self.score, Penalised) and not isinstance(schedule, Ramp):
            raise TypeError(
                f"{type(self.score).__name__} needs a schedule that says where it stands between two masks, "
                f"as platon.Cubic does, got {schedule!r}"
            )
        self._model = model
        self.step_count = 0
        self.keep = 1.0  #: the share that the schedule asked for at the last mask step
        self._steering = Steering()
        self._ranks = ranks_of(model, self.units.matrices)
        matrices = locate(model, self.units.matrices, self._ranks)
        self._ranking: Ranking = (
            GroupRanking(self.score, matrices, self.units.groups, self._ranks)
            if self.units.groups
            else WeightRanking(self.score, matrices, self._ranks)
        )
        self._deterministic = False
        self._hooks = Hooks(
            model,
            optimizer,
            self.units.matrices,
            reads=self.score.reads,
            on_nonfinite=on_nonfinite,
            before=self._before,
            after=self._after,
            ranks=self._ranks,
        )
        self._rates = Rates(self._hooks.optimizer)
        self._draw()

    # --- what users read ---------------------------------------------------------------------------------------------

    @property
    def skipped_count(self) -> int:
        """Steps cancelled because a gradient was not finite."""
        return self._hooks.skipped_count

    @property
    def cut(self) -> float | None:
        """The score at the boundary of the last selection; `None` before it, and where each matrix has its own."""
        return None if self._ranking.cut is None else float(self._ranking.cut)

    @property
    def penalty(self) -> float | None:
        """What the penalty is steered to at the moment; `None` for methods whose penalty is not steered."""
        steered = isinstance(self.score, Penalised) and self.score.penalty is None
        return self._steering.penalty if steered else None

    def kept(self) -> float:
        """The exact share of the prunable weights that the last selection kept."""
        return self._ranking.kept_count / self._ranking.total

    def masks(self) -> dict[str, Tensor]:
        """The last selection: a bool tensor a parameter, True = kept; sharded where the parameter is."""
        return self._ranking.masks()

    def fingerprint(self) -> str:
        """A short hash of the masks: the same wherever the same weights stay, on however many ranks they lie.

        Where parameters are sharded, all ranks must ask together.
        """
        return f"{self._ranking.digest() & 0xFFFFFFFFFFFFFFFF:016x}"

    def check_ranks(self) -> None:
        """Raise an error where the masks of the training's processes differ; all of them must ask together."""
        if not same_on_all(int(self.fingerprint(), 16), self._ranking.matrices[0].device):
            raise RuntimeError(
                f"the masks of the ranks differ after step {self.step_count}; "
                "give every rank the same model, the same optimizer and gradients that are averaged over all of them"
            )

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """The weights as they are for evaluation, saving and export.

        Only a method that draws random gates has others while it trains; for the rest this changes nothing.
        """
        outermost, self._deterministic = not self._deterministic, True
        self._gate()
        try:
            yield
        finally:
            self._deterministic = not outermost
            self._gate()

    def __repr__(self) -> str:
        """The configuration, and where it stands."""
        return (
            f"Pruner(score={self.score}, schedule={self.schedule}, units={self.units}, "
            f"step {self.step_count}, kept {self.kept():.4f})"
        )

    def detach(self) -> None:
        """Stop pruning; the weights stay as they are, gates settled."""
        self._hooks.detach()
        if not self._deterministic:  # or someone may have given the model other weights since: the best ones, say
            self._deterministic = True
            self._gate()

    # --- one optimizer step ------------------------------------------------------------------------------------------

    def _before(self) -> None:
        for matrix in self._ranking.matrices:
            matrix.check(self._model)
        if self._deterministic:
            raise RuntimeError("the optimizer steps inside deterministic(); train outside of it")
        if isinstance(self.score, Learned):
            self._ranking.bring_back()
            self._ranking.tell(self._rates(), self._progress(self.step_count + 1), self._steering.penalty)
        if self.score.reads == "before":
            self._ranking.update(self.step_count + 1)
        if isinstance(self.score, Learned) and self._by_mask(self.step_count):
            self._ranking.hold("gradient")

    def _after(self) -> None:
        self.step_count += 1
        keep = self.schedule(self.step_count)
        if keep is not None:
            keep = checked_keep(float(keep), f"the schedule's share at step {self.step_count}")  # it may be the user's
        if isinstance(self.score, Learned):
            self._ranking.put_aside()
        if self.score.reads == "after":
            self._ranking.update(self.step_count, keep)
        if isinstance(self.score, Penalised):
            self._penalise(self.score, keep)
        elif keep is not None:
            self._select(keep)
        elif isinstance(self.score, Learned):
            self._ranking.hold("weight")
        self._draw()

    def _select(self, keep: float) -> None:
        self.keep = keep
        self._ranking.select(keep)

    # --- learned scores ----------------------------------------------------------------------------------------------

    def _progress(self, step: int) -> float:
        return self.schedule.progress(step) if isinstance(self.schedule, Ramp) else 1.0

    def _penalise(self, score: Penalised, keep: float | None) -> None:
        """Select by the fixed value; or, where a share is asked for, steer towards it and end with it exactly."""
        assert isinstance(self.schedule, Ramp)
        progress, share = self._progress(self.step_count), self.schedule.share(self.step_count)
        if score.penalty is None and progress == 1:
            self._select(share if keep is None else keep)
            return
        self.keep = share
        self._ranking.open(score.opening(progress), score.min_keep_per_matrix)
        if score.penalty is None and progress > 0:
            self._steering.follow(self._ranking.above(score.line(progress)), share)

    def _by_mask(self, step: int) -> bool:
        """Whether the forward pass after `step` sees the mask itself: random gates do without, until it is final."""
        if not isinstance(self.score, Gated):
            return True
        return self.score.penalty is None and step > 0 and self._progress(step) == 1

    def _draw(self) -> None:
        """New gates for the next forward pass."""
        if isinstance(self.score, Gated):
            self._ranking.draw(self.step_count + 1)
            self._gate()

    @torch.no_grad()
    def _gate(self) -> None:
        if isinstance(self.score, Gated):
            if self._ranks.group is not None:
                give_back(self._model)
            self._ranking.gate(settled=self._deterministic)
            if self._deterministic or self._by_mask(self.step_count):
                self._ranking.hold("weight")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, whole: bool = False) -> dict[str, Any]:
        """All state: plain numbers and words, and under "tensors" what safetensors can hold.

        Args:
            whole: tensors in the shape of their parameter, and masks as bools: what `torch.distributed.checkpoint`
                cuts anew for another number of ranks. Sharded parameters have no other form. Otherwise nothing is
                copied, and masks are bits.
        """
        whole = whole or self._ranks.group is not None
        return {
            "format": FORMAT,
            "method": type(self.score).__name__,
            "settings": dataclasses.asdict(self.score),
            "units": self.units.name,
            "shapes": {matrix.name: list(matrix.parameter.shape) for matrix in self._ranking.matrices},
            "step_count": self.step_count,
            "skipped_count": self.skipped_count,
            "keep": self.keep,
            "kept_count": self._ranking.kept_count,
            "steering": dataclasses.asdict(self._steering),
            "cut": self.cut,
            "tensors": self._ranking.whole_tensors() if whole else self._ranking.tensors(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, on however many ranks that was.

        A state of another model or method is refused, and nothing changes then.
        """
        mine = {**self.state_dict(), "tensors": self._ranking.tensors()}
        if isinstance(state.get("tensors"), Mapping):
            state = {**state, "tensors": self._ranking.own_tensors(state["tensors"])}
        difference = _first_difference(mine, state)
        if difference:
            raise ValueError(f"this state does not fit the pruner: {difference}")
        for name, tensor in mine["tensors"].items():
            tensor.copy_(state["tensors"][name])
        self.step_count = int(state["step_count"])
        self._hooks.skipped_count = int(state["skipped_count"])
        self.keep, self._steering = float(state["keep"]), Steering(**state["steering"])
        ranking, cut = self._ranking, state["cut"]
        ranking.kept_count = int(state["kept_count"])
        ranking.cut = None if cut is None else torch.tensor(cut, dtype=torch.float32, device=ranking.matrices[0].device)
        if isinstance(self.score, Learned):
            ranking.bring_back()
            ranking.hold("weight")
            self._gate()


def _first_difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """What first tells two states apart for good, in words."""
    if other.get("format", FORMAT) != FORMAT:
        return f"its format is {other['format']}, this version of platon reads {FORMAT}"
    missing = next((key for key in mine if key not in other), None)
    if missing:
        return f"it has no {missing!r}, so it is not a whole pruner state"
    for key in ("method", "units"):
        if other[key] != mine[key]:
            return f"{key} is {other[key]!r} in the state and {mine[key]!r} in the pruner"
    for key, what in (("settings", "setting"), ("shapes", "parameter")):
        ours, theirs = mine[key], other[key]
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if name not in theirs or name not in ours:
                return f"{what} {name!r} is only in the {'pruner' if name in ours else 'state'}"
            if ours[name] != theirs[name]:
                return f"{what} {name!r} is {theirs[name]!r} in the state and {ours[name]!r} in the pruner"
    for name, tensor in mine["tensors"].items():
        given = other["tensors"].get(name)
        if not isinstance(given, Tensor) or given.shape != tensor.shape or given.dtype != tensor.dtype:
            found = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else "missing"
            return f"tensor {name!r} is {found} in the state and {tensor.dtype} {tuple(tensor.shape)} in the pruner"
    return None
