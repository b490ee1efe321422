"""Builds a model from its class and configuration, without memory for the weights, and within limits.

A configuration may come from anyone. It is compared with the tensors that are there before anything is built that takes
memory or time: a few bytes of JSON can ask for a billion labels.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from platon.deploy import rebuild, replacement
from platon.deploy.manifest import CONFIG, MANIFEST, Manifest, TensorType, read_json
from platon.deploy.model_class import model_class
from platon.deploy.recorder import Recorder
from platon.engine.proof.discovery import heads

# Keys of a configuration that count something which the model has at least one tensor, row or column of.
_COUNTS = re.compile(r"^(num|n)_|_(layers?|heads|labels|groups|experts|blocks|depths?)$|^(depths?|layers)$")
_FEW = 1024  # counts up to here cost nothing
_BUFFER_BYTES = 64 << 20  # of buffers that are computed, or as many as the weights take
# Which implementation of attention or experts to use: these keys can name code on a hub.
_IMPLEMENTATION = re.compile(r"^_?(attn|experts)_implementation")


class Built(NamedTuple):
    """A model as the manifest describes it."""

    model: PreTrainedModel
    as_configured: bool  # whether the configuration alone gives the same shapes


def build(manifest: Manifest, folder: Path) -> Built:
    """The model of a folder, with its shapes and sparse layers; the weights have no memory yet.

    Raises:
        ValueError: the class or the configuration is damaged, or the model is not the one of the manifest.
    """
    config = _read_config(manifest, folder)
    # First on the meta device, where a tensor of any size takes no memory: shapes alone decide whether it fits.
    with torch.device("meta"), Recorder() as recorded:
        outline = _construct(manifest, config)
    as_configured = _cut(outline, manifest)
    check_fit(manifest, outline, f"the {CONFIG} beside it")
    computed = _check_buffers(manifest, outline)
    # Buffers that are not stored are computed while the model is built.
    if as_configured and recorded.fill(outline, computed):
        return Built(outline, as_configured)
    # Where it is not certain that they are all that is missing, the model is built for real; parameters stay empty.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = _construct(manifest, config)
    if as_configured:
        model.tie_weights()
        made = dict(outline.named_modules())
        replacement.install(model, {name: made[name] for name in manifest.replaced})
    else:
        _cut(model, manifest)
    return Built(model, as_configured)


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers under their first names; tied ones appear once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def cut_to_manifest(model: PreTrainedModel, manifest: Manifest, packed: Mapping[str, nn.Module] | None = None) -> bool:
    """Give a newly built model the shapes of the manifest, and its packed modules, which are made unless given.

    Returns:
        Whether the configuration alone gives these shapes.
    """
    shapes = {name: one.shape for name, one in manifest.tensors.items()}
    as_configured = rebuild.cut_to(model, replacement.dense_shapes(model, manifest.replaced, shapes))
    replacement.install(model, replacement.unfilled(manifest.replaced, shapes))
    return as_configured


def count_heads(model: nn.Module) -> dict[str, int]:
    """The number of heads, or of groups that share a key, of each attention, where that is known."""
    try:
        return {family.name: family.count for family in heads(model)}
    except ValueError:
        return {}


def check_heads(manifest: Manifest, model: nn.Module) -> None:
    """Refuse a model with other numbers of heads: the same matrices can be divided into fewer or more.

    For older folders. In newer ones the checksum of the configuration says so.
    """
    if manifest.heads is None and manifest.checksums:
        return
    differ = not isinstance(manifest.heads, dict)
    if manifest.heads and not differ:
        counted = count_heads(model)
        # A single one was written where all query heads share a key; there, each of them counts now.
        differ = any(count not in (1, counted.get(name)) for name, count in manifest.heads.items())
    if differ:
        raise ValueError(f"{MANIFEST} does not fit the {CONFIG} beside it: the numbers of heads differ")


def check_fit(manifest: Manifest, model: nn.Module, other: str) -> None:
    """Refuse a manifest whose tensors are not those of the model; `other` is where the model comes from."""
    built = stored_tensors(model)
    for name in sorted(manifest.tensors.keys() | built.keys()):
        wanted, there = manifest.tensors.get(name), built.get(name)
        if wanted is None or there is None or wanted.shape != there.shape:
            shown = ["missing" if one is None else str(list(one.shape)) for one in (wanted, there)]
            raise ValueError(
                f"the manifest does not fit {other}: {name!r} is {shown[0]} in the one and {shown[1]} in the other"
            )
        if not _same_kind(wanted.dtype, there.dtype):
            raise ValueError(
                f"the manifest does not fit {other}: {name!r} is {wanted} in the one and {TensorType.of(there)} in the "
                "other"
            )


def _same_kind(one: torch.dtype, other: torch.dtype) -> bool:
    """Floating-point numbers may have any precision; other types have to be the same."""
    return one == other or (one.is_floating_point and other.is_floating_point)


def _construct(manifest: Manifest, config: Any) -> PreTrainedModel:
    try:
        with _limited(len(manifest.tensors)), no_init_weights():  # the weights come from the file
            model: PreTrainedModel = model_class(manifest.model_class)(config)
    except _TooLarge:
        raise ValueError(
            f"{MANIFEST} does not fit the {CONFIG} beside it: it describes a model of more tensors than the "
            f"{len(manifest.tensors)} that are there"
        ) from None
    except Exception as error:  # a class of transformers checks its configuration in many ways, or not at all
        raise _damaged(manifest, error) from error
    return model


def _cut(model: PreTrainedModel, manifest: Manifest) -> bool:
    try:
        model.tie_weights()  # emptied parameters are no longer tied
        return cut_to_manifest(model, manifest)
    except ValueError:
        raise
    except Exception as error:  # a number of heads that divides nothing, or sizes that contradict each other
        raise _damaged(manifest, error) from error


def _damaged(manifest: Manifest, error: Exception) -> ValueError:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ValueError(f"the {CONFIG} is damaged: no {manifest.model_class} can be built from it ({said})")


class _TooLarge(Exception):  # noqa: N818  # never leaves this file
    pass


@contextmanager
def _limited(tensors: int) -> Iterator[None]:
    """Stop the construction of a model with far more parameters or modules than there are tensors."""
    thread, parameters, modules = threading.get_ident(), 4 * tensors + 100, 50 * tensors + 1000

    def count_parameter(*_: Any) -> None:
        nonlocal parameters
        parameters -= threading.get_ident() == thread  # the hooks are called for all threads
        if parameters < 0:
            raise _TooLarge

    def count_module(*_: Any) -> None:
        nonlocal modules
        modules -= threading.get_ident() == thread
        if modules < 0:
            raise _TooLarge

    hooks = (
        torch_module.register_module_parameter_registration_hook(count_parameter),
        torch_module.register_module_module_registration_hook(count_module),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_buffers(manifest: Manifest, outline: nn.Module) -> Collection[str]:
    """The names of the computed buffers, once it is clear that they take not far more memory than the weights."""
    computed = {name: one for name, one in outline.named_buffers() if name not in manifest.tensors}
    weights = sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in manifest.tensors.values())
    if sum(buffer.nbytes for buffer in computed.values()) > max(_BUFFER_BYTES, weights):
        name = max(computed, key=lambda name: computed[name].nbytes)
        raise ValueError(
            f"{MANIFEST} does not fit the {CONFIG} beside it: the buffer {name!r} would have the shape "
            f"{list(computed[name].shape)}, for weights of {weights} bytes"
        )
    for name, dtype in manifest.buffers.items():
        if name in computed and not _same_kind(dtype, computed[name].dtype):
            raise ValueError(
                f"{MANIFEST} is damaged: it gives the buffer {name!r} the type {dtype}, which is {computed[name].dtype}"
            )
    return computed.keys()


def _read_config(manifest: Manifest, folder: Path) -> Any:
    kind, config = model_class(manifest.model_class).config_class, read_json(folder / CONFIG)
    if config.get("model_type") != kind.model_type:
        raise ValueError(
            f"{MANIFEST} does not fit {CONFIG} in {str(folder)!r}: the one names {manifest.model_class}, the other is "
            f"of {config.get('model_type')!r}"
        )
    sizes = [length for one in manifest.tensors.values() for length in one.shape]
    _check_counts(config, max([_FEW, len(manifest.tensors), *sizes]), folder)
    _check_types(config, kind, folder)
    try:
        made = kind.from_dict(_without_implementations(config))
    except Exception as error:  # transformers raises exceptions of many kinds
        raise ValueError(f"{str(folder / CONFIG)!r} is damaged: {' '.join(str(error).split())}") from error
    if manifest.attention is not None:
        made._attn_implementation = manifest.attention
    return made


def _check_counts(value: Any, limit: int, folder: Path, key: str = "") -> None:
    """Refuse numbers of layers, labels and the like that are larger than every size of a tensor that is there."""
    if isinstance(value, Mapping):
        for inner, one in value.items():
            _check_counts(one, limit, folder, inner)
    elif isinstance(value, list):
        for one in value:
            _check_counts(one, limit, folder, key)
    elif isinstance(value, int | float) and _COUNTS.search(key) and not abs(value) <= limit:
        raise ValueError(
            f"{MANIFEST} does not fit {CONFIG} in {str(folder)!r}: {key!r} is {value}, and no tensor that is there is "
            f"larger than {limit}"
        )


def _check_types(config: Mapping[str, Any], kind: Any, folder: Path) -> None:
    """Refuse text or an object where a number belongs: transformers takes some, and the model fails when it runs."""
    try:
        defaults = kind().to_dict()
    except Exception:  # a class that cannot be made without arguments has no defaults to compare with
        return
    for key, value in config.items():
        if isinstance(defaults.get(key), int | float) and value is not None and not _is_numeric(value):
            raise ValueError(
                f"{str(folder / CONFIG)!r} is damaged: {key!r} is {str(value)[:50]!r}, it has to be a number"
            )


def _is_numeric(value: Any) -> bool:
    """Whether this is a number or, as some sizes of images are, a list of numbers."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, int | float) for one in value)
    return isinstance(value, int | float)


def _without_implementations(value: Any) -> Any:
    """A configuration without the keys that choose an implementation, at any depth."""
    if isinstance(value, dict):
        return {
            key: _without_implementations(one) for key, one in value.items() if not _IMPLEMENTATION.search(str(key))
        }
    return [_without_implementations(one) for one in value] if isinstance(value, list) else value
