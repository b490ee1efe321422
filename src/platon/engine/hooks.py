"""The optimizer's own hooks: where pruning happens, with finite and unscaled gradients in place."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from platon.engine.matrix import is_finite
from platon.engine.score import Reading
from platon.engine.shard import ALONE, Ranks, local
from platon.engine.units import plain_name

# The function that torch wraps around the `step` of each optimizer class, and that calls the hooks.
_WRAPPER = next((code for code in Optimizer.profile_hook_step.__code__.co_consts if isinstance(code, CodeType)), None)


class NotFinite(RuntimeError):  # noqa: N818  # the name says what is wrong
    """A gradient was NaN or infinite; the weights are untouched."""


@dataclass(eq=False)
class StepHook:
    """Something that runs around each real step of an optimizer: a pruner, or a hold on zeros.

    A step that a `GradScaler` skips, or that `on_nonfinite="skip"` cancels, does not call `before` and `after`.
    """

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]  #: what `before` and `after` read, by name
    reads: Reading | None  #: when gradients are read, if at all
    on_nonfinite: Literal["raise", "skip"] | None  #: `None`: gradients are not looked at
    before: Callable[[], None]
    after: Callable[[], None]
    ranks: Ranks = ALONE  #: a step is cancelled on all of them or on none
    skipped_count: int = 0
    #: gradient, its version and, at the first step, its sum; by name, while the optimizer works
    watched: dict[str, tuple[Tensor, int, Tensor | None]] = field(default_factory=dict)
    is_first_step: bool = True

    def watch(self) -> None:
        """Remember the gradients, so that `check_gradients` sees whether the optimizer wrote to them."""
        self.watched = {}
        for name, parameter in self.parameters.items():
            if self.reads == "after" and (gradient := parameter.grad) is not None:
                # Writing through `.data` does not change a tensor's version. An optimizer that does so does it at every
                # step, so the sums are compared at the first step alone.
                total = local(gradient).sum(dtype=torch.float64) if self.is_first_step else None
                self.watched[name] = gradient, local(gradient)._version, total

    def check_gradients(self, optimizer: Optimizer) -> None:
        watched, self.watched, self.is_first_step = self.watched, {}, False
        for name, (gradient, version, total) in watched.items():
            same = self.parameters[name].grad is gradient and local(gradient)._version == version
            if not same or (total is not None and bool(total != local(gradient).sum(dtype=torch.float64))):
                raise RuntimeError(
                    f"{type(optimizer).__name__} changed the gradient of {name!r} during its step, so |w g| "
                    "cannot be measured after it; use timing='before', or another setting of the optimizer"
                )


def attach(optimizer: Optimizer, hook: StepHook) -> "OptimizerHooks":
    """Run `hook` around each step of `optimizer` (or of the one in accelerate's wrapper)."""
    optimizer = _unwrapped(optimizer)
    _check_optimizer(optimizer, hook.parameters, hook.reads)
    owners = (getattr(own, "__self__", None) for own in optimizer._optimizer_step_pre_hooks.values())
    shared = next((owner for owner in owners if isinstance(owner, OptimizerHooks)), None) or OptimizerHooks(optimizer)
    shared.hooks.append(hook)
    return shared


class OptimizerHooks:
    """All hooks of one optimizer, after one decision for all of them whether a step takes place."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.hooks: list[StepHook] = []
        self._skipping = False
        self._scale: Tensor | None = None
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []  # gradients that the optimizer must not see
        self._handles = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)

    def detach(self, hook: StepHook) -> None:
        """Remove `hook`; without any the optimizer is left as it was."""
        if hook in self.hooks:
            self.hooks.remove(hook)
        if not self.hooks:
            for handle in self._handles:
                handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_inner_step(optimizer):
            return None
        changed = _run_closure(args, kwargs)
        with torch.no_grad():
            # `found_inf`: a `GradScaler` has told a fused optimizer to do nothing this time.
            self._skipping = bool(getattr(self.optimizer, "found_inf", None)) or self._cancel_nonfinite()
            if not self._skipping:
                self._unscale()
                for hook in self.hooks:
                    hook.before()
                for hook in self.hooks:
                    hook.watch()
        return changed

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_inner_step(optimizer):
            return
        if self._skipping:
            for parameter, gradient in self._hidden:
                parameter.grad = gradient
            self._hidden.clear()
            return
        if self._scale is not None:
            self.optimizer.grad_scale = self._scale  # type: ignore[attr-defined]  # a user may have set it for good
        for hook in self.hooks:
            hook.check_gradients(self.optimizer)
        for hook in self.hooks:
            hook.after()

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

    def _cancel_nonfinite(self) -> bool:
        """Whether the step is cancelled because a gradient is not finite; or the error that names the gradient."""
        watchers = [hook for hook in self.hooks if hook.on_nonfinite is not None]
        gradients = self._gradients()
        ranks = next((watcher.ranks for watcher in watchers if watcher.ranks.group is not None), ALONE)
        bad = _not_finite(gradients, ranks) if watchers and gradients else []
        if not bad:
            return False
        if any(watcher.on_nonfinite == "raise" for watcher in watchers):
            raise NotFinite(
                f"the gradient of {_name(bad[0], watchers)} is not finite ({len(bad)} of {len(gradients)} are not); "
                "the weights are untouched: lower the learning rate, clip the gradients, or use on_nonfinite='skip'"
            )
        # An optimizer passes over parameters without a gradient, so without any it does nothing.
        self._hidden = list(gradients.items())
        for parameter in gradients:
            parameter.grad = None
        for watcher in watchers:
            watcher.skipped_count += 1
        return True


def learning_rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0].get("lr", 1.0))  # it may be a tensor; a user's own optimizer may have none


def relative_rate(optimizer: Optimizer, initial: float) -> float:
    """The learning rate relative to its peak: that of the learning-rate scheduler, or `initial` without one."""
    group = optimizer.param_groups[0]
    peak = float(group.get("max_lr", group.get("initial_lr", initial)))
    return learning_rate(optimizer) / peak if peak > 0 else 1.0


def _not_finite(gradients: Mapping[nn.Parameter, Tensor], ranks: Ranks) -> list[nn.Parameter]:
    """The parameters whose gradient is not finite on one of the ranks."""
    # One number a gradient and one read of the device. A finite gradient may overflow its sum: then look closely.
    device = next(iter(gradients.values())).device
    sums = torch.stack([local(gradient).sum(dtype=torch.float32).to(device) for gradient in gradients.values()])
    if not bool(ranks.any(~sums.isfinite().all())):
        return []
    flags = torch.tensor([not is_finite(local(gradient)) for gradient in gradients.values()], device=device)
    return [parameter for parameter, flag in zip(gradients, ranks.any(flags).tolist(), strict=True) if flag]


def _name(parameter: nn.Parameter, hooks: list[StepHook]) -> str:
    named = (pair for hook in hooks for pair in hook.model.named_parameters())
    unknown = f"a parameter of shape {tuple(parameter.shape)} that is not in the model"
    return next((repr(plain_name(name)) for name, own in named if own is parameter), unknown)


def _is_inner_step(optimizer: Optimizer) -> bool:
    """Whether this is a step inside a step: a class's `step` calls its parent's, with the same hooks around both."""
    # Read from the stack, because a counter would never recover from a step that raises.
    frame: FrameType | None = sys._getframe(1)
    running = 0
    while frame is not None and running < 2:
        running += frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return running > 1


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; give what trains the model"
        )
    return optimizer


def _check_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], reads: Reading | None) -> None:
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
    if foreach is None and not group.get("fused"):  # torch's own default: foreach where an accelerator has the weights
        foreach = any(parameter.device.type != "cpu" for parameter in group["params"])
    return bool(group.get("nesterov") and foreach)


def _run_closure(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Run a closure now, so that its gradients are there before the step; the optimizer gets its loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if not callable(closure):
        return None
    with torch.enable_grad():
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}
