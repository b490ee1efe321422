"""Attention by the compiled kernel: against its equation in float64, and in models of transformers."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

import platon
from kernel_levels import at, levels, needs_kernel
from platon.deploy import attention

pytestmark = needs_kernel

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
IDS = torch.randint(0, 99, (3, 21), generator=torch.Generator().manual_seed(0))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool = False) -> Tensor:
    """The equation, token by token, in float64."""
    sharing = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(sharing, dim=1), v.repeat_interleave(sharing, dim=1)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            for query in range(q.shape[2]):
                scores = scale * (k[row, head].double() @ q[row, head, query].double())
                if mask is not None and mask.dtype == torch.bool:
                    scores[~mask[row, head, query]] = -math.inf
                elif mask is not None:
                    scores = scores + mask[row, head, query].double()
                if is_causal:
                    scores[query + 1 :] = -math.inf
                if not bool((scores == -math.inf).all()):
                    out[row, head, query] = scores.softmax(0) @ v[row, head].double()
    return out.transpose(1, 2)


def draw(*shape: int, seed: int, apart: bool) -> Tensor:
    """[rows, heads, tokens, features]; `apart`: as the products write it, the heads of a token side by side."""
    random = torch.Generator().manual_seed(seed)
    rows, heads, tokens, features = shape
    if apart:
        return torch.randn(rows, tokens, heads, features, generator=random).transpose(1, 2)
    return torch.randn(*shape, generator=random)


# --- the kernel -------------------------------------------------------------------------------------------------------


@levels
@given(
    rows=st.integers(1, 3),
    heads=st.integers(1, 4),
    sharing=st.integers(1, 3),
    queries=st.integers(1, 15),
    keys=st.integers(1, 70),
    features=st.integers(1, 70),
    value_features=st.integers(1, 70),
    kind=st.sampled_from(["none", "flags", "numbers", "padding", "lowest", "causal"]),
    apart=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_any_shape_and_mask(
    level: int,
    rows: int,
    heads: int,
    sharing: int,
    queries: int,
    keys: int,
    features: int,
    value_features: int,
    kind: str,
    apart: bool,
    threads: int,
    seed: int,
) -> None:
    k = draw(rows, heads, keys, features, seed=seed + 1, apart=apart)
    v = draw(rows, heads, keys, value_features, seed=seed + 2, apart=apart)
    heads *= sharing
    q = draw(rows, heads, queries, features, seed=seed, apart=apart)
    random = torch.Generator().manual_seed(seed + 3)
    seen = torch.rand(rows, heads, queries, keys, generator=random) < 0.6
    masks: dict[str, Tensor | None] = {
        "none": None,
        "causal": None,
        "flags": seen,
        "numbers": torch.randn(rows, heads, queries, keys, generator=random),
        "padding": seen[:, :1, :1].expand(rows, heads, queries, keys),
        "lowest": torch.where(seen[:, :1], 0.0, torch.finfo(torch.float32).min).expand(rows, heads, queries, keys),
    }
    is_causal = kind == "causal"
    got = at(level).attend(q, k, v, masks[kind], features**-0.5, is_causal=is_causal, threads=threads)
    assert got.shape == (rows, queries, heads, value_features)
    want = attend(q, k, v, masks[kind], features**-0.5, is_causal)
    assert bool(((got - want).abs() <= 5e-6 * v.abs().max()).all())


@levels
def test_a_query_that_sees_no_key_and_one_that_is_not_finite(level: int) -> None:
    """As PyTorch has it; but what is NaN stays NaN, where PyTorch gives zeros."""
    q, k, v = (draw(1, 2, 9, 16, seed=seed, apart=True) for seed in range(3))
    nothing = torch.ones(1, 2, 9, 9, dtype=torch.bool)
    nothing[:, :, 4] = False
    lowest = torch.where(nothing, 0.0, torch.finfo(torch.float32).min)
    infinite = torch.where(nothing, 0.0, -math.inf)
    for mask in (nothing, lowest, infinite):
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        torch.testing.assert_close(at(level).attend(q, k, v, mask, 0.25), want)
    for number in (math.nan, math.inf):
        bad = q.clone()
        bad[0, 1, 3, 5] = number
        got = at(level).attend(bad, k, v, None, 0.25).transpose(1, 2)
        assert bool(got[0, 1, 3].isnan().all())
        assert int(got.isnan().sum()) == 16


@levels
def test_large_scores_and_several_threads(level: int) -> None:
    """Exponentials of large scores neither overflow nor lose the others; threads do not change a bit."""
    q, k, v = (draw(5, 3, 64, 32, seed=seed, apart=True) for seed in range(3))
    q = 30 * q
    one = at(level).attend(q, k, v, None, 1.0, threads=1)
    torch.testing.assert_close(one, attend(q, k, v, None, 1.0).float(), rtol=1e-3, atol=1e-3)
    for threads in (2, 3, 7, 300):
        assert torch.equal(at(level).attend(q, k, v, None, 1.0, threads=threads), one)


@levels
def test_nothing_to_attend_to(level: int) -> None:
    empty = torch.empty(2, 3, 0, 8)
    some = torch.ones(2, 3, 4, 8)
    assert at(level).attend(empty, some, some, None, 1.0).shape == (2, 0, 3, 8)
    assert not at(level).attend(some, empty, empty, None, 1.0).any()


# --- in models --------------------------------------------------------------------------------------------------------


def prune(model: nn.Module) -> nn.Module:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and not any(part in name for part in ("embed", "wte", "wpe")):
                weight[torch.rand(weight.shape, generator=random) >= 0.2] = 0
    return model.eval()


def bert() -> nn.Module:
    return prune(BertModel(BertConfig(vocab_size=99, **SMALL)))


def without_layers(model: nn.Module) -> nn.Module:
    """The model with layers that are not computed at once, so that attention is a call of its own."""
    for module in model.modules():
        module.__dict__.pop("forward", None)
    return model


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each attention of a sparsified model, whether the kernel computed it."""
    seen: list[bool] = []
    original = attention._attend

    def watched(*args: Any, **settings: Any) -> Tensor | None:
        result = original(*args, **settings)
        seen.append(result is not None)
        return result

    monkeypatch.setattr(attention, "_attend", watched)
    return seen


def padding() -> Tensor:
    mask = torch.ones(3, 21, dtype=torch.int64)
    mask[1, 9:] = 0
    mask[2, :2] = 0
    return mask


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
@torch.no_grad()
def test_an_encoder_attends_by_the_kernel(used: list[bool], mask: Tensor | None) -> None:
    model = bert()
    fast = without_layers(platon.sparsify(model, dense_above=1))
    used.clear()
    got = fast(IDS, attention_mask=mask).last_hidden_state
    assert used == [True, True]
    want = model(IDS, attention_mask=mask).last_hidden_state
    assert used == [True, True], "the model that is not sparse keeps PyTorch's attention"
    there = torch.ones(3, 21, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(got[there], want[there], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_vision_model_and_a_folder_that_is_loaded(used: list[bool], tmp_path: Any) -> None:
    model = prune(ViTModel(ViTConfig(image_size=32, patch_size=8, **SMALL)))
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    fast = platon.sparsify(model, dense_above=1)
    used.clear()
    got = fast(pixels).last_hidden_state
    assert used == [True, True]
    torch.testing.assert_close(got, model(pixels).last_hidden_state, rtol=1e-4, atol=1e-5)
    classifier = prune(BertForSequenceClassification(BertConfig(vocab_size=99, **SMALL)))
    fast = without_layers(platon.sparsify(classifier, dense_above=1))
    platon.save(fast, tmp_path / "fast")
    loaded = without_layers(platon.load(tmp_path / "fast"))
    used.clear()
    assert torch.equal(loaded(IDS).logits, fast(IDS).logits)
    assert used == [True] * 4


def gpt2() -> nn.Module:
    return prune(GPT2Model(GPT2Config(vocab_size=99, n_embd=48, n_layer=2, n_head=4)))


def llama() -> nn.Module:
    return prune(LlamaModel(LlamaConfig(vocab_size=99, num_key_value_heads=2, **SMALL)))


def mistral() -> nn.Module:
    """Each token sees the 8 last ones."""
    return prune(MistralModel(MistralConfig(vocab_size=99, num_key_value_heads=2, sliding_window=8, **SMALL)))


@pytest.mark.parametrize("build", [gpt2, llama, mistral])
@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
@torch.no_grad()
def test_a_decoder_attends_by_the_kernel(build: Callable[[], nn.Module], mask: Tensor | None, used: list[bool]) -> None:
    model = build()
    fast = platon.sparsify(model, dense_above=1)
    used.clear()
    there = torch.ones(3, 21, dtype=torch.bool) if mask is None else mask.bool()
    for length in (21, 7):
        got = fast(IDS[:, :length], attention_mask=None if mask is None else mask[:, :length]).last_hidden_state
        want = model(IDS[:, :length], attention_mask=None if mask is None else mask[:, :length]).last_hidden_state
        torch.testing.assert_close(got[there[:, :length]], want[there[:, :length]], rtol=1e-4, atol=1e-5)
    assert used == [True] * 4


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
@torch.no_grad()
def test_a_bias_for_positions(mask: Tensor | None, used: list[bool]) -> None:
    """The encoder's own, with a mask or without, and the decoder's, which is causal."""
    sizes = {"vocab_size": 99, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    model = prune(T5Model(T5Config(**sizes)).eval())
    for bias in (one for one in model.modules() if isinstance(one, nn.Embedding) and one.num_embeddings == 32):
        bias.weight.normal_(0, 3)
    fast = platon.sparsify(model, dense_above=1)
    asked: dict[str, Any] = {"input_ids": IDS, "attention_mask": mask, "use_cache": False}
    for own in (IDS.flip(1), IDS[:, :9]):
        used.clear()
        got, want = (one(**asked, decoder_input_ids=own).last_hidden_state for one in (fast, model))
        assert used == [True] * 6  # of each layer; the decoder's attend to the encoder too
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [gpt2, llama, mistral])
@torch.no_grad()
def test_a_decoder_goes_on_with_a_cache(build: Callable[[], nn.Module], used: list[bool]) -> None:
    """The first tokens, some more with a mask, and single ones, whose attention is PyTorch's."""
    model = build()
    fast = platon.sparsify(model, dense_above=1)
    whole, cache = model(IDS).last_hidden_state, None
    for first, end in ((0, 9), (9, 18), (18, 19), (19, 20), (20, 21)):
        out = fast(IDS[:, first:end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        torch.testing.assert_close(out.last_hidden_state, whole[:, first:end], rtol=1e-4, atol=1e-5)
    assert used[-10:] == [True] * 4 + [False] * 6


@torch.no_grad()
def test_few_queries_are_left_to_pytorch(used: list[bool]) -> None:
    fast = without_layers(platon.sparsify(bert(), dense_above=1))
    used.clear()
    fast(IDS[:, :5])
    fast(IDS[:, :6])
    assert used == [False, False, True, True]


def test_more_than_the_equation_is_left_to_pytorch() -> None:
    q = k = v = draw(1, 2, 8, 16, seed=0, apart=True)
    module = nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    settings: list[dict[str, Any]] = [
        {"dropout": 0.1},
        {"position_bias": torch.zeros(1, 2, 8, 8, dtype=torch.float64)},
        {"position_bias": torch.ones(1, 2, 8, 8, dtype=torch.bool)},
        {"position_bias": torch.zeros(2, 8, 8)},
        {"output_attentions": True},
        {"softcap": 30.0},
        {"something_new": 1},
    ]
    for one in settings:
        assert attention._attend(module, q, k, v, None, **one) is None, one
    assert attention._attend(module, q, k, v, None, dropout=0.0, scaling=0.5, is_causal=None) is not None
    half, tracked = q.half(), q.clone().requires_grad_()
    crossed = q.permute(0, 1, 3, 2)
    for other in (half, tracked, crossed, q[0]):
        assert attention._attend(module, other, other, other, None) is None
    for mask in (torch.zeros(8, 8), torch.zeros(1, 3, 8, 8), torch.zeros(1, 1, 8, 8).half()):
        assert attention._attend(module, q, k, v, mask) is None
    one_head, one_row, narrow = q[:, :1], q[:1], q[..., :8]
    for keys, values in ((one_head, v), (k, one_head), (k[:, :, :7], v), (narrow, v)):
        assert attention._attend(module, q, keys, values, None) is None
    wide = torch.cat([q, q])
    assert attention._attend(module, wide, one_row, one_row, None) is None
    assert attention._attend(module, q, k, narrow, None) is not None, "values may have another width"
    assert attention._attend(module, q, k[:, :, :7], v[:, :, :7], None, is_causal=True) is None, "which keys are seen?"
    assert attention._attend(module, q, k[:, :, :7], v[:, :, :7], None, is_causal=False) is not None
    grouped = nn.Module()
    grouped.is_causal, grouped.num_key_value_groups = False, 2  # type: ignore[assignment]
    assert attention._attend(grouped, q, k, v, None) is None
    assert attention._attend(grouped, q, one_head, one_head, None) is not None


@torch.no_grad()
def test_compiled_and_exported_models_have_pytorchs_attention(used: list[bool]) -> None:
    fast = platon.sparsify(bert(), dense_above=1)
    want = fast(IDS).last_hidden_state
    used.clear()
    program = torch.export.export(fast, (IDS,), strict=False)
    torch.testing.assert_close(program.module()(IDS).last_hidden_state, want, rtol=1e-4, atol=1e-5)
    assert not any(used)


@torch.no_grad()
def test_a_copy_attends_by_the_kernel_too(used: list[bool]) -> None:
    fast = without_layers(platon.sparsify(bert(), dense_above=1))
    twin = copy.deepcopy(fast)
    used.clear()
    assert torch.equal(twin(IDS).last_hidden_state, fast(IDS).last_hidden_state)
    assert used == [True] * 4
