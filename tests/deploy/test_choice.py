"""Which layers become sparse: alone by their own limit, in a block that is sparse for the most part by the best one."""

import pytest
import torch
from torch import nn

import platon
from platon.deploy import calibration
from platon.deploy.choice import Candidate, blocks_of, choose
from platon.deploy.layer import CsrLinear, SparseLinear


def layer(share: float, limit: float, weights: int = 100) -> Candidate:
    return Candidate(weights, share, limit)


def test_a_layer_alone_is_judged_by_its_own_limit() -> None:
    layers = {"a": layer(0.1, 0.2), "b": layer(0.2, 0.2), "c": layer(0.21, 0.2), "d": layer(0.0, 0.0)}
    assert choose(layers, ()) == {"a", "b"}, "a limit of 0: no share is faster, not even an empty matrix"
    assert choose(layers, ["other"]) == {"a", "b"}


def test_where_most_of_a_block_is_faster_the_best_limit_counts_for_all() -> None:
    small, full = layer(0.02, 0.0, weights=5), layer(0.5, 0.2, weights=90)
    block = {"0.q": layer(0.1, 0.4), "0.k": small, "0.v": full, "10.k": small}
    assert choose(block, ["0", "1"]) == {"0.q", "0.k"}, "0.v is above the best limit; 10 is no part of block 1"
    assert choose({**block, "0.v": layer(0.3, 0.2, weights=90)}, ["0"]) == {"0.q", "0.k", "0.v"}


def test_where_less_than_half_of_a_block_is_faster_the_rest_stays_dense() -> None:
    layers = {"0.q": layer(0.1, 0.4, weights=50), "0.v": layer(0.3, 0.2, weights=50)}
    assert choose(layers, ["0"]) == {"0.q"}


def test_the_innermost_block_counts() -> None:
    layers = {"0.experts.0.up": layer(0.1, 0.4), "0.experts.1.up": layer(0.3, 0.2), "0.q": layer(0.1, 0.4)}
    assert choose(layers, ["0", "0.experts.0", "0.experts.1"]) == {"0.experts.0.up", "0.q"}


def test_blocks_are_the_elements_of_lists() -> None:
    inner = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)]), "q": nn.Linear(2, 2)})
    model = nn.ModuleDict({"layer": nn.ModuleList([inner, nn.Linear(2, 2)]), "head": nn.Sequential(nn.Linear(2, 2))})
    assert blocks_of(model) == ["layer.0", "layer.1", "layer.0.experts.0"]
    assert blocks_of(nn.ModuleList([nn.Linear(2, 2)])) == ["0"]


@pytest.mark.parametrize(("make", "expected"), [(SparseLinear, {"0.0", "0.1"}), (CsrLinear, {"0.0"})])
def test_only_the_kernel_computes_a_block_together(
    make: type[nn.Module], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that is too small alone becomes sparse with its block; `torch.sparse` calls every layer alone."""
    model = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2)), nn.Linear(16, 2)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[1:] = 0
    if make is CsrLinear:
        monkeypatch.setattr("platon.deploy.sparse_kernel.find", lambda: "a reason")
        monkeypatch.setattr("warnings.warn", lambda *args, **kwargs: None)
    monkeypatch.setattr(calibration, "limit", lambda make, rows, columns, tokens: 0.6 if rows > 2 else 0.0)
    fast = platon.sparsify(model)
    assert {name for name, module in fast.named_modules() if isinstance(module, make)} == expected
