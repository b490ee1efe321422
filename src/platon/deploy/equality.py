"""Whether two models compute the same, on small random inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.replica import UnfitError
from platon.engine.sample import LENGTHS, Arguments, attempts, mapped, short, sources, tensors_in


def check_same(model: nn.Module, other: nn.Module) -> None:
    """Refuse a model that differs from another by more than rounding; one that cannot be run is not compared."""
    largest = difference(model, other)
    if largest is not None and not largest <= _limit(model):
        raise ValueError(
            f"cutting {type(model).__name__} would change its outputs by {largest:.1g} of the largest; it is not cut. "
            "Something outside its blocks reads what was removed"
        )


def difference(model: nn.Module, other: nn.Module) -> float | None:
    """The largest of any output, as a share of the largest output; `None`: no inputs are known for the model."""
    training = model.training, other.training
    found: list[float] = []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, source in sources(model.eval()):
                ours = _run(source, other.eval().get_submodule(name))
                if ours is not None:
                    found.append(ours)
                    break
    finally:
        model.train(training[0])
        other.train(training[1])
    return max(found) if found else None


def _run(model: nn.Module, other: nn.Module) -> float | None:
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return None

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(parameter.device, parameter.dtype if tensor.is_floating_point() else None)

    for args, kwargs in _inputs(model):
        args, kwargs = mapped((args, kwargs), placed)
        try:
            expected = [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]
        except Exception:  # whatever a model says to inputs that it does not take
            continue
        try:
            found = [t for t in tensors_in(other(*args, **kwargs)) if t.is_floating_point()]
        except Exception as error:
            raise ValueError(
                f"cutting {type(model).__name__} would break it ({short(error)}); it is not cut"
            ) from error
        return max((_apart(a, b) for a, b in zip(expected, found, strict=True)), default=0.0)
    return None


def _inputs(model: nn.Module) -> Iterator[Arguments]:
    with suppress(UnfitError):
        yield from attempts(model, LENGTHS[1])


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:  # a cache of keys, maps of attention: fewer heads
        return 0.0 if a.ndim == b.ndim == 4 else float("inf")
    if not a.numel():
        return 0.0
    a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
    return float((a - b).abs().max() / a.abs().max().clamp(min=1.0))


def _limit(model: nn.Module) -> float:
    """A thousand roundings of the model's precision."""
    dtypes: set[Any] = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return min(0.1, 1000 * max(torch.finfo(dtype).eps for dtype in dtypes))
