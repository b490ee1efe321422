"""Activations that become part of the sparse layer before them, so that what it makes goes through memory once."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from platon.deploy.outline import outline
from platon.deploy.sparse_operator import ACTIVATE
from platon.engine.proof.call import tensors_in
from platon.engine.proof.linear import width_in

_PROBE = torch.linspace(-8, 8, 257)
_SHAPES = ((3,), (2, 6))  # of the tokens in a trial: experts take a list of tokens, a module with attention takes rows


def followers(model: nn.Module, layers: Collection[nn.Module]) -> dict[nn.Module, tuple[nn.Module, str]]:
    """The activation that follows a layer and nothing else, for each of the layers with one that the kernel computes.

    Candidates are children of the same module. A trial on random tokens then has to show that the module computes the
    same when the activation is computed by the layer; one trial tells for all modules that are alike but for their
    numbers.
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    wanted = set(map(id, layers))
    groups: dict[Hashable, list[_Candidate]] = {}
    for module in model.modules():
        held = {name: child for name, child in module.named_children() if uses[id(child)] == 1}
        linears = {name: child for name, child in held.items() if id(child) in wanted}
        acts = {name: kind for name, child in held.items() if linears and (kind := _name_of(child)) is not None}
        if acts:
            groups.setdefault((outline(module), *linears), []).append(_Candidate(module, linears, acts))
    found: dict[nn.Module, tuple[nn.Module, str]] = {}
    for alike in groups.values():
        fullest = max(alike, key=_Candidate.fullness) if len(alike) > 1 else alike[0]
        for layer, activation in fullest.pairs():
            for one in alike:
                found[one.linears[layer]] = one.module.get_submodule(activation), one.acts[activation]
    return found


class _Candidate(NamedTuple):
    """A module with linear layers and activations, by name; of these what they are called in the kernel."""

    module: nn.Module
    linears: dict[str, nn.Module]
    acts: dict[str, str]

    def fullness(self) -> int:
        """How many weights the emptiest layer has: behind an empty one a trial shows nothing."""
        return min(int(layer.get_parameter("weight").count_nonzero()) for layer in self.linears.values())

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Each layer that an activation follows, with it."""
        left = list(self.acts)
        for layer in self.linears:
            act = next((act for act in left if _follows(self.module, layer, act)), None)
            if act is not None:
                left.remove(act)
                yield layer, act


def _name_of(module: nn.Module) -> str | None:
    """The name of the activation that a module computes, found by trying it on numbers; `None`: another one."""
    if next(iter(_tensors(module)), None) is not None:
        return None
    try:
        out = module(_PROBE.clone())
    except Exception:  # not an activation: it takes another kind of input
        return None
    if not isinstance(out, Tensor) or out.shape != _PROBE.shape:
        return None
    known = (name for name in ("gelu", "gelu_tanh", "relu") if torch.allclose(out, ACTIVATE[name](_PROBE), 1e-5, 1e-6))
    return next(known, None)


def _follows(module: nn.Module, layer: str, activation: str) -> bool:
    """Whether a module computes the same if one of its layers computes the activation, and it matters that one does."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in _tensors(module)}
    trial = copy.deepcopy(module, shared).eval()  # a copy, so that the model stays in its mode; the weights are shared
    act, first = trial._modules[activation], trial._modules[layer]
    assert act is not None
    assert first is not None
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, width_in(first), generator=random) for shape in _SHAPES]
    runs = [(x, want) for x in inputs if (want := _outputs(trial, x))]
    trial._modules[activation] = nn.Identity()
    # Where a module holds little else, the layer after it may be empty, and then nothing matters.
    others = [child for child in trial._modules.values() if not isinstance(child, nn.Dropout | nn.Identity)]
    matters = len(others) <= 2 or not all(_is_same(_outputs(trial, x), want) for x, want in runs)
    first.register_forward_hook(lambda own, args, out: act(out))
    return bool(runs) and matters and all(_is_same(_outputs(trial, x), want) for x, want in runs)


def _outputs(module: nn.Module, x: Tensor) -> list[Tensor]:
    """What a module makes of tokens; nothing if it takes other arguments."""
    try:
        return [tensor.clone() for tensor in tensors_in(module(x.clone()))]
    except Exception:  # whatever it says
        return []


def _is_same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(
        a.shape == b.shape and torch.allclose(a, b, 1e-5, 1e-6) for a, b in zip(got, want, strict=True)
    )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
