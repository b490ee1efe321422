"""Copies of models for trials: the same modules, other numbers in them, float64, on the CPU.

A trial asks what a block computes, not what its weights are. So a copy takes the modules with all that they hold, and
random parameters of the same shapes. That costs little memory, and it works where the weights cannot be used: sharded
over ranks, on the meta device, on a device without float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from platon.engine.proof.linear import COLUMNS, gathered, width_in
from platon.engine.topology import is_conv1d

Fill = Callable[[str, torch.Size], Tensor]

_KEPT_HOOKS = ("torch.nn.utils", "platon.")  # hooks that compute: weight norm, selections of a compact model
_SHARDING = ("__composable_api_state", "_fsdp")  # what FSDP keeps in the modules that it shards
_STRUCTURE = ("_parameters", "_buffers", "_modules")


class UnfitError(Exception):
    """Why something cannot be tried; the text ends a sentence."""


def replicate(model: nn.Module, fill: Fill) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A copy of a model with parameters from `fill`, and the copy's modules by the names of the model's.

    Wrappers of `torch.compile` and FSDP come off. Linears that gather their inputs read all of them in the copy.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    copies: dict[int, nn.Module] = {}
    for module in named.values():
        if id(module) not in copies and not hasattr(module, "_orig_mod"):
            cls: Any = plain_class(module)
            copies[id(module)] = cls.__new__(cls)
    for module in named.values():
        inner: Any = module
        while hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        copies[id(module)] = copies[id(inner)]
    memo: dict[int, Any] = dict(copies)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(fill(name, _full_shape(model, name, parameter)))
    for module in {id(module): module for module in named.values() if not hasattr(module, "_orig_mod")}.values():
        _copy_into(copies[id(module)], module, memo)
    return copies[id(model)].eval(), {name: copies[id(module)] for name, module in named.items()}


def duplicate(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """`deepcopy` of a module that may keep activations of its last pass, which torch does not copy."""
    memo = {} if memo is None else memo
    for one in module.modules():
        for value in vars(one).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied


def plain_class(module: nn.Module) -> type:
    """The class without what FSDP puts in front of it, and without the gathering of a compact model."""
    return next(
        cls
        for cls in type(module).__mro__
        if not cls.__module__.startswith("torch.distributed") and not hasattr(cls, "gathers_columns")
    )


def _full_shape(model: nn.Module, name: str, parameter: nn.Parameter) -> torch.Size:
    owner = model.get_submodule(name.rpartition(".")[0])
    if name.endswith(".weight") and gathered(owner) is not None:
        shape = list(parameter.shape)
        shape[int(not is_conv1d(owner))] = width_in(owner)
        return torch.Size(shape)
    return parameter.shape


def _copy_into(copied: nn.Module, module: nn.Module, memo: dict[int, Any]) -> None:
    own = vars(module)
    sharded = any(cls.__module__.startswith("torch.distributed") for cls in type(module).__mro__)
    # accelerate's wrapper of the forward pass casts to half precision
    left_out = (*_STRUCTURE, *(("forward", "_original_forward") if "_original_forward" in own else ()))
    for key, value in own.items():
        if key in left_out or key.startswith(_SHARDING):
            continue
        if key.startswith("_") and key.endswith("_hooks"):
            kept = {} if sharded else {k: _copied(hook, memo) for k, hook in value.items() if _computes(hook)}
            copied.__dict__[key] = type(value)(kept)
        elif key.startswith("_") and key.endswith(("_hooks_with_kwargs", "_hooks_always_called")):
            copied.__dict__[key] = copy.copy(value)
        else:
            copied.__dict__[key] = _plain(_portable(_copied(value, memo)))
    gathers = gathered(module) is not None
    copied.__dict__["_parameters"] = {k: None if p is None else memo[id(p)] for k, p in module._parameters.items()}
    copied.__dict__["_modules"] = {k: None if m is None else memo[id(m)] for k, m in module._modules.items()}
    copied.__dict__["_buffers"] = {
        k: _plain(b if b is None else memo.setdefault(id(b), b.detach().clone()))
        for k, b in module._buffers.items()
        if not (gathers and k == COLUMNS)
    }


def _computes(hook: Any) -> bool:
    place = (
        getattr(hook, "__module__", "") if callable(hook) and hasattr(hook, "__qualname__") else type(hook).__module__
    )
    return place.startswith(_KEPT_HOOKS)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # what cannot be copied is shared: process groups, locks, handles
        return value


def _portable(value: Any) -> Any:
    """A configuration that asks for kernels of some device or precision asks for plain torch instead."""
    for key, plain in (
        ("_attn_implementation_internal", ("eager", "sdpa")),
        ("_experts_implementation_internal", ("eager",)),
    ):
        if getattr(value, key, None) is not None and getattr(value, key) not in plain:
            setattr(value, key, plain[0])
    return value


def _plain(value: Any) -> Any:
    """A tensor on the CPU, in float64 if it is of floats; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    if value.is_meta:
        raise UnfitError("has buffers on the meta device, whose values are not known")
    value = value.cpu()
    return value.double() if value.is_floating_point() else value


class Pool:
    """Random parameters that share memory: for a pass through a model that only has to reach every block."""

    def __init__(self, seed: int = 0, size: int = 1 << 21) -> None:
        random = torch.Generator().manual_seed(seed)
        self._matrix = torch.randn(size, generator=random, dtype=torch.float64).mul_(0.05)
        self._vector = torch.rand(1 << 16, generator=random, dtype=torch.float64) + 0.5
        self._place = 0

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        count = math.prod(shape)
        source = self._vector if len(shape) < 2 else self._matrix
        self._place = (self._place * 7 + 12345) % (len(source) // 4)
        room = len(source) - self._place
        if count <= room:
            return source[self._place : self._place + count].view(shape)
        # Rows that overlap: large matrices have as many different numbers as fit.
        rows, width = shape[0], count // shape[0]
        if width > room // 2:
            return source.new_ones(()).mul_(0.01).expand(shape).clone()
        step = max(1, (room - width) // rows)
        strides = [step, *torch.empty(shape[1:], device="meta").stride()]
        if rows > room - width:  # more rows than numbers: they repeat
            return source[self._place : self._place + width].view(1, *shape[1:]).expand(shape)
        return source.as_strided(shape, strides, self._place)


def refill(module: nn.Module, seed: int) -> None:
    """Give a copy new parameters of its own, all random: no zero, no tiny scale hides what the module computes."""
    random = torch.Generator().manual_seed(seed)
    new: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                made = new.get(id(parameter))
                if made is None:
                    made = new[id(parameter)] = nn.Parameter(_random(key, parameter, owner, random))
                owner._parameters[key] = made


def _random(key: str, parameter: Tensor, owner: nn.Module, random: torch.Generator) -> Tensor:
    shape = parameter.shape
    if len(shape) < 2:
        if key.endswith("bias"):
            return torch.randn(shape, generator=random, dtype=torch.float64).mul_(0.5)
        return torch.rand(shape, generator=random, dtype=torch.float64).add_(0.5)
    fan = shape[0] if is_conv1d(owner) else 1 if isinstance(owner, nn.Embedding) else math.prod(shape[1:])
    return torch.randn(shape, generator=random, dtype=torch.float64).mul_(1.5 / math.sqrt(max(1, fan)))


# Attributes that say where a block is in its model or where it came from, which does not change what it computes.
PLACES = {"training", "layer_idx", "layer_id", "layer_index", "layer_number", "idx", "_name_or_path", "name_or_path"}
_ORIGINS = {"_is_hf_initialized", "model_type", "transformers_version"}


def signature(block: nn.Module) -> str:
    """What tells two blocks apart whose units may lie differently.

    Classes, shapes of parameters, numbers, switches and functions; and what buffers hold: it may be an order of heads.
    """
    parts: list[str] = []
    configurations: dict[int, str] = {}
    for name, module in block.named_modules():
        marks = {key: _mark(key, value) for key, value in vars(module).items() if key not in PLACES | _ORIGINS}
        simple = sorted(f"{key}={mark}" for key, mark in marks.items() if mark is not None)
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__") and id(config) not in configurations:
            configurations[id(config)] = str(
                sorted(
                    (key, value)
                    for key, value in vars(config).items()
                    if isinstance(value, bool | int | str) and key not in PLACES | _ORIGINS
                )
            )
        tensors = [f"{key}{tuple(p.shape)}" for key, p in module._parameters.items() if p is not None]
        counts = not isinstance(module, _BatchNorm)  # whose buffers are statistics
        tensors += [f"{key}{_digest(b, counts)}" for key, b in module._buffers.items() if b is not None]
        cls = type(module)
        parts.append(f"{name}:{plain_class(module).__module__}.{cls.__qualname__}:{simple}:{tensors}")
    return "\n".join(parts + sorted(set(configurations.values())))


def _mark(key: str, value: Any) -> str | None:
    """What an attribute of a module adds to its signature; `None`: nothing.

    Rates of dropout differ from layer to layer in many vision models, and do nothing in a trial.
    """
    if isinstance(value, float) and (key == "p" or "drop" in key):
        return None
    if isinstance(value, bool | int | float | str | tuple | list):
        return str(value)
    if isinstance(value, Tensor) and not value.is_floating_point():  # floats may be activations of the last pass
        return _digest(value, True)
    code = getattr(value, "__code__", None)
    return None if code is None else f"{value.__qualname__}:{hash(code)}"


def _digest(tensor: Tensor, values: bool) -> str:
    """Shape and type of a tensor, and its values where they count and are known."""
    kind = f"{tuple(tensor.shape)}{tensor.dtype}"
    if not values or tensor.is_meta or tensor.layout is not torch.strided:
        return kind
    return f"{kind}{hash(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())}"
