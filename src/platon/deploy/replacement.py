"""The modules of a model that others took the place of: described for a manifest, and put in place again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from platon.deploy import sparse_kernel
from platon.deploy.embedding import PackedEmbedding
from platon.deploy.layer import SparseLinear
from platon.deploy.packed import NOTHING, Description, Packed, Shapes
from platon.deploy.sparse_fusion import fuse
from platon.engine.topology import is_conv1d

#: by the name in a manifest
KINDS: dict[str, type[Packed]] = {kind.kind: kind for kind in (SparseLinear, PackedEmbedding)}


def packed(model: nn.Module) -> dict[str, Packed]:
    """The packed modules of a model as they are stored, by name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Packed):
            found[name] = module.portable()
            problem = found[name].problem()
            if problem:
                raise ValueError(f"the sparse layer {name!r} cannot be saved: {problem}")
    return found


def describe(model: nn.Module, dense: nn.Module, modules: Mapping[str, Packed]) -> dict[str, dict[str, Any]]:
    """The modules that differ from those of the dense model: packed ones, and those that became nothing."""
    original = dict(dense.named_modules())
    gone = {
        name: {"kind": NOTHING}
        for name, module in model.named_modules()
        if type(module) is nn.Identity and type(original.get(name)) is not nn.Identity
    }
    return {name: {"kind": module.kind, **module.description()} for name, module in modules.items()} | gone


def arrays(modules: Mapping[str, Packed]) -> dict[str, Tensor]:
    """The buffers of packed modules, by their names in the model."""
    return {f"{name}.{key}": array for name, module in modules.items() for key, array in module.named_buffers()}


def may_be_rounded(modules: Mapping[str, Packed]) -> frozenset[str]:
    """The names of the buffers that may be stored in half precision."""
    return frozenset(f"{name}.{key}" for name, module in modules.items() for key in module.rounded)


def dense_shapes(model: nn.Module, described: Mapping[str, Description], shapes: Shapes) -> Shapes:
    """The shapes of the model's tensors with those of the dense modules in place of packed ones."""
    dense, inside, modules = dict(shapes), _by_module(shapes), dict(model.named_modules())
    for name, one in described.items():
        kind, there = _kind(name, one), inside.get(name, {})
        if kind is None:
            continue
        original = _named(modules, name)
        for key in there:
            dense.pop(f"{name}.{key}")
        for key, shape in kind.replaced(one, there).items():
            dense[f"{name}.{key}"] = shape[::-1] if is_conv1d(original) else shape
    return dense


def unfilled(described: Mapping[str, Description], shapes: Shapes) -> dict[str, nn.Module]:
    """Packed modules without contents, and nothing where there was an activation, by name."""
    inside = _by_module(shapes)
    made: dict[str, nn.Module] = {}
    for name, one in described.items():
        kind = _kind(name, one)
        made[name] = nn.Identity() if kind is None else kind.unfilled(one, inside.get(name, {}))
    return made


def install(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Put modules into a newly built model, by name."""
    there = dict(model.named_modules())
    skip_fast_paths(there.values())
    _replace(there.values(), {_named(there, name): module for name, module in modules.items()})


def skip_fast_paths(modules: Iterable[nn.Module]) -> None:
    """Turn off the fast path of `nn.TransformerEncoderLayer`, which reads the dense weights of its layers."""
    for module in modules:
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0


def finish(model: nn.Module) -> None:
    """Check the contents of all packed modules, and put in place what computes the same on this machine.

    The model is in evaluation mode.
    """
    new: dict[nn.Module, nn.Module] = {}
    there = dict(model.named_modules())
    for name, module in there.items():
        if isinstance(module, Packed):
            problem = module.checked()
            if problem:
                raise ValueError(f"the weights are damaged: in the sparse layer {name!r}, {problem}")
            runnable = module.runnable()
            if runnable is not module:
                new[module] = runnable
    _replace(there.values(), new)
    fuse(model.requires_grad_(False))
    found = sparse_kernel.find()
    if new and isinstance(found, str):
        warnings.warn(f"no compiled sparse kernel: {found}; torch.sparse takes its place and gains less", stacklevel=3)


def _kind(name: str, described: Description) -> type[Packed] | None:
    """The class of a packed module, `None` for nothing."""
    kind = described.get("kind")
    if kind == NOTHING:
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(
            f"the manifest has a module {name!r} of the kind {kind!r}, this version reads {', '.join(KINDS)}"
        )
    return KINDS[kind]


def _by_module(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of the tensors of each module, by their names in it."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        module, _, key = name.rpartition(".")
        found.setdefault(module, {})[key] = shape
    return found


def _replace(modules: Iterable[nn.Module], new: Mapping[nn.Module, nn.Module]) -> None:
    """Put new modules in the places of old ones inside these modules."""
    for module in modules if new else ():
        for key, child in module._modules.items():
            if child is not None and child in new:
                module._modules[key] = new[child]


def _named(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    if name not in modules:
        raise ValueError(f"the manifest does not fit: the model has no layer {name!r}")
    return modules[name]
