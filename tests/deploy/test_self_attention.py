"""Attention that a module computes itself, by the kernel where a trial shows that it is the same."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MegatronBertConfig, MegatronBertModel, MPNetConfig, MPNetModel

import platon
from encoder_layers import IDS, SMALL, padding, prune
from kernel_levels import needs_kernel
from platon.deploy.self_attention import SelfAttention
from platon.deploy.sparse_kernel import SparseKernel

pytestmark = needs_kernel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The queries of each attention by the kernel."""
    seen: list[int] = []
    original = SparseKernel.attend

    def watched(self: SparseKernel, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(q.shape[2])
        return original(self, q, *args, **kwargs)

    monkeypatch.setattr(SparseKernel, "attend", watched)
    return seen


def confirmed(model: nn.Module, tokens: int = 21) -> int:
    held = [vars(one).get("forward") for one in model.modules()]
    return sum(isinstance(one, SelfAttention) and one.guess(tokens) is not None for one in held)


# --- models -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_mpnet(calls: list[int], tmp_path: Any) -> None:
    model = prune(MPNetModel(MPNetConfig(**SMALL)))
    model.encoder.relative_attention_bias.weight.normal_(0, 3)
    fast = platon.sparsify(model, dense_above=1)
    assert confirmed(fast) == 2
    for ids in (IDS, IDS[:1, :8], torch.cat([IDS, IDS], 1)):
        fast(ids)  # with a trial
    for mask in (None, padding()):
        calls.clear()
        got = fast(IDS, attention_mask=mask).last_hidden_state
        assert calls == [21, 21]
        torch.testing.assert_close(got, model(IDS, attention_mask=mask).last_hidden_state, rtol=1e-4, atol=1e-5)
    calls.clear()
    every = fast(IDS, output_hidden_states=True, output_attentions=True)
    want = model(IDS, output_hidden_states=True, output_attentions=True)
    assert not calls  # the kernel has no attention maps
    pairs = zip((*every.hidden_states, *every.attentions), (*want.hidden_states, *want.attentions), strict=True)
    for got, one in pairs:
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)
    platon.save(fast, tmp_path / "fast")
    for twin in (copy.deepcopy(fast), platon.load(tmp_path / "fast")):
        assert confirmed(twin) == 2
        assert torch.equal(twin(IDS).last_hidden_state, fast(IDS).last_hidden_state)
    with pytest.raises(ValueError, match="is for inference and was asked to train"):
        fast.train()(IDS)


@torch.no_grad()
def test_a_model_whose_attention_always_gives_its_maps_is_left_as_it_is() -> None:
    model = prune(MegatronBertModel(MegatronBertConfig(**SMALL)))
    fast = platon.sparsify(model, dense_above=1)
    assert not confirmed(fast)
    torch.testing.assert_close(fast(IDS).last_hidden_state, model(IDS).last_hidden_state, rtol=1e-4, atol=1e-5)


# --- modules that only look like it -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention as people write it, with one thing changed."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change, self.heads = change, 4
        self.first, self.second, self.third = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        if change != "bare":
            self.out = nn.Linear(24, 24)
        if change == "parameter":
            self.slope = nn.Parameter(torch.ones(1))

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None, twice: bool = False
    ) -> Any:
        change = self.change
        v, k, q = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.first, self.second, self.third)
        )
        scores = q @ k.transpose(-1, -2) / (1 if change == "scale" else q.shape[-1] ** 0.5)
        if position_bias is not None:
            scores = scores + position_bias * (2 if change == "bias" or twice else 1)
        if attention_mask is not None:
            scores = scores + attention_mask
        if change == "parameter":
            scores = scores * self.slope
        if change == "window":
            place = torch.arange(x.shape[1])
            scores = scores.masked_fill((place[:, None] - place).abs() > 9, -1e9)
        shares = scores.softmax(-1)
        made = (shares @ v).transpose(1, 2).flatten(2)
        made = made if change == "bare" else self.out(made)
        if change == "residual":
            made = made + x
        return made if change in ("tensor", "bare") else (made, shares if change == "maps" else None)


@pytest.mark.parametrize("change", ["", "tensor", "bare"])
@torch.no_grad()
def test_a_module_of_your_own(change: str, calls: list[int]) -> None:
    torch.manual_seed(0)
    model = prune(nn.Sequential(Attention(change)))[0]
    fast = platon.sparsify(model, dense_above=1)
    x, bias, keys = torch.randn(3, 11, 24), torch.randn(1, 4, 11, 11), torch.randn(3, 1, 1, 11)
    fast(x)  # with a trial
    mask, both = {"attention_mask": keys}, {"attention_mask": keys, "position_bias": bias}
    for asked in ({}, mask, {"position_bias": bias}, both):
        calls.clear()
        got, want = fast(x, **asked), model(x, **asked)
        assert calls == [11]
        assert type(got) is type(want)
        pairs = [(got, want)] if isinstance(got, Tensor) else zip(got, want, strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    calls.clear()
    for asked in ({"twice": True}, {"attention_mask": keys.double()}, {"attention_mask": keys > 0}):
        try:
            want = model(x, **asked)
        except RuntimeError:
            continue
        got = fast(x, **asked)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    fast(x[:, :5])
    assert not calls
    handle = fast.first.register_forward_hook(lambda *call: None)
    fast(x)
    assert not calls
    handle.remove()
    fast(x)
    assert calls == [11]


@pytest.mark.parametrize("change", ["scale", "bias", "parameter", "window", "residual", "maps"])
@torch.no_grad()
def test_another_attention_is_left_as_it_is(change: str) -> None:
    torch.manual_seed(0)
    model = prune(nn.Sequential(Attention(change)))[0]
    fast = platon.sparsify(model, dense_above=1)
    for tokens in (7, 30):
        assert not (confirmed(fast, tokens) and change != "window")
        x = torch.randn(2, tokens, 24)
        for asked in ({}, {"position_bias": torch.randn(1, 4, tokens, tokens)}):
            torch.testing.assert_close(fast(x, **asked)[0], model(x, **asked)[0], rtol=1e-4, atol=1e-5)
    assert not confirmed(fast, 30)


@torch.no_grad()
def test_compiled_and_exported() -> None:
    model = prune(nn.Sequential(Attention("tensor")))[0]
    fast, x = platon.sparsify(model, dense_above=1), torch.randn(2, 9, 24)
    want = model(x)
    fast(x)
    torch.testing.assert_close(torch.compile(fast, backend="eager", fullgraph=True)(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.export.export(fast, (x,)).module()(x), want, rtol=1e-4, atol=1e-5)
