"""The pruner: holds the state and calls score, schedule and selection in order, from the optimizer's own hooks."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from platon.engine import kernels
from platon.engine.hooks import Hooks
from platon.engine.schedule import Schedule, checked_keep
from platon.engine.score import Platon, Score, State, checked_choice
from platon.engine.select import Pivots, find_cut, pick_pivots, sample_index
from platon.engine.units import Units, weights

FORMAT = 1


#: (the children of a module, or its parameters; a key; what stands there), from the model down to a parameter
_Place = list[tuple[Mapping[str, Any], str, Any]]


class _Matrix:
    """A prunable matrix: its place in the model, its score's state, and the bits of the last selection."""

    def __init__(self, name: str, parameter: nn.Parameter, place: _Place, score: Score, start: int) -> None:
        self.name, self.parameter, self.place, self.start = name, parameter, place, start
        self.size, self.device = parameter.numel(), parameter.device
        self.state: State = score.init(self.size, self.device)
        self.bits = torch.full((-(-self.size // 8),), 0xFF, dtype=torch.uint8, device=self.device)

    @property
    def weight(self) -> Tensor:
        """The parameter's weights, flat; a view."""
        return self.parameter.detach().view(-1)

    @property
    def gradient(self) -> Tensor | None:
        """This step's gradient, flat."""
        return None if self.parameter.grad is None else self.parameter.grad.detach().reshape(-1)

    def tensors(self) -> State:
        """What a checkpoint must hold."""
        return {**self.state, "mask": self.bits}

    def check(self, model: nn.Module) -> None:
        """That the model still trains the parameter that this was built for."""
        moved = any(held.get(key) is not what for held, key, what in self.place)
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
        self._model = model
        self.step_count = 0
        self.keep = 1.0  #: the share that the schedule asked for at the last mask step
        self._kept = self._total = self.units.count
        self._cut: Tensor | None = None
        self._matrices = _locate(model, self.units, self.score)
        self._fused = kernels.worth_compiling(self._total, self._matrices[0].device)
        self._index: list[Tensor] | None = None
        self._hooks = Hooks(
            model,
            optimizer,
            {matrix.name: matrix.parameter for matrix in self._matrices},
            reads=self.score.reads,
            on_nonfinite=on_nonfinite,
            before=self._before,
            after=self._after,
        )

    # --- what users read ---------------------------------------------------------------------------------------------

    @property
    def skipped_count(self) -> int:
        """Steps cancelled because a gradient was not finite."""
        return self._hooks.skipped_count

    @property
    def cut(self) -> float | None:
        """The score at the boundary of the last selection; `None` before it, and where each matrix has its own."""
        return None if self._cut is None else float(self._cut)

    def kept(self) -> float:
        """The exact share of the prunable weights that the last selection kept."""
        return self._kept / self._total

    def masks(self) -> dict[str, Tensor]:
        """The last selection: a bool tensor a parameter, True = kept."""
        return {m.name: kernels.unpack(m.bits, m.size).view(m.parameter.shape) for m in self._matrices}

    def __repr__(self) -> str:
        """The configuration, and where it stands."""
        return (
            f"Pruner(score={self.score}, schedule={self.schedule}, units={self.units}, "
            f"step {self.step_count}, kept {self.kept():.4f})"
        )

    def detach(self) -> None:
        """Stop pruning; the weights stay as they are."""
        self._hooks.detach()

    # --- one optimizer step ------------------------------------------------------------------------------------------

    def _before(self) -> None:
        for matrix in self._matrices:
            matrix.check(self._model)
        if self.score.reads == "before":
            self._update(self.step_count + 1)

    def _after(self) -> None:
        self.step_count += 1
        keep = self.schedule(self.step_count)
        if keep is not None:
            keep = checked_keep(float(keep), f"the schedule's share at step {self.step_count}")  # it may be the user's
        pivots = self._update(self.step_count, keep) if self.score.reads == "after" else None
        if keep is not None:
            self._select(keep, pivots)

    def _scored(self) -> list[kernels.Scored]:
        return [kernels.Scored(self.score, m.weight, m.state, m.start, self._fused) for m in self._matrices]

    def _update(self, step: int, keep: float | None = None) -> Pivots | None:
        """Take the gradients into the state; where a selection follows, count around its cut in the same pass."""
        phase = self.score.phase(step)
        scored = self._scored()
        gradients = [matrix.gradient for matrix in self._matrices]
        k = None if keep is None or self.score.scope == "matrix" else _count(keep, self._total)
        if k is None or k == self._total or self._total <= 1 << 16:
            for matrix, gradient in zip(scored, gradients, strict=True):
                matrix.update(gradient, phase)
            return None
        if self._index is None:
            self._index = [sample_index(matrix.size, self._total, matrix.device) for matrix in scored]
        pivots = pick_pivots(kernels.preview(scored, self._index, gradients, phase), k, self._total)
        counts = [
            matrix.update(gradient, phase, pivots.value.to(matrix.device))
            for matrix, gradient in zip(scored, gradients, strict=True)
        ]
        home = pivots.value.device
        return pivots.counted(torch.stack([count.to(home) for count in counts if count is not None]).sum(0))

    def _select(self, keep: float, pivots: Pivots | None) -> None:
        scored = self._scored()
        self.keep = keep
        if self.score.scope == "matrix":
            self._cut = None
            self._kept = sum(
                self._mask([m], [s], _count(keep, s.size)) for m, s in zip(self._matrices, scored, strict=True)
            )
        else:
            self._kept = self._mask(self._matrices, scored, _count(keep, self._total), pivots)

    def _mask(self, matrices: list[_Matrix], scored: list[kernels.Scored], k: int, pivots: Pivots | None = None) -> int:
        total = sum(matrix.size for matrix in scored)
        if k == total:
            # Nothing to remove: the weights are not even rewritten, so training is what it is without a pruner.
            for matrix in matrices:
                matrix.bits.fill_(0xFF)
            return k
        cut = find_cut(scored, k, total, pivots)
        cut.zero(scored, [matrix.bits for matrix in matrices])
        if self.score.scope == "global":
            self._cut = cut.value
        return k

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All state: plain numbers and words, and under "tensors" what safetensors can hold. Nothing is copied."""
        return {
            "format": FORMAT,
            "method": type(self.score).__name__,
            "settings": dataclasses.asdict(self.score),
            "shapes": {matrix.name: list(matrix.parameter.shape) for matrix in self._matrices},
            "step_count": self.step_count,
            "skipped_count": self.skipped_count,
            "keep": self.keep,
            "kept_count": self._kept,
            "cut": self.cut,
            "tensors": {f"{m.name}:{key}": tensor for m in self._matrices for key, tensor in m.tensors().items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; a state of another model or method is refused, and nothing changes then."""
        mine = self.state_dict()
        difference = _first_difference(mine, state)
        if difference:
            raise ValueError(f"this state does not fit the pruner: {difference}")
        for name, tensor in mine["tensors"].items():
            tensor.copy_(state["tensors"][name])
        self.step_count = int(state["step_count"])
        self._hooks.skipped_count = int(state["skipped_count"])
        self.keep = float(state["keep"])
        self._kept = int(state["kept_count"])
        cut = state["cut"]
        self._cut = None if cut is None else torch.tensor(cut, dtype=torch.float32, device=self._matrices[0].device)


def _count(keep: float, total: int) -> int:
    """How many stay: round(keep · N), and at least one."""
    return max(1, round(keep * total))


def _locate(model: nn.Module, units: Units, score: Score) -> list[_Matrix]:
    """The units' matrices in the model, checked for what would go wrong later."""
    places = {id(parameter): _path(model, name) for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: list[_Matrix] = []
    start = 0
    for name, parameter in units.matrices.items():
        if id(parameter) not in places:
            raise ValueError(f"the model does not hold {name!r}; build units from the model that the pruner gets")
        if not parameter.is_contiguous():
            raise ValueError(
                f"{name!r} is not contiguous in memory; give it contiguous data before building the optimizer"
            )
        if not bool(parameter.detach().sum(dtype=torch.float32).isfinite()) and not bool(parameter.isfinite().all()):
            raise ValueError(f"{name!r} holds a weight that is NaN or infinite; load or train a sound model first")
        found.append(_Matrix(name, parameter, places[id(parameter)], score, start))
        start += parameter.numel()
    return found


def _path(model: nn.Module, name: str) -> _Place:
    *parents, leaf = name.split(".")
    path: _Place = []
    for key in parents:
        path.append((model._modules, key, model._modules[key]))
        model = model.get_submodule(key)
    path.append((model._parameters, leaf, model._parameters[leaf]))
    return path


def _first_difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """What first tells two states apart for good, in words."""
    if other.get("format", FORMAT) != FORMAT:
        return f"its format is {other['format']}, this version of platon reads {FORMAT}"
    missing = next((key for key in mine if key not in other), None)
    if missing:
        return f"it has no {missing!r}, so it is not a whole pruner state"
    if other["method"] != mine["method"]:
        return f"method is {other['method']!r} in the state and {mine['method']!r} in the pruner"
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
