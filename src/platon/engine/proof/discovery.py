"""The heads and the feed-forward neurons of a model: found by structure, proved by a trial.

For each class and configuration of block, one copy with random weights is run on small random inputs: `hypothesis` says
how the units may lie in it, `trial` proves or refuses that. No architecture is known by name.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from platon.engine.proof.attention import become_fewer
from platon.engine.proof.call import Call, record_blocks, short, tensors_in
from platon.engine.proof.hypothesis import hypotheses
from platon.engine.proof.influence import matrices_of
from platon.engine.proof.linear import inputs_of
from platon.engine.proof.pattern import Pattern
from platon.engine.proof.replica import Pool, UnfitError, refill, replicate, signature
from platon.engine.proof.sample import CASES, sources
from platon.engine.proof.trace import Sketch, steady
from platon.engine.proof.trial import Trial
from platon.engine.slices import Group, Index, Slice
from platon.engine.topology import blocks, weights_of


@dataclass(frozen=True)
class Finding:
    """What is known about blocks of one class and configuration.

    Args:
        patterns: proved.
        refusals: matrices in no proved group, by name from the block, and why.
        calls: what a block is called with.
    """

    patterns: tuple[Pattern, ...]
    refusals: dict[str, str]
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class ProvedGroup:
    """A proved pattern in one block of a model: heads of one attention, or neurons of one feed-forward."""

    block: str  # dotted name
    pattern: Pattern

    @property
    def name(self) -> str:
        """Of the module that the group is named after."""
        return ".".join(filter(None, (self.block, self.pattern.module)))


_KNOWN: dict[str, Finding] = {}


def heads(model: nn.Module) -> list[Group]:
    """The attention heads, a group for each attention: the query, key, value and output slices of one head.

    Where several query heads share a key and a value, they are one unit with them. Frozen matrices are here too.
    """
    return _groups(model, "heads")


def neurons(model: nn.Module) -> list[Group]:
    """The hidden features of the feed-forwards, a group for each: what writes one and what reads it.

    Frozen matrices are here too.
    """
    return _groups(model, "neurons")


def proved_groups(model: nn.Module) -> list[ProvedGroup]:
    """The proved groups of all blocks, in model order."""
    return [ProvedGroup(name, pattern) for name, finding in study(model).items() for pattern in finding.patterns]


def refusals(model: nn.Module) -> dict[str, str]:
    """The matrices of the blocks that are in no proved group, and why."""
    return {f"{name}.{path}": why for name, one in study(model).items() for path, why in one.refusals.items()}


def proved(model: nn.Module) -> dict[str, Finding]:
    """What `study` finds; refused where no block has a proved group."""
    found = study(model)
    if not any(finding.patterns for finding in found.values()):
        raise ValueError(_refusal(model, "heads or neurons"))
    return found


def _groups(model: nn.Module, kind: str) -> list[Group]:
    found = [group_of(model, group) for group in proved_groups(model) if group.pattern.kind == kind]
    if not found:
        raise ValueError(_refusal(model, kind))
    return found


def group_of(model: nn.Module, group: ProvedGroup) -> Group:
    """The group with the model's own matrices."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    block = model.get_submodule(group.block)
    slices = []
    for side in group.pattern.matrices:
        matrix = block.get_parameter(side.path)
        unit = side.unit
        if side is group.pattern.reader:
            unit = unit[inputs_of(block.get_submodule(side.module))]
        index = Index(unit, group.pattern.count)
        slices.append(Slice(names[id(matrix)], matrix, **({"rows": index} if side.dim == 0 else {"columns": index})))
    return Group(group.name, group.pattern.count, tuple(slices))


def _refusal(model: nn.Module, kind: str) -> str:
    name = type(model).__name__
    there = blocks(model)
    if not there:
        return (
            f"the heads and neurons of {name} are not known: it has no transformer blocks, that is, no list of modules "
            "that each hold attention and a feed-forward"
        )
    why = refusals(model)
    texts: dict[str, list[str]] = {}
    for path, text in why.items():
        texts.setdefault(text, []).append(path)
    said = "; ".join(f"{_listed(paths)}: {text}" for text, paths in list(texts.items())[:3])
    reasons = said or "its blocks have none"
    return f"the heads and neurons of {name} are not known: no {kind} could be proved ({reasons})"


def _listed(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def remember(block: nn.Module, finding: Finding) -> None:
    """Note what is known about a block that was cut, so that it need not be tried again."""
    _KNOWN[signature(block)] = finding


def study(model: nn.Module) -> dict[str, Finding]:
    """What is known about each block, by its name; blocks of a new class or configuration are tried."""
    there = blocks(model)
    _refuse_shared(model, there)
    marks = {name: signature(block) for name, block in there.items()}
    refused: dict[str, Finding] = {}
    if any(mark not in _KNOWN for mark in marks.values()):
        with steady(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused = _try(model, there, {mark: name for name, mark in reversed(marks.items()) if mark not in _KNOWN})
    return {name: _KNOWN.get(mark) or refused[mark] for name, mark in marks.items()}


def _refuse_shared(model: nn.Module, there: dict[str, nn.Module]) -> None:
    held = [id(weight) for block in there.values() for module in block.modules() for weight in weights_of(module)]
    if len(set(held)) < len(held):
        raise ValueError(
            f"blocks of {type(model).__name__} share matrices, so no head or neuron of theirs can be cut by itself"
        )


def _try(model: nn.Module, there: dict[str, nn.Module], new: dict[str, str]) -> dict[str, Finding]:
    """Try blocks of signatures that are not known, by an example of each; gives those that could not be tried."""
    try:
        _, named = replicate(model, Pool())
    except UnfitError as error:
        return {mark: _refused(there[name], str(error)) for mark, name in new.items()}
    for module in named.values():
        become_fewer(module)
    before = {name: [id(module) for module in named[name].modules()] for name in there}
    recorded, said = _record(model, named, list(there))
    refused = {}
    for mark, name in new.items():
        calls = recorded.get(name)
        if not calls:
            refused[mark] = _refused(there[name], said.get(name, "no forward pass on small random inputs reached it"))
        elif any(len(one) > 1 for one in calls):
            refused[mark] = _refused(there[name], f"its block is run {len(calls[0])} times in one pass")
        elif before[name] != [id(module) for module in named[name].modules()]:
            refused[mark] = _refused(there[name], "its block changes its modules while it runs")
        else:
            _KNOWN[mark] = examine(named[name], [one[0] for one in calls])
    return refused


def _record(
    model: nn.Module, named: dict[str, nn.Module], names: list[str]
) -> tuple[dict[str, list[list[Call]]], dict[str, str]]:
    """For each block, its calls in a pass of each case; and why there are none."""
    found: dict[str, list[list[Call]]] = {}
    said: dict[str, str] = {}
    for source, _ in sources(model):
        inside = [name for name in names if f"{name}.".startswith(f"{source}." if source else "") and name not in found]
        if not inside:
            continue
        for case in CASES:
            with torch.no_grad(), Sketch():
                try:
                    seen = record_blocks(named[source], {name: named[name] for name in inside}, case)
                except UnfitError as error:
                    said |= dict.fromkeys(inside, str(error))
                    continue
            for name, calls in seen.items():
                earlier = found.setdefault(name, [])
                if sum(_shapes(one) == _shapes(calls) for one in earlier) < 2:  # images are of one size in all cases
                    earlier.append(calls)
    return found, said


def _shapes(calls: list[Call]) -> list[torch.Size]:
    return [tensor.shape for call in calls for tensor in tensors_in(call.arguments)]


def _refused(block: nn.Module, why: str) -> Finding:
    return Finding((), dict.fromkeys(matrices_of(block), why))


def examine(block: nn.Module, calls: list[Call]) -> Finding:
    """Try a copy of a block."""
    refill(block, seed=0)
    why: dict[str, str] = {}
    proved: list[Pattern] = []
    trial = Trial(block, calls)
    try:
        trial.check_repeatable()
        found = list(hypotheses(block, trial.arguments[0]))
    except UnfitError as error:
        return _refused(block, str(error))
    except RuntimeError as error:  # torch cannot follow the gradients
        return _refused(block, f"the gradients of its block cannot be followed ({short(error)})")
    for one in found:
        if isinstance(one, tuple):
            why.setdefault(*one)
            continue
        try:
            pattern = trial.prove(one)
        except UnfitError as error:
            for side in one.matrices:
                why.setdefault(side.path, str(error))
            continue
        taken = {side.path for other in proved for side in other.matrices}
        shared = next((side.path for side in pattern.matrices if side.path in taken), None)
        if shared is not None:
            why.setdefault(shared, "its rows belong to two groups")
            continue
        proved.append(pattern)
    inside = {side.path for pattern in proved for side in pattern.matrices}
    left = {
        name: why.get(name, "no other matrix reads what it makes, unit by unit")
        for name in matrices_of(block)
        if name not in inside
    }
    return Finding(tuple(proved), left, tuple(calls))
