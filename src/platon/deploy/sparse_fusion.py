"""Finds what the kernel can compute in one call: sparse layers that follow each other, and sums and norms after them.

What a module computes is a guess from its submodules, which a trial on random tokens has to confirm. What is not
confirmed stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy.layer import SparseLinear
from platon.deploy.sparse_sum import SparseSum
from platon.engine.proof.call import run, tensors_in
from platon.engine.proof.sample import CASES, sources

_SHAPE = (2, 3)  # batch and length of the tokens of a trial


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Let the sparse layers of a model in eval mode compute together what belongs together."""
    if not any(isinstance(module, SparseLinear) for module in model.modules()):
        return
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        _add_sums(model)
        _chain_layers(model)
        _introduce_siblings(model)


# --- sums and norms ---------------------------------------------------------------------------------------------------


def _add_sums(model: nn.Module) -> None:
    """Replace modules that compute norm(layer(x) + added) or layer(x) + added."""
    new = {module: found for module in model.modules() if (found := _as_sum(module)) is not None}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in new:
                module._modules[name] = new[child]


def _as_sum(module: nn.Module) -> SparseSum | None:
    children = {
        name: child for name, child in module.named_children() if not isinstance(child, nn.Dropout | nn.Identity)
    }
    layers = [child for child in children.values() if isinstance(child, SparseLinear)]
    norms = [child for child in children.values() if type(child) is nn.LayerNorm]
    if isinstance(module, SparseSum) or len(layers) != 1 or len(norms) > 1 or len(children) > len(layers + norms):
        return None
    names = list(inspect.signature(module.forward).parameters)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if len(names) != 2 or own or any(_is_hooked(one) for one in (module, *children.values())):
        return None
    (layer,), (width, rows) = layers, (layers[0].in_features, layers[0].out_features)
    x, added = _tokens(width, 0), _tokens(rows, 1)
    expected = layer(x) + added
    if norms:
        if norms[0].normalized_shape != (rows,):
            return None
        expected = norms[0](expected)
    return SparseSum(children, names) if _agrees(lambda: module(x.clone(), added.clone()), [expected]) else None


# --- layers that follow each other ------------------------------------------------------------------------------------


def _chain_layers(model: nn.Module) -> None:
    """Where a layer with an activation gives its output to the next layer and nowhere else, the next computes both."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    tried: set[SparseLinear] = set()
    # Small modules first: the smallest one that holds both layers says with least work whether they follow each other.
    for parent in sorted(model.modules(), key=lambda module: sum(1 for _ in module.modules())):
        layers = [module for module in parent.modules() if isinstance(module, SparseLinear)]
        for first, last in itertools.pairwise(layers):
            fits = first.out_features == last.in_features and first.activation != "none" and last not in tried
            if fits and uses[id(first)] == uses[id(last)] == 1 and not (_is_hooked(first) or _is_hooked(last)):
                tried.add(last)
                _chain(parent, first, last)


def _chain(parent: nn.Module, first: SparseLinear, last: SparseLinear) -> None:
    """Let `last` compute `first` too, if the module that holds both computes the same then."""
    x = _tokens((*first.before, first)[0].in_features, 0)
    with contextlib.suppress(Exception):  # it takes other arguments
        expected = [tensor.clone() for tensor in tensors_in(parent(x.clone()))]
        first.is_deferred, last.before = True, (*first.before, first)
        if not (expected and _agrees(lambda: parent(x.clone()), expected)):
            first.is_deferred, last.before = False, ()


# --- layers that read the same tokens ---------------------------------------------------------------------------------


def _introduce_siblings(model: nn.Module) -> None:
    """Assume that the layers of a module read the same tokens, and run the model once: it shows which ones do."""
    for parent in model.modules():
        layers = [child for child in parent.children() if isinstance(child, SparseLinear) and not child.before]
        layers = [layer for layer in layers if not layer.is_deferred and not _is_hooked(layer)]
        for width in dict.fromkeys(layer.in_features for layer in layers):
            leader, *others = (layer for layer in layers if layer.in_features == width)
            leader.siblings = tuple(others[: SparseLinear.most_siblings])
    for _, source in sources(model):
        with contextlib.suppress(Exception):  # no inputs are known for it
            for _ in range(3):  # a layer that is given other tokens leaves its siblings at the next call
                run(source, CASES[0])
        break


def _tokens(width: int, seed: int) -> Tensor:
    return torch.randn(*_SHAPE, width, generator=torch.Generator().manual_seed(seed))


def _agrees(compute: Callable[[], Any], expected: list[Tensor]) -> bool:
    """Whether something computes these tensors, within rounding."""
    try:
        found = list(tensors_in(compute()))
    except Exception:  # it takes other arguments
        return False
    return len(found) == len(expected) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True)
    )


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
