"""Whole encoder layers in one call of the kernel: the call itself, and the layers of models that are computed by it."""

import copy
import ctypes
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ElectraConfig,
    ElectraModel,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

import platon
from encoder_layers import BATCHES, IDS, SMALL, Layer, padding, prune
from kernel_levels import HERE, at, levels, needs_kernel
from platon.deploy.encoder_layer import EncoderLayer
from platon.deploy.layer import SparseLinear
from platon.deploy.sparse_fusion import fuse
from platon.deploy.sparse_structure import Affine, Encoder

pytestmark = needs_kernel


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are computed at once, as a trial found."""
    found = [vars(module).get("forward") for module in model.modules()]
    return [one.module for one in found if isinstance(one, EncoderLayer) and one.guess(21) is not None]


# --- the kernel -------------------------------------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("rows", "tokens"), BATCHES)
@pytest.mark.parametrize(("heads", "own", "value_own"), [(4, 10, 8), (9, 16, 32), (8, 64, 64)])  # 1, 3 and 8 groups
@torch.no_grad()
def test_the_same_bits_as_its_parts(
    level: int, threads: int, rows: int, tokens: int, heads: int, own: int, value_own: int
) -> None:
    random = torch.Generator().manual_seed(0)
    made, passed = heads * own, heads * value_own
    shapes = [(made, 24), (made, 24), (passed, 24), (24, passed), (70, 24), (24, 70)]
    matrices = [torch.randn(*shape, generator=random) * (torch.rand(shape, generator=random) < 0.3) for shape in shapes]
    layers = [SparseLinear(weight, torch.randn(len(weight), generator=random)) for weight in matrices]
    norms = [nn.LayerNorm(24), nn.LayerNorm(24)]
    for norm in norms:
        nn.init.normal_(norm.weight, generator=random)
    packed = [layer.packed() for layer in layers]
    pointers = list(map(ctypes.pointer, packed))
    encoder = Encoder((*pointers[:3],), pointers[3], (*pointers[4:],), 2, heads, *map(Affine.of, norms))
    x = torch.randn(rows, tokens, 24, generator=random)
    seen = torch.rand(rows, heads, tokens, tokens, generator=random)
    kernel = at(level)
    for mask in (None, (seen[:, :1] < 0.5).expand(-1, heads, -1, -1), seen < 0.5, seen):
        q, k, v = kernel.linears(x, packed[:3], threads)
        split = (one.view(rows, tokens, heads, -1).transpose(1, 2) for one in (q, k, v))
        attended = kernel.attend(*split, mask, own**-0.5, threads=threads).view(rows, tokens, passed)
        numbers = [(norm.weight, norm.bias, norm.eps) for norm in norms]
        middle = kernel.chain(attended, packed[3:4], x, numbers[0], threads)
        want = kernel.chain(middle, packed[4:], middle, numbers[1], threads)
        assert torch.equal(kernel.encode(x, [encoder], mask, threads), want)


@levels
@pytest.mark.parametrize("tokens", [7, 33, 100, 130])
@torch.no_grad()
def test_a_text_does_not_depend_on_those_beside_it(level: int, tokens: int) -> None:
    random = torch.Generator().manual_seed(0)
    layers = [SparseLinear(torch.randn(24, 24, generator=random)) for _ in range(5)]
    pointers = [ctypes.pointer(layer.packed()) for layer in layers]
    norm = nn.LayerNorm(24)
    encoder = Encoder((*pointers[:3],), pointers[3], (pointers[4],), 1, 4, Affine.of(norm), Affine.of(norm))
    x = torch.randn(900 // tokens, tokens, 24, generator=random)
    alone = torch.cat([at(level).encode(one[None], [encoder], None, 1) for one in x])
    torch.testing.assert_close(at(level).encode(x, [encoder], None, 2), alone, rtol=1e-4, atol=1e-4)


def test_layers_that_do_not_fit_each_other_are_refused() -> None:
    shapes = [(40, 24), (40, 24), (32, 24), (24, 32), (24, 24)]
    norm = nn.LayerNorm(24)
    kernel = at(HERE[-1])
    wrong = [(0, (39, 24)), (1, (32, 24)), (2, (33, 24)), (3, (24, 40)), (3, (32, 32)), (4, (23, 24)), (2, (32, 23))]
    for place, shape in [(0, (40, 24)), *wrong]:
        chosen = [*shapes[:place], shape, *shapes[place + 1 :]]
        layers = [SparseLinear(torch.ones(one)) for one in chosen]
        pointers = [ctypes.pointer(layer.packed()) for layer in layers]
        encoder = Encoder((*pointers[:3],), pointers[3], (pointers[4],), 1, 4, Affine.of(norm), Affine.of(norm))
        x = torch.ones(1, 6, 24)
        if shape == shapes[place]:
            kernel.encode(x, [encoder], None)
        else:
            with pytest.raises(ValueError, match="do not fit"):
                kernel.encode(x, [encoder], None)


# --- models -----------------------------------------------------------------------------------------------------------

ENCODERS: list[Callable[[], nn.Module]] = [
    lambda: BertModel(BertConfig(**SMALL)),
    lambda: RobertaModel(RobertaConfig(**SMALL)),
    lambda: XLMRobertaModel(XLMRobertaConfig(**SMALL)),
    lambda: ElectraModel(ElectraConfig(embedding_size=48, **SMALL)),
]


@pytest.mark.parametrize("build", ENCODERS)
@torch.no_grad()
def test_an_encoders_layers_are_computed_at_once(build: Callable[[], nn.Module], calls: list[int]) -> None:
    model = prune(build())
    fast = platon.sparsify(model, dense_above=1)
    assert len(layers_of(fast)) == 2
    for mask in (None, padding()):
        calls.clear()
        got = fast(IDS, attention_mask=mask).last_hidden_state
        assert calls == [2]
        want = model(IDS, attention_mask=mask).last_hidden_state
        there = torch.ones(3, 21, dtype=torch.bool) if mask is None else mask.bool()
        torch.testing.assert_close(got[there], want[there], rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(fast(IDS).last_hidden_state, model(IDS).last_hidden_state, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_other_architectures_are_left_as_they_are() -> None:
    causal = BertConfig(is_decoder=True, **SMALL)
    crossed = BertConfig(is_decoder=True, add_cross_attention=True, **SMALL)
    small = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    for model in (BertModel(causal), BertModel(crossed), ViTModel(ViTConfig(image_size=16, patch_size=4, **small))):
        fast = platon.sparsify(prune(model), dense_above=1)
        assert not layers_of(fast)


@torch.no_grad()
def test_calls_that_ask_for_more_take_the_modules_own_way(calls: list[int]) -> None:
    model = prune(BertModel(BertConfig(**SMALL)))
    fast = platon.sparsify(model, dense_above=1)
    assert len(layers_of(fast)) == 2
    for ids, expected in ((IDS, 2), (IDS[:, :5], 0), (torch.ones(1, 6, dtype=torch.int64), 2)):
        calls.clear()
        torch.testing.assert_close(fast(ids).last_hidden_state, model(ids).last_hidden_state, rtol=1e-4, atol=1e-5)
        assert sum(calls) == expected
    seen: list[Tensor] = []
    handle = fast.encoder.layer[0].attention.register_forward_hook(lambda *call: seen.append(call[2][0]))
    calls.clear()
    hooked = fast(IDS).last_hidden_state
    handle.remove()
    assert len(seen) == 1
    assert calls == [1]
    torch.testing.assert_close(hooked, fast(IDS).last_hidden_state, rtol=1e-4, atol=1e-5)
    layer, x = fast.encoder.layer[0], torch.randn(2, 8, 48)
    plain = torch.zeros(2, 1, 8, 8)
    calls.clear()
    for asked in ({"attention_mask": plain[0]}, {"something": 1}):
        layer(x, **asked)
    assert not calls
    assert torch.equal(layer(x, plain, None, past_key_values=None), layer(x, attention_mask=plain))
    assert len(calls) == 2


@torch.no_grad()
def test_hooks_that_transformers_leaves_change_nothing(calls: list[int]) -> None:
    """Once hidden states were asked for, hooks stay on layers and attentions, and mostly wait for nothing."""
    model = prune(BertModel(BertConfig(**SMALL)))
    before = platon.sparsify(model, dense_above=1)
    want = model(IDS, output_hidden_states=True)
    assert model.encoder.layer[0]._forward_hooks
    for fast in (before, platon.sparsify(model, dense_above=1)):
        every = fast(IDS, output_hidden_states=True).hidden_states
        for got, one in zip(every, want.hidden_states, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)
        fast(IDS)  # with a trial
        calls.clear()
        found = fast(IDS)
        assert calls == [2]
        assert found.hidden_states is None
        torch.testing.assert_close(found.last_hidden_state, want.last_hidden_state, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_changed_tensors_are_seen_and_training_is_refused() -> None:
    fast = platon.sparsify(prune(BertModel(BertConfig(**SMALL))), dense_above=1)
    layer, x = fast.encoder.layer[0], torch.randn(2, 8, 48)
    before = layer(x)
    own = vars(layer)["forward"]

    def differs() -> bool:
        got, want = layer(x), type(layer).forward(layer, x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        return not torch.equal(got, before)

    assert not differs()
    own.parts.norms[1].weight.mul_(2)
    assert differs()
    own.parts.norms[1].weight.div_(2)
    assert not differs()
    own.parts.norms[1].eps = 0.5
    assert differs()
    own.parts.norms[1].eps = 1e-12
    own.parts.norms[0].weight.data = torch.full((48,), 0.5)
    assert differs()
    own.parts.norms[0].weight.data = torch.ones(48)
    assert not differs()
    own.parts.norms[0].bias = nn.Parameter(torch.ones(48), requires_grad=False)
    assert differs()
    own.parts.norms[0].bias = nn.Parameter(torch.zeros(48), requires_grad=False)
    own.parts.inward[0].values = own.parts.inward[0].values * 3
    assert differs()
    own.parts.inward[0].columns = own.parts.inward[0].columns[:-1]
    with pytest.raises(ValueError, match="cannot compute with its buffers"):
        layer(x)
    with pytest.raises(ValueError, match="asked to train"):
        fast.train()(IDS)


@torch.no_grad()
def test_a_module_that_is_replaced_is_seen() -> None:
    fast = platon.sparsify(prune(BertModel(BertConfig(**SMALL))), dense_above=1)
    layer, x = fast.encoder.layer[0], torch.randn(2, 8, 48)
    before = layer(x)
    norm = nn.LayerNorm(48).requires_grad_(False)
    nn.init.normal_(norm.weight)
    for place, name, other in (
        (layer.attention.output, "LayerNorm", norm),
        (layer, "output", fast.encoder.layer[1].output),
    ):
        setattr(place, name, other)
        assert not torch.allclose(layer(x), before, atol=1e-3)
        assert torch.equal(layer(x), type(layer).forward(layer, x))
        before = layer(x)


@torch.no_grad()
def test_copies_and_folders_compute_layers_at_once(calls: list[int], tmp_path: Path) -> None:
    model = prune(BertForSequenceClassification(BertConfig(**SMALL)))
    fast = platon.sparsify(model, dense_above=1)
    want = fast(IDS).logits
    platon.save(fast, tmp_path / "fast")
    kept = io.BytesIO()
    torch.save(fast, kept)
    kept.seek(0)
    for other in (copy.deepcopy(fast), platon.load(tmp_path / "fast"), torch.load(kept, weights_only=False)):
        assert len(layers_of(other)) == 2
        calls.clear()
        assert torch.equal(other(IDS).logits, want)
        assert calls == [2]
        assert all(vars(one)["forward"].parts.module is one for one in layers_of(other))


@torch.no_grad()
def test_traced_models_have_the_modules_own_way(calls: list[int]) -> None:
    fast = platon.sparsify(prune(BertModel(BertConfig(**SMALL))), dense_above=1)
    want = fast(IDS).last_hidden_state
    program = torch.export.export(fast, (IDS,), strict=False)
    calls.clear()
    torch.testing.assert_close(program.module()(IDS).last_hidden_state, want, rtol=1e-4, atol=1e-5)
    assert not calls


# --- layers that only look like it ------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(change), Layer(change)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
            x = x[0] if isinstance(x, tuple) else x
        return x


@pytest.mark.parametrize(
    ("change", "shortened"),
    [("", True), ("order", True)]
    + [(change, False) for change in ("heads", "unmasked", "inverted", "scale", "causal", "residual")]
    + [(change, False) for change in ("other residual", "parameter", "tuple", "window")],
)
@torch.no_grad()
def test_what_computes_something_else_is_left_as_it_is(change: str, shortened: bool) -> None:
    torch.manual_seed(0)
    model = prune(Net(change))
    fast = platon.sparsify(model, dense_above=1)
    assert len(layers_of(fast)) == 2 * shortened
    x, mask = torch.randn(3, 9, 24), torch.rand(3, 1, 9, 9) < 0.6
    for seen in (None, mask):
        torch.testing.assert_close(fast(x, seen), model(x, seen), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_longer_text_is_tried_before_it_is_trusted(calls: list[int]) -> None:
    """Six tokens are all near to each other, and seen by each; of twenty-one some are not."""
    torch.manual_seed(0)
    for change, expected in (("", 2), ("window", 0)):
        model = prune(Net(change))
        fast = platon.sparsify(model, dense_above=1)
        for tokens, at_once in ((6, 2), (21, expected), (7, expected), (40, expected)):
            x = torch.randn(3, tokens, 24)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
            calls.clear()
            torch.testing.assert_close(copy.deepcopy(fast)(x), model(x), rtol=1e-4, atol=1e-5)
            calls.clear()
            fast(x)
            assert sum(calls) == at_once


@torch.no_grad()
def test_attention_that_shows_nothing_proves_nothing(calls: list[int]) -> None:
    """Without queries all tokens are attended to alike, with any number of heads; a layer that is alike may tell."""
    torch.manual_seed(0)
    model = prune(Net(""))
    for layer in model.layers:
        layer.query.weight.zero_()
        layer.query.bias.zero_()
        layer.key.bias.zero_()
    assert not layers_of(platon.sparsify(model, dense_above=1))
    for chosen in (0, 1):
        told = copy.deepcopy(model)
        nn.init.normal_(told.layers[chosen].query.weight, std=0.2)
        fast = platon.sparsify(told, dense_above=1)
        assert len(layers_of(fast)) == 2
        x = torch.randn(3, 9, 24)
        torch.testing.assert_close(fast(x), told(x), rtol=1e-4, atol=1e-5)
    calls.clear()
    tokens = torch.randn(1, 7, 24)
    assert torch.equal(fast.layers[0](hidden_states=tokens), fast.layers[0](tokens))
    assert len(calls) == 2
    with pytest.raises(TypeError):
        fast.layers[0](tokens, None, None)


@torch.no_grad()
def test_a_layer_that_is_fused_again_stays_the_same() -> None:
    fast = platon.sparsify(prune(Net("")), dense_above=1)
    x = torch.randn(3, 9, 24)
    want = fast(x)
    fuse(fast)
    assert len(layers_of(fast)) == 2
    assert torch.equal(fast(x), want)
