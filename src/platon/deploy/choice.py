"""Which layers of a model become sparse: those that are faster so, alone or together with the rest of their block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Candidate:
    """A linear layer that may become sparse.

    Args:
        weights: how many it has.
        share: of them that are not zero.
        limit: the largest share with which a layer of this shape, called alone, is faster if it is sparse; 0: none.
    """

    weights: int
    share: float
    limit: float

    def is_faster(self, limit: float) -> bool:
        """Whether it is faster if this is the limit."""
        return limit > 0 and self.share <= limit


def choose(candidates: Mapping[str, Candidate], blocks: Collection[str]) -> set[str]:
    """The names of the layers that become sparse.

    A sparse layer that is called alone pays for its call, which decides about small layers. The layers of a block are
    computed in fewer calls, and in one if none is dense. So where most of a block is faster sparse, the best limit in
    it counts for all its layers.

    Args:
        candidates: the layers, by name.
        blocks: the names of the modules whose sparse layers are computed together.
    """
    groups: defaultdict[str, dict[str, Candidate]] = defaultdict(dict)
    for name, layer in candidates.items():
        inside = [block for block in blocks if name.startswith(f"{block}.")]
        groups[max(inside, key=len, default=name)][name] = layer
    chosen = set()
    for layers in groups.values():
        faster = sum(layer.weights for layer in layers.values() if layer.is_faster(layer.limit))
        is_joined = 2 * faster > sum(layer.weights for layer in layers.values())
        best = max(layer.limit for layer in layers.values())
        chosen |= {name for name, layer in layers.items() if layer.is_faster(best if is_joined else layer.limit)}
    return chosen


def blocks_of(model: nn.Module) -> list[str]:
    """The names of a model's blocks: the elements of its lists of modules."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return [f"{name}.{number}" if name else str(number) for name, module in lists for number in range(len(module))]
