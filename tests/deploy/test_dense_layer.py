"""Layers that stay dense in a sparsified model: the kernel's product with few tokens, and when it is asked for."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import platon
from kernel_levels import at, levels, needs_kernel
from platon.deploy import sparse_kernel
from platon.deploy.dense_layer import DenseLinear
from platon.deploy.layer import SparseLinear

pytestmark = [needs_kernel, pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")]  # forward-mode

WIDTH, WORDS = 48, 900  # of the decoder below; its output layer is large enough for the kernel


# --- the product ------------------------------------------------------------------------------------------------------


@levels
@given(
    rows=st.integers(0, 150),
    columns=st.integers(0, 300),
    tokens=st.integers(0, 9),
    gap=st.integers(0, 5),
    has_bias=st.booleans(),
    threads=st.integers(1, 4),
)
def test_any_shape(level: int, rows: int, columns: int, tokens: int, gap: int, has_bias: bool, threads: int) -> None:
    random = torch.Generator().manual_seed(rows * 301 + columns)
    weight, bias = torch.randn(rows, columns, generator=random), torch.randn(rows, generator=random)
    x = torch.randn(tokens, columns + gap, generator=random)[:, :columns]
    got = at(level).dense(x, weight, bias if has_bias else None, threads=threads)
    want = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    terms = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert got.shape == want.shape
    assert bool(((got - want).abs() <= 3e-6 * terms + 1e-30).all())


@levels
def test_several_threads_give_the_same_bits(level: int) -> None:
    weight, x = torch.randn(1100, 700), torch.randn(3, 700)
    assert torch.equal(at(level).dense(x, weight, None, threads=3), at(level).dense(x, weight, None, threads=1))


# --- the layers -------------------------------------------------------------------------------------------------------


class Calls:
    """Counts what the kernel computes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made, original = Calls(), sparse_kernel.SparseKernel.dense

    def counted(kernel: sparse_kernel.SparseKernel, x: Tensor, *others: Tensor) -> Tensor:
        made.tokens.append(x.shape[:-1].numel())
        return original(kernel, x, *others)

    monkeypatch.setattr(sparse_kernel.SparseKernel, "dense", counted)
    return made


@pytest.fixture
def decoder() -> nn.Module:
    """A pruned decoder whose output layer is its embedding table."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for matrix in platon.weights(model).matrices.values():
            matrix[torch.rand_like(matrix) > 0.2] = 0
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(0))


def dense_layers(model: nn.Module) -> Iterator[DenseLinear]:
    return (module for module in model.modules() if isinstance(module, DenseLinear))


def test_a_decoder_generates_the_same(decoder: nn.Module, calls: Calls) -> None:
    fast = platon.sparsify(decoder, dense_above=0.5)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        want, got = decoder.generate(ids(1, 5), **settings), fast.generate(ids(1, 5), **settings)
    assert torch.equal(got, want)
    assert calls.tokens == [1] * 12  # one output layer, and the logits of the last token alone
    assert fast.lm_head.weight is fast.model.embed_tokens.weight


@pytest.mark.parametrize(("shape", "computed"), [((1, 1), True), ((2, 4), True), ((3, 3), False), ((1, 40), False)])
def test_few_tokens(decoder: nn.Module, calls: Calls, shape: tuple[int, int], computed: bool) -> None:
    fast = platon.sparsify(decoder, dense_above=0.5)
    with torch.no_grad():
        want, got = decoder(ids(*shape)).logits, fast(ids(*shape)).logits
    assert torch.allclose(got, want, atol=1e-5)
    assert bool(calls.tokens) == computed


def test_a_loaded_decoder_has_them_too(decoder: nn.Module, calls: Calls, tmp_path: Path) -> None:
    fast = platon.sparsify(decoder, dense_above=0.5)
    again = platon.load(platon.save(fast, tmp_path / "fast"))
    with torch.no_grad():
        assert torch.equal(again(ids(1, 1)).logits, fast(ids(1, 1)).logits)
    assert len(calls.tokens) == 2
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_the_model_itself_is_left_as_it_is(decoder: nn.Module) -> None:
    platon.sparsify(decoder, dense_above=0.5)
    assert not any(dense_layers(decoder))


def test_small_layers_and_subclasses_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(200, 200), Own(200, 200), nn.Linear(200, 200), nn.Linear(200, 3))
    with torch.no_grad():
        model[0].weight[torch.rand(200, 200) > 0.1] = 0
    fast = platon.sparsify(model, dense_above=0.5)
    assert [type(one) for one in fast] == [SparseLinear, Own, DenseLinear, nn.Linear]


def test_a_dense_layer_can_become_sparse_later(decoder: nn.Module) -> None:
    fast = platon.sparsify(decoder, dense_above=0.5)
    faster = platon.sparsify(fast, dense_above=1.0)
    assert not any(dense_layers(faster))
    with torch.no_grad():
        assert torch.allclose(faster(ids(1, 5)).logits, decoder(ids(1, 5)).logits, atol=1e-5)


# --- calls that are PyTorch's -----------------------------------------------------------------------------------------


@pytest.fixture
def layer() -> DenseLinear:
    made = nn.Linear(200, 300).requires_grad_(False)
    made.__class__ = DenseLinear
    return made


def plain(layer: DenseLinear) -> nn.Linear:
    made = copy.deepcopy(layer)
    made.__class__ = nn.Linear
    return made


def test_what_asks_for_a_gradient(layer: DenseLinear, calls: Calls) -> None:
    x = torch.randn(2, 200)
    layer(x.clone().requires_grad_()).sum().backward()
    layer.weight.requires_grad_()
    layer(x).sum().backward()
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(300, 200))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with torch.no_grad():
            assert torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent is not None
    assert not calls.tokens
    with torch.no_grad():
        layer(x)
    assert calls.tokens == [2]


def test_other_precisions(layer: DenseLinear, calls: Calls) -> None:
    x = torch.randn(1, 200)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x)
    assert not calls.tokens


@pytest.mark.parametrize("shape", [(200,), (2, 2, 200), (1, 8, 200)])
def test_any_number_of_dimensions(layer: DenseLinear, calls: Calls, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.allclose(layer(x), plain(layer)(x), atol=1e-5)
    assert len(calls.tokens) == 1


def test_what_does_not_fit_gets_pytorchs_own_words(layer: DenseLinear, calls: Calls) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(1, 199))
    layer.bias = nn.Parameter(torch.zeros(299), requires_grad=False)
    with pytest.raises(RuntimeError, match="expanded size"):
        layer(torch.randn(1, 200))
    layer.weight = nn.Parameter(torch.zeros(300, 5000), requires_grad=False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(1, 200))
    assert not calls.tokens


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: nn.utils.parametrizations.orthogonal(layer),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.t().contiguous().t(), requires_grad=False)),
    ],
    ids=["parametrized", "strided"],
)
def test_weights_that_are_not_plain(layer: DenseLinear, calls: Calls, change: object) -> None:
    change(layer)  # type: ignore[operator]
    x = torch.randn(1, 200)
    with torch.no_grad():
        assert torch.allclose(layer(x), x @ layer.weight.t() + layer.bias, atol=1e-5)
    assert not calls.tokens


def test_new_weights_count(layer: DenseLinear) -> None:
    x = torch.randn(1, 200)
    layer(x)
    layer.load_state_dict({"weight": torch.randn(300, 200), "bias": torch.randn(300)})
    assert torch.allclose(layer(x), plain(layer)(x), atol=1e-4)


def test_hooks_run(layer: DenseLinear, calls: Calls) -> None:
    layer.register_forward_hook(lambda module, inputs, out: out + 1)
    x = torch.randn(1, 200)
    assert torch.allclose(layer(x), x @ layer.weight.t() + layer.bias + 1, atol=1e-4)
    assert calls.tokens == [1]


def test_compiled_exported_and_mapped(layer: DenseLinear, calls: Calls) -> None:
    x = torch.randn(4, 200)
    want = plain(layer)(x)
    exported = torch.export.export(layer, (x,)).module()
    for call in (torch.compile(layer, backend="eager", fullgraph=True), exported, torch.vmap(layer)):
        assert torch.allclose(call(x), want, atol=1e-5)
    assert not calls.tokens
    assert torch.allclose(layer(x), want, atol=1e-5)
    assert calls.tokens == [4]
