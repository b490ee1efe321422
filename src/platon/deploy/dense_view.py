"""The weights of a packed module as a dense tensor that is made once something is computed with it.

Modules of transformers ask for the precision of a layer's weights at every call (T5 does), which is no reason to unpack
them: that takes longer than the layer's product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from platon.deploy.inference_layer import is_eager

_KNOWN = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("dtype", "shape", "device", "layout", "ndim", "requires_grad")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    ]
)


class DenseView(Tensor):
    """A tensor [rows, columns] in float32 without memory; every operation on it makes the dense one first.

    Changes of it are lost, as those of any copy of the weights are. `clone()` gives a plain tensor.
    """

    _make: Callable[[], Tensor]

    @staticmethod
    def of(like: Tensor, shape: tuple[int, int], make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives, later; at once in a call that is traced.

        Args:
            like: has its precision and device.
            shape: of the matrix.
            make: unpacks it.
        """
        if not is_eager(like):
            return make()
        view: DenseView = Tensor._make_wrapper_subclass(DenseView, shape, dtype=like.dtype, device=like.device)
        view._make = make
        return view

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What a function says of shape or precision; anything else is said by the dense tensor."""
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_made(args), **_made(dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """The same, for calls that PyTorch makes by itself."""
        return func(*_made(args), **_made(kwargs or {}))


def _made(values: Any) -> Any:
    return tree_map_only(DenseView, lambda view: view._make(), values)
