"""When and how the passes over memory are compiled."""

import functools
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

COMPILE_FROM = 1 << 22  # prunable weights from which compiling pays off

Pass = Callable[..., Any]


@functools.cache
def can_compile(device: str) -> bool:
    """Whether `torch.compile` works for this kind of device here: tried once, on a tiny function."""
    if sys.platform == "win32" or (device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++")))):
        return False
    try:
        trial = torch.zeros(256, device=device)
        with warnings.catch_warnings():  # torch's own deprecation warnings must not fail the trial
            warnings.simplefilter("ignore")
            _compile(torch.Tensor.add_)(trial, 1)
    except Exception:  # a broken tool chain fails in many ways; each means that compiling does not work
        return False
    return bool(trial.sum().item() == trial.numel())


def worth_compiling(count: int, device: torch.device) -> bool:
    """Depends on size and platform alone, so that a resumed run takes the same path."""
    return count >= COMPILE_FROM and can_compile(device.type)


def _compile(function: Pass, *settings: object) -> Pass:
    """`function` with its first arguments fixed to `settings`, compiled."""

    def run(*arguments: Any) -> Any:
        return function(*settings, *arguments)

    # torch.compile limits how often a code object is compiled; a copy of it gives every pass a limit of its own.
    own = types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True)


compiled = functools.cache(_compile)  #: one kernel for each function and its settings
