"""Makes the pruned model small and fast.

The names below are what other packages of platon may import; they are imported on first use, because they need torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from platon.deploy.inference_layer import has_sparse_layers
    from platon.deploy.storage import MANIFEST, load

__all__ = ["MANIFEST", "has_sparse_layers", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'platon.deploy' has no attribute {name!r}")
    from platon.deploy import inference_layer, storage

    return getattr(inference_layer if name == "has_sparse_layers" else storage, name)
