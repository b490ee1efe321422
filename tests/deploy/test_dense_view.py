"""The weights of packed modules as dense tensors, which are made only where something is computed with them."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import T5Config, T5EncoderModel

import platon
from kernel_levels import needs_kernel
from platon.deploy import sparse_matrix
from platon.deploy.dense_view import DenseView
from platon.deploy.embedding import PackedEmbedding
from platon.deploy.layer import CsrLinear, SparseLinear

RANDOM = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(70, 50, generator=RANDOM) * (torch.rand(70, 50, generator=RANDOM) < 0.2)
X = torch.randn(3, 50, generator=RANDOM)


def rounded(weight: Tensor) -> nn.Module:
    return PackedEmbedding.of(nn.Parameter(weight))


@pytest.mark.parametrize("make", [SparseLinear, CsrLinear])
def test_it_is_the_matrix(make: Callable[[Tensor], Any]) -> None:
    view = make(WEIGHT).weight
    assert isinstance(view, DenseView)
    assert (view.dtype, view.shape, view.device) == (WEIGHT.dtype, WEIGHT.shape, WEIGHT.device)
    assert (view.size(0), view.dim(), view.ndim, view.numel(), len(view)) == (70, 2, 2, 3500, 70)
    assert view.is_floating_point()
    assert not view.requires_grad
    assert torch.equal(view, WEIGHT)
    for compute in (
        lambda w: w.t(),
        lambda w: w[3],
        lambda w: w + 1,
        lambda w: X @ w.T,
        lambda w: F.linear(X, w),
        lambda w: torch.cat([w, w]),
        lambda w: torch.from_numpy(w.numpy()),
        lambda w: torch.tensor(w.tolist()),
        lambda w: w.to(torch.float64),
        lambda w: torch.zeros(70, 50).copy_(w),
        lambda w: w.data,
        copy.deepcopy,
    ):
        got = compute(view)
        assert type(got) is Tensor
        assert torch.equal(got, compute(WEIGHT))
    assert nn.Parameter(view.clone()).shape == (70, 50)
    written = io.BytesIO()
    torch.save(view, written)
    written.seek(0)
    assert torch.equal(torch.load(written), WEIGHT)


def test_a_rounded_table() -> None:
    table = rounded(WEIGHT)
    assert torch.equal(table.weight[torch.tensor([3, 5])], table(torch.tensor([3, 5])))


@needs_kernel
@torch.no_grad()
def test_a_model_that_asks_for_precision_unpacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 compares the precision of its tokens with that of its weights at every call."""
    config = T5Config(vocab_size=99, d_model=48, d_kv=24, d_ff=96, num_layers=2, num_heads=2)
    model = T5EncoderModel(config).eval()
    for weight in platon.weights(model).matrices.values():
        weight[torch.rand(weight.shape, generator=RANDOM) > 0.2] = 0
    fast = platon.sparsify(model, dense_above=1)
    unpacked: list[int] = []
    original = sparse_matrix.to_dense
    monkeypatch.setattr(sparse_matrix, "to_dense", lambda matrix: unpacked.append(1) or original(matrix))
    ids = torch.randint(0, 99, (3, 21))
    torch.testing.assert_close(fast(ids).last_hidden_state, model(ids).last_hidden_state, rtol=1e-4, atol=1e-5)
    assert not unpacked
    assert fast.encoder.block[0].layer[0].SelfAttention.q.weight.sum() != 0
    assert unpacked == [1]
