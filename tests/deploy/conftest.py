"""What several files here look at."""

from typing import Any

import pytest
from torch import Tensor

from platon.deploy.sparse_kernel import SparseKernel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of each call."""
    seen: list[int] = []
    original = SparseKernel.encode

    def watched(self: SparseKernel, x: Tensor, layers: Any, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(len(layers))
        return original(self, x, layers, *args, **kwargs)

    monkeypatch.setattr(SparseKernel, "encode", watched)
    return seen
