"""Which rows of which matrices make the features that another matrix of the block reads, from gradients.

In one pass every matrix reads a constant. The gradient of a feature that a matrix reads then reaches exactly those rows
of other matrices that make it without a matrix in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from platon.engine.proof.call import mapped
from platon.engine.proof.sample import Arguments
from platon.engine.proof.trace import Use, Watch, frozen_norms
from platon.engine.topology import is_conv1d, weights_of


def matrices_of(block: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of the linears in a block, by name from the block; shared ones once."""
    wanted = {id(weight) for module in block.modules() for weight in weights_of(module)}
    return {name: parameter for name, parameter in block.named_parameters() if id(parameter) in wanted}


class Probe:
    """One pass through a block whose matrices read constants, and the gradients of what they read.

    Args:
        block: a copy; its parameters are random.
        arguments: what it is called with.
    """

    def __init__(self, block: nn.Module, arguments: Arguments) -> None:
        self.matrices = matrices_of(block)
        self.leaves: dict[str, Tensor] = {**dict(block.named_parameters()), **_float_buffers(block)}
        self.given: dict[tuple[str, Any], Tensor] = {}
        args, kwargs = arguments
        inputs: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            inputs.append(tensor.detach().double().clone().requires_grad_())
            return inputs[-1]

        args, kwargs = mapped(args, leaf), mapped(kwargs, leaf)
        handles = [m.register_forward_pre_hook(self._note(n), with_kwargs=True) for n, m in block.named_modules()]
        watch = Watch(self.matrices, lambda name, x: x.detach())
        try:
            with torch.enable_grad(), frozen_norms(block), watch:
                block(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        self.uses = watch.uses
        for number, tensor in enumerate(inputs):
            self.leaves[f"<{number}>"] = tensor

    def close(self) -> None:
        """Leave the block's buffers as they were."""
        for name, leaf in self.leaves.items():
            if not name.startswith("<") and not isinstance(leaf, nn.Parameter):
                leaf.requires_grad_(False)

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            places: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            for key, value in places.items():
                if isinstance(value, Tensor):
                    self.given.setdefault((name, key), value)

        return hook

    def gradients(self, number: Tensor) -> dict[str, Tensor]:
        """Of a number that came out of the pass, for every parameter, buffer and input that it depends on."""
        names = [name for name, leaf in self.leaves.items() if leaf.numel()]
        found = torch.autograd.grad(number, [self.leaves[n] for n in names], retain_graph=True, allow_unused=True)
        return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def _float_buffers(block: nn.Module) -> dict[str, Tensor]:
    # Torch passes no gradients to the statistics of a batch norm.
    fixed = {id(b) for m in block.modules() if isinstance(m, _BatchNorm) for b in m.buffers(recurse=False)}
    found = {n: b for n, b in block.named_buffers() if b.is_floating_point() and id(b) not in fixed}
    for buffer in found.values():
        buffer.requires_grad_(True)
    return found


def along(gradient: Tensor, dim: int) -> Tensor:
    """A row of numbers for each place along a dimension."""
    return gradient.movedim(dim, 0).reshape(gradient.shape[dim], -1)


def alive(rows: Tensor) -> Tensor:
    """Which rows are not zero but for rounding."""
    largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    return largest > 1e-9 * largest.max().clamp(min=1e-280)


class Reading:
    """What one matrix reads: how its features depend on the rows of the others."""

    def __init__(self, probe: Probe, use: Use, block: nn.Module) -> None:
        self.probe, self.use, self.block = probe, use, block
        self.width = use.x.shape[-1]
        random = torch.Generator().manual_seed(1)
        flat = use.x.reshape(-1, self.width)
        self.summed = (flat * torch.randn(len(flat), 1, generator=random, dtype=torch.float64)).sum(0)
        self.plain = probe.gradients(self.summed.sum())
        size = max((g.abs().max().item() for n, g in self.plain.items() if n in probe.matrices), default=0.0)
        self.writers = [
            name
            for name in dict.fromkeys(one.name for one in probe.uses)  # in the order of the forward pass
            if name in self.plain and name != use.name and self.plain[name].abs().max() > 1e-11 * size > 0
        ]

    def rows_dim(self, name: str) -> int:
        """The dimension of a stored matrix along which its outputs lie."""
        return int(is_conv1d(self.block.get_submodule(name.rpartition(".")[0])))

    def single(self, name: str, dim: int, numbered: Mapping[str, Tensor]) -> Tensor:
        """For each place along a dimension: the only feature that depends on it; -1: several, -2: none.

        With the features weighted by 1, 2, 3, …, the gradient of a place that makes feature f is f times as large.
        """
        plain, weighted = along(self.plain[name], dim), along(numbered[name], dim)
        ratio = (plain * weighted).sum(1) / (plain * plain).sum(1).clamp(min=1e-300)
        left_over = (weighted - ratio[:, None] * plain).abs().amax(1) / weighted.abs().amax(1).clamp(min=1e-300)
        feature = ratio.round().long() - 1
        fits = (left_over < 1e-7) & ((ratio - ratio.round()).abs() < 1e-4) & (feature >= 0) & (feature < self.width)
        return torch.where(alive(plain), torch.where(fits, feature, -1), -2)

    def unit_size(self, several: dict[str, Tensor]) -> int:
        """How many features, from the first on, depend on the same rows: the smallest such stretch, by bisection.

        Args:
            several: for each matrix, which rows make more than one feature.
        """
        first = self.probe.gradients(self.summed[0])
        mine = {n: rows & alive(along(first[n], self.rows_dim(n))) for n, rows in several.items() if n in first}
        mine = {name: rows for name, rows in mine.items() if bool(rows.any())}
        if not mine:
            return self.width
        low, high = 1, self.width
        while low < high:
            middle = (low + high) // 2
            after = self.probe.gradients(self.summed[middle:].sum())
            confined = any(
                name not in after or bool((rows & ~reached(after[name], self.plain[name], self.rows_dim(name))).any())
                for name, rows in mine.items()
            )
            low, high = (low, middle) if confined else (middle + 1, high)
        return low


def reached(gradient: Tensor, whole: Tensor, dim: int) -> Tensor:
    """Which places along a dimension a gradient reaches, measured against the gradient of everything."""
    largest = along(gradient, dim).abs().amax(1)
    return largest > 1e-9 * along(whole, dim).abs().amax().clamp(min=1e-280)
