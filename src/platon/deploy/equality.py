"""Whether two models compute the same, on small random inputs."""

from __future__ import annotations

import inspect
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.proof.call import mapped, short, tensors_in
from platon.engine.proof.replica import UnfitError
from platon.engine.proof.sample import CASES, Arguments, Case, attempts, sources


def check_same(model: nn.Module, other: nn.Module) -> None:
    """Refuse a model that differs from another by more than rounding; one that cannot be run is not compared."""
    largest = difference(model, other)
    if largest is not None and not largest <= _limit(model):
        again = difference(model, model)
        if again is not None and not again <= _limit(model):
            raise ValueError(
                f"{type(model).__name__} gives other outputs when it is run again on the same inputs, so it cannot be "
                "compared with a smaller one; it is not cut"
            )
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
            for case in CASES:
                for name, source in sources(model.eval()):
                    arguments = _compared(source, other.eval().get_submodule(name), case, found)
                    if arguments is not None:
                        if name:  # a wrapper may read more than the wrapped model's first output
                            _compare(model, other, _renamed(model, arguments), found)
                        break
            for name, source in sources(model):
                _compare_cached(source, other.get_submodule(name), found)
    finally:
        model.train(training[0])
        other.train(training[1])
    return max(found) if found else None


def _compared(model: nn.Module, other: nn.Module, case: Case, found: list[float]) -> Arguments | None:
    """The first arguments that the model takes, after a comparison on them."""
    with suppress(UnfitError):
        for arguments in attempts(model, case):
            if _compare(model, other, arguments, found):
                return arguments
    return None


def _compare(model: nn.Module, other: nn.Module, arguments: Arguments, found: list[float]) -> bool:
    """Note the difference of all outputs; False: the model does not take these arguments."""
    args, kwargs = mapped(arguments, lambda tensor: _placed(tensor, model))
    try:
        expected = _floats(model(*args, **kwargs))
    except Exception:  # whatever a model says to inputs that it does not take
        return False
    try:
        given = _floats(other(*args, **kwargs))
    except Exception as error:
        raise ValueError(f"cutting {type(model).__name__} would break it ({short(error)}); it is not cut") from error
    found += [_apart(a, b) for a, b in zip(expected, given, strict=True)]
    return True


def _compare_cached(model: Any, other: Any, found: list[float]) -> None:
    """The same for two passes with a cache, as in `generate`, where the model is a decoder of tokens."""
    if not getattr(model, "can_generate", lambda: False)() or getattr(model, "main_input_name", "") != "input_ids":
        return
    with suppress(UnfitError):
        for args, kwargs in attempts(model, CASES[1]):
            given = mapped((args, {**kwargs, "use_cache": True}), lambda tensor: _placed(tensor, model))
            try:
                model(*given[0], **given[1])
            except Exception:  # it takes other inputs
                continue
            expected = None
            with suppress(Exception):  # its cache is of another kind
                expected = _two_passes(model, *given)
            try:
                if expected is None:
                    other(*given[0], **given[1])
                else:
                    found.append(_apart(expected, _two_passes(other, *given)))
            except Exception as error:
                raise ValueError(
                    f"cutting {type(model).__name__} would break its cache ({short(error)}); it is not cut"
                ) from error
            if expected is not None:
                return


def _two_passes(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The logits of one more token after a first pass."""
    first = model(*args, **kwargs)
    key = "decoder_input_ids" if "decoder_input_ids" in kwargs else "input_ids"
    later = {name: value for name, value in kwargs.items() if "decoder" in name or name == "use_cache"}
    if key == "decoder_input_ids":
        later |= {name: value for name, value in kwargs.items() if name != key}
    elif "attention_mask" in kwargs:
        mask = kwargs["attention_mask"]
        later["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    later |= {key: kwargs[key][:, :1], "past_key_values": first.past_key_values}
    logits: Tensor = model(**later).logits
    return logits


def _renamed(model: nn.Module, arguments: Arguments) -> Arguments:
    """The arguments that the forward pass of a wrapper takes, if it calls them as the wrapped model does."""
    asked = inspect.signature(model.forward).parameters
    args, kwargs = arguments
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in asked.values())
    named = {name: value for name, value in kwargs.items() if name in asked or anything}
    if not any(isinstance(value, Tensor) for value in named.values()):  # one mapping or the tokens alone
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        args = (tensors,) if _takes_mapping(model) else tuple(tensors.values())[:1]
        named = {}
    return args, named


def _takes_mapping(model: nn.Module) -> bool:
    """Whether the forward pass reads a mapping of inputs, as a `SentenceTransformer` does."""
    first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    return first is not None and "dict" in str(first.annotation)


def _floats(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]


def _placed(tensor: Tensor, model: nn.Module) -> Tensor:
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)


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
