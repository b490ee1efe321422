"""A sparse layer, a sum and a norm in one call of the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from platon.deploy.layer import SparseLinear


class SparseSum(nn.Module):
    """norm(layer(x) + added), or layer(x) + added: takes the place of a module that computes this.

    Args:
        children: the submodules of the module that is replaced, by name: one sparse layer and, perhaps, a norm. They
            keep their names, so that the model's tensors keep theirs.
        names: of the two arguments that the replaced module takes.
    """

    def __init__(self, children: Mapping[str, nn.Module], names: Sequence[str]) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self._names = tuple(names)
        self.eval()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        x, added = (*args, *(kwargs[name] for name in self._names[len(args) :]))
        layer, norm = parts_of(self)
        wanted = (*x.shape[:-1], layer.out_features)
        if added.dtype != torch.float32 or added.device != x.device or added.shape != wanted:
            raise ValueError(
                f"a sparse layer adds float32 on the CPU of shape {wanted} to its product, got {added.dtype} of shape "
                f"{tuple(added.shape)} on {added.device}"
            )
        if added.requires_grad and torch.is_grad_enabled():
            layer.check(added.detach().requires_grad_())
        return layer.chain(x, added, norm)


# A function, because the children of a sum keep the names that they have, and a property could have one of these.
def parts_of(module: SparseSum) -> tuple[SparseLinear, nn.LayerNorm | None]:
    """The sparse layer of a sum, and its norm."""
    children = module._modules.values()
    layer = next(child for child in children if isinstance(child, SparseLinear))
    return layer, next((child for child in children if isinstance(child, nn.LayerNorm)), None)
