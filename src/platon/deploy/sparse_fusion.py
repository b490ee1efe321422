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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from platon.deploy.attention import use_kernel
from platon.deploy.dense_layer import read_faster
from platon.deploy.encoder_layer import shorten_layers
from platon.deploy.encoder_stack import join_layers
from platon.deploy.layer import SparseLinear
from platon.deploy.outline import is_hooked, outline
from platon.deploy.self_attention import attend_at_once
from platon.deploy.sparse_sum import SparseSum
from platon.engine.proof.call import run, tensors_in
from platon.engine.proof.sample import CASES, sources

_SHAPE = (2, 3)  # batch and length of the tokens of a trial


Verdicts = dict[Any, Any]  # what trials found, by what tells modules apart; blocks are many and alike


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
        use_kernel(model)
        shorten_layers(model)
        join_layers(model)
        attend_at_once(model)
        read_faster(model)


# --- sums and norms ---------------------------------------------------------------------------------------------------


def _add_sums(model: nn.Module) -> None:
    """Replace modules that compute norm(layer(x) + added) or layer(x) + added."""
    verdicts: Verdicts = {}
    new = {module: found for module in model.modules() if (found := _as_sum(module, verdicts)) is not None}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in new:
                module._modules[name] = new[child]


def _as_sum(module: nn.Module, verdicts: Verdicts) -> SparseSum | None:
    if not any(isinstance(child, SparseLinear) for child in module._modules.values()):
        return None
    children = {
        name: child
        for name, child in module._modules.items()
        if child is not None and not isinstance(child, nn.Dropout | nn.Identity)
    }
    layers = [child for child in children.values() if isinstance(child, SparseLinear)]
    norms = [child for child in children.values() if type(child) is nn.LayerNorm]
    if isinstance(module, SparseSum) or len(layers) != 1 or len(norms) > 1 or len(children) > len(layers + norms):
        return None
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if own or any(is_hooked(one) for one in (module, *children.values())):
        return None
    key = outline(module)
    if key not in verdicts:
        names = list(inspect.signature(module.forward).parameters)
        verdicts[key] = names if len(names) == 2 and _is_sum(module, layers[0], *norms) else None
    return SparseSum(children, verdicts[key]) if verdicts[key] else None


def _is_sum(module: nn.Module, layer: SparseLinear, norm: nn.LayerNorm | None = None) -> bool:
    """Whether the module computes norm(layer(x) + added), without a norm if there is none."""
    x, added = _tokens(layer.in_features, 0), _tokens(layer.out_features, 1)
    expected = layer(x) + added
    if norm is not None:
        if norm.normalized_shape != (layer.out_features,):
            return False
        expected = norm(expected)
    return _agrees(lambda: module(x.clone(), added.clone()), [expected])


# --- layers that follow each other ------------------------------------------------------------------------------------


def _chain_layers(model: nn.Module) -> None:
    """Where a layer with an activation gives its output to the next layer and nowhere else, the next computes both."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    tried: set[SparseLinear] = set()
    verdicts: Verdicts = {}
    for parent, layers in _inside_out(model):
        for place, (first, last) in enumerate(itertools.pairwise(layers)):
            fits = first.out_features == last.in_features and first.activation != "none" and last not in tried
            if fits and uses[id(first)] == uses[id(last)] == 1 and not (is_hooked(first) or is_hooked(last)):
                tried.add(last)
                key = (outline(parent), place)
                if key not in verdicts:
                    verdicts[key] = _follows(parent, first, last)
                if verdicts[key]:
                    first.is_deferred, last.before = True, (*first.before, first)


def _inside_out(model: nn.Module) -> Iterator[tuple[nn.Module, list[SparseLinear]]]:
    """Each module with the sparse layers in it, after those inside it: the smallest one that holds two layers says with
    least work whether they follow each other.
    """
    held: dict[nn.Module, list[SparseLinear]] = {}
    for module in reversed(list(model.modules())):
        found = [module] if isinstance(module, SparseLinear) else []
        for child in module.children():
            found += held.get(child, [])  # none yet of a module that is used twice, which is left alone
        held[module] = list(dict.fromkeys(found))
        yield module, held[module]


def _follows(parent: nn.Module, first: SparseLinear, last: SparseLinear) -> bool:
    """Whether the module that holds both layers computes the same if `last` computes `first` too."""
    x = _tokens((*first.before, first)[0].in_features, 0)
    try:
        expected = [tensor.clone() for tensor in tensors_in(parent(x.clone()))]
        first.is_deferred, last.before = True, (*first.before, first)
        return bool(expected) and _agrees(lambda: parent(x.clone()), expected)
    except Exception:  # it takes other arguments
        return False
    finally:
        first.is_deferred, last.before = False, ()


# --- layers that read the same tokens ---------------------------------------------------------------------------------

Siblings = dict[str, tuple[list[str], bool]]  # of a layer, by name: its siblings, and whether it is one


def _introduce_siblings(model: nn.Module) -> None:
    """Assume that the layers of a module read the same tokens, and run it: that shows which ones do."""
    verdicts: Verdicts = {}
    untried: list[Mapping[str, SparseLinear]] = []
    for parent in model.modules():
        layers = _readers(parent)
        if len({layer.in_features for layer in layers.values()}) == len(layers):
            continue  # none has the same width as another one
        key = outline(parent)
        if key not in verdicts:
            verdicts[key] = _siblings(parent, layers)
        for name, (siblings, is_sibling) in verdicts[key].items():
            layers[name].siblings, layers[name].is_sibling = tuple(layers[one] for one in siblings), is_sibling
        untried += () if verdicts[key] else [layers]
    if untried:  # they need more than tokens, which the model gives them
        for group in untried:
            _assume(group)
        _, source = next(sources(model))
        with contextlib.suppress(Exception):  # no inputs are known for it
            _repeat(lambda: run(source, CASES[0]), [layer for group in untried for layer in group.values()])


def _readers(parent: nn.Module) -> dict[str, SparseLinear]:
    """The layers of a module that may compute with others, by name."""
    layers = {name: child for name, child in parent.named_children() if isinstance(child, SparseLinear)}
    return {name: one for name, one in layers.items() if not (one.before or one.is_deferred or is_hooked(one))}


def _assume(layers: Mapping[str, SparseLinear]) -> None:
    """Let all layers of the same width be siblings."""
    for width in dict.fromkeys(layer.in_features for layer in layers.values()):
        leader, *others = (layer for layer in layers.values() if layer.in_features == width)
        leader.siblings = tuple(others[: SparseLinear.most_siblings])


def _siblings(parent: nn.Module, layers: Mapping[str, SparseLinear]) -> Siblings:
    """The siblings among the layers of a module that is run on tokens; none if it takes other arguments."""
    _assume(layers)
    first, names = next(iter(layers.values())), {id(layer): name for name, layer in layers.items()}
    try:
        _repeat(lambda: parent(_tokens(first.in_features, 0)), list(layers.values()))
    except Exception:  # it takes other arguments
        for layer in layers.values():
            layer.siblings, layer.is_sibling, layer._held = (), False, None
        return {}
    return {name: ([names[id(one)] for one in layer.siblings], layer.is_sibling) for name, layer in layers.items()}


def _repeat(call: Callable[[], Any], layers: Sequence[SparseLinear]) -> None:
    """Call until no layer leaves its siblings any more; one that is given other tokens does so at the next call."""
    for _ in range(3):
        call()
        if all(layer._held is None for layer in layers):
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
