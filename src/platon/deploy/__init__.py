"""Makes the pruned model small and fast.

The names below are what other packages of platon may import; they are imported on first use, because they need torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from platon.deploy.storage import MANIFEST, load

__all__ = ["MANIFEST", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'platon.deploy' has no attribute {name!r}")
    from platon.deploy import storage

    return getattr(storage, name)
