"""The optimizer's own hooks: where pruning happens, and what can come between an optimizer and its gradients."""

import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from platon.engine.score import Timing
from platon.engine.shard import ALONE, Ranks, local
from platon.engine.units import plain_name

# What torch wraps around the `step` of each class, and what calls the hooks.
_WRAPPER = next(
    (code for code in Optimizer.profile_hook_step.__code__.co_consts if isinstance(code, CodeType)),
    None,
)


class NotFinite(RuntimeError):  # noqa: N818  # the name says what is wrong
    """A gradient was NaN or infinite; the weights are untouched."""


class Hooks:
    """Calls `before` and `after` around each real step of an optimizer, with finite, unscaled gradients in place.

    A step that a `GradScaler` skips, or that `on_nonfinite="skip"` cancels, calls `after` not at all.

    Args:
        model: knows the parameters' names.
        optimizer: a torch optimizer, or a wrapper that holds one as `.optimizer` (accelerate's).
        parameters: what the caller reads, by name.
        reads: when the caller reads gradients, if at all.
        on_nonfinite: "raise" or "skip"; `None`: gradients are not looked at.
        before: called before the optimizer moves.
        after: called after it moved.
        ranks: what the parameters are sharded over; a step is cancelled on all ranks or on none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        *,
        reads: Timing | None,
        on_nonfinite: Literal["raise", "skip"] | None,
        before: Callable[[], None],
        after: Callable[[], None],
        ranks: Ranks = ALONE,
    ) -> None:
        """Refuse what cannot work, then attach."""
        self.optimizer = _unwrapped(optimizer)
        _check_optimizer(self.optimizer, parameters, reads)
        self.skipped_count = 0
        self._model, self._parameters, self._reads, self._on_nonfinite = model, parameters, reads, on_nonfinite
        self._call_before, self._call_after, self._ranks = before, after, ranks
        self._skipping = False
        self._scale: Tensor | None = None
        self._put_aside: list[tuple[nn.Parameter, Tensor]] = []
        self._first = True
        #: gradient, its version and, at the first step, its sum; by name, while the optimizer works
        self._watched: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]

    def detach(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_inner_step(optimizer):
            return None
        changed = _run_closure(args, kwargs)
        with torch.no_grad():
            self._skipping = self._found_inf() or self._nonfinite()
            if not self._skipping:
                self._unscale()
                self._call_before()
                if self._reads == "after":
                    self._watched = self._watch()
        return changed

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_inner_step(optimizer):
            return
        if self._skipping:
            for parameter, gradient in self._put_aside:
                parameter.grad = gradient
            self._put_aside.clear()
            return
        if self._scale is not None:
            self.optimizer.grad_scale = self._scale  # type: ignore[attr-defined]  # a user may have set it for good
        watched, self._watched = self._watched, {}
        for name, (gradient, version, total) in watched.items():
            same = self._parameters[name].grad is gradient and local(gradient)._version == version
            if not same or (total is not None and bool(total != local(gradient).sum(dtype=torch.float64))):
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} changed the gradient of {name!r} during its step, so |w g| "
                    "cannot be measured after it; use timing='before', or another setting of the optimizer"
                )
        self._first = False
        self._call_after()

    def _watch(self) -> dict[str, tuple[Tensor, int, Tensor | None]]:
        """What tells whether the optimizer writes to a gradient.

        What it writes through `.data` leaves the version alone. An optimizer that does so does it always, so the sums
        are looked at once.
        """
        return {
            name: (p.grad, local(p.grad)._version, local(p.grad).sum(dtype=torch.float64) if self._first else None)
            for name, p in self._parameters.items()
            if p.grad is not None
        }

    def _found_inf(self) -> bool:
        """Whether a `GradScaler` has told a fused optimizer to do nothing this time."""
        found = getattr(self.optimizer, "found_inf", None)
        return found is not None and bool(found)

    def _unscale(self) -> None:
        """Divide by the `GradScaler`'s scale, which fused optimizers otherwise do inside their step."""
        self._scale = getattr(self.optimizer, "grad_scale", None)
        if self._scale is not None:
            for gradient in self._gradients().values():
                local(gradient).div_(self._scale.to(gradient.device))
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]  # done; back in place after this step

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}

    def _nonfinite(self) -> bool:
        """Whether the step has to be cancelled for a gradient that is not finite; or the error that names it."""
        gradients = self._gradients()
        if self._on_nonfinite is None or not gradients:
            return False
        # One number a gradient and one look at the device. A finite gradient may overflow its sum: then look closely.
        device = next(iter(gradients.values())).device
        sums = torch.stack([local(gradient).sum(dtype=torch.float32).to(device) for gradient in gradients.values()])
        if not bool(self._ranks.any(~sums.isfinite().all())):
            return False
        flags = torch.tensor([not _is_finite(local(gradient)) for gradient in gradients.values()], device=device)
        bad = [parameter for parameter, flag in zip(gradients, self._ranks.any(flags).tolist(), strict=True) if flag]
        if not bad:
            return False
        if self._on_nonfinite == "raise":
            raise NotFinite(
                f"the gradient of {self._name(bad[0])} is not finite ({len(bad)} of {len(gradients)} are not); "
                "the weights are untouched: lower the learning rate, clip the gradients, or use on_nonfinite='skip'"
            )
        # An optimizer passes over parameters without a gradient, so without any it does nothing.
        self._put_aside = list(gradients.items())
        for parameter in gradients:
            parameter.grad = None
        self.skipped_count += 1
        return True

    def _name(self, parameter: nn.Parameter) -> str:
        names = [repr(plain_name(name)) for name, ours in self._model.named_parameters() if ours is parameter]
        return names[0] if names else f"a parameter of shape {tuple(parameter.shape)} that is not in the model"


class Rates:
    """The learning rate of an optimizer now, as a share of its peak: what the pruner's own AdamW follows."""

    def __init__(self, optimizer: Optimizer) -> None:
        """The peak is what the scheduler says it is, and without one the rate that the optimizer was built with."""
        self._optimizer = optimizer
        self._built_with = self._rate(optimizer.param_groups[0])

    @staticmethod
    def _rate(group: dict[str, Any]) -> float:
        return float(group.get("lr", 1.0))  # it may be a tensor, and a user's own optimizer may have none

    def __call__(self) -> float:
        """Of the first group; 1 where that has no rate to speak of."""
        group = self._optimizer.param_groups[0]
        peak = float(group.get("max_lr", group.get("initial_lr", self._built_with)))
        return self._rate(group) / peak if peak > 0 else 1.0


def _is_inner_step(optimizer: Optimizer) -> bool:
    """Whether this is a step inside a step: a class whose `step` calls its parent's, with the same hooks around both.

    Read from the stack, because a counter would never recover from a step that raises.
    """
    frame: FrameType | None = sys._getframe(1)
    running = 0
    while frame is not None and running < 2:
        running += frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return running > 1


def _is_finite(gradient: Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient  # an embedding's may be sparse
    return bool(values.isfinite().all())


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; give what trains the model"
        )
    return optimizer


def _check_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], reads: Timing | None) -> None:
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS takes many gradients in one step, so no step has a gradient of its own; use AdamW or SGD"
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if id(parameter) not in held:
            raise ValueError(
                f"the optimizer does not hold {name!r}; "
                "build it from this model's parameters, or leave that one out with exclude"
            )
    if reads == "after" and isinstance(optimizer, SGD) and any(map(_overwrites_gradients, optimizer.param_groups)):
        raise ValueError(
            "SGD with nesterov=True and foreach overwrites the gradients during its step; "
            "build it with foreach=False, or measure with timing='before'"
        )


def _overwrites_gradients(group: dict[str, Any]) -> bool:
    foreach = group.get("foreach")
    if foreach is None and not group.get(
        "fused"
    ):  # torch's own default: foreach wherever an accelerator has the weights
        foreach = any(parameter.device.type != "cpu" for parameter in group["params"])
    return bool(group.get("nesterov") and foreach)


def _run_closure(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Run a closure now, so that its gradients are there before the step; the optimizer gets its loss."""
    place = 1 if len(args) > 1 else "closure"  # args[0] is the optimizer
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    with torch.enable_grad():
        loss = closure()
    if place == 1:
        return (args[0], lambda: loss, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}
