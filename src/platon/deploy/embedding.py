"""Embedding tables in eight bits: a quarter of the bytes, on disk and in memory."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from platon.deploy.dense_view import DenseView
from platon.deploy.packed import Description, Packed, Shapes, size

_LARGEST = 127


class PackedEmbedding(Packed):
    """A table of rows in int8, each with one scale; only the rows that are looked up become floating point.

    Row r is scale[r] · number[r, :], with scale[r] = max |w[r, :]| / 127, so an entry is off by at most scale[r] / 2.
    """

    kind = "embedding"
    numbers: Tensor
    scales: Tensor

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)
        self.num_embeddings, self.embedding_dim = numbers.shape
        self.eval()

    @classmethod
    def of(cls, weight: Tensor) -> PackedEmbedding:
        """The nearest table to these float32 rows."""
        weight = weight.detach()
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("an embedding table with numbers that are not finite cannot be stored in int8")
        scales = weight.abs().amax(1) / _LARGEST
        numbers = (weight / scales.clamp(min=torch.finfo(scales.dtype).tiny)[:, None]).round()
        return cls(numbers.clamp(-_LARGEST, _LARGEST).to(torch.int8), scales)

    @property
    def weight(self) -> Tensor:
        """The table in float32: a new tensor at every call, for code that reads it without a lookup."""
        numbers, scales = self.numbers, self.scales
        return DenseView.of(scales, (self.num_embeddings, self.embedding_dim), lambda: numbers * scales[:, None])

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Embedding calls it
        return F.embedding(input, self.numbers) * F.embedding(input, self.scales[:, None])

    def description(self) -> dict[str, int | str]:
        return {"rows": self.num_embeddings, "columns": self.embedding_dim}

    @classmethod
    def unfilled(cls, description: Description, shapes: Shapes) -> PackedEmbedding:
        rows, columns = size(description, "rows"), size(description, "columns")
        numbers = torch.empty(rows, columns, dtype=torch.int8, device="meta")
        return cls(numbers, torch.empty(rows, device="meta"))

    @classmethod
    def replaced(cls, description: Description, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        return {"weight": (size(description, "rows"), size(description, "columns"))}

    def problem(self) -> str | None:
        if self.numbers.dtype != torch.int8 or self.scales.dtype != torch.float32:
            return (
                f"its table is {self.numbers.dtype} and {self.scales.dtype}, it has to be torch.int8 and torch.float32"
            )
        if self.scales.shape != self.numbers.shape[:1]:
            return f"it has {len(self.scales)} scales for {len(self.numbers)} rows"
        return None

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, int8"


def packed_embeddings(model: nn.Module) -> dict[str, PackedEmbedding]:
    """The embedding tables of a model in int8, by name.

    A table that another module reads too, as the output layer of most decoders does, is left out: a product with it
    would need it as a whole.
    """
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    return {
        name: PackedEmbedding.of(module.weight)
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and module.max_norm is None and uses[id(module.weight)] == 1
    }
