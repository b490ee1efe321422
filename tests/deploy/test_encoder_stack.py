"""All layers of an encoder in one call of the kernel: the call itself, and modules that do more than pass tokens on."""

import copy
import ctypes
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import platon
from encoder_layers import BATCHES, IDS, SMALL, Layer, padding, prune
from kernel_levels import HERE, at, levels, needs_kernel
from platon.deploy.encoder_stack import EncoderStack
from platon.deploy.layer import SparseLinear
from platon.deploy.sparse_structure import Affine, Encoder

pytestmark = needs_kernel

# --- the kernel -------------------------------------------------------------------------------------------------------


def layer_of(features: int, made: int, between: int, heads: int, random: torch.Generator) -> tuple[Encoder, list[Any]]:
    """A random layer as the kernel takes it, and what has to live as long."""
    shapes = [(made, features)] * 3 + [(features, made), (between, features), (features, between)]
    matrices = [torch.randn(shape, generator=random) * (torch.rand(shape, generator=random) < 0.3) for shape in shapes]
    layers = [SparseLinear(weight, torch.randn(len(weight), generator=random)) for weight in matrices]
    norms = [nn.LayerNorm(features), nn.LayerNorm(features)]
    for norm in norms:
        nn.init.normal_(norm.weight, generator=random)
    pointers = [ctypes.pointer(layer.packed()) for layer in layers]
    made_of = Encoder((*pointers[:3],), pointers[3], (*pointers[4:],), 2, heads, *map(Affine.of, norms))
    return made_of, [layers, norms]


@levels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("rows", "tokens"), [*BATCHES, (1, 6), (1, 65), (2, 130), (9, 1)])
@torch.no_grad()
def test_the_same_bits_as_one_layer_at_a_time(level: int, threads: int, rows: int, tokens: int) -> None:
    """Layers of different widths, more and fewer heads, and features that fill no block of rows."""
    random = torch.Generator().manual_seed(0)
    made = [layer_of(70, *sizes, random) for sizes in ((40, 90, 4), (8, 30, 4), (66, 5, 1))]
    x = torch.randn(rows, tokens, 70, generator=random)
    seen = torch.rand(rows, 1, tokens, tokens, generator=random).expand(-1, 4, -1, -1)
    for mask in (None, seen < 0.5, seen):
        want = x
        for layer, _ in made:
            want = at(level).encode(want, [layer], mask, threads)
        assert torch.equal(at(level).encode(x, [layer for layer, _ in made], mask, threads), want)


def test_one_layer_that_does_not_fit_is_refused() -> None:
    random = torch.Generator().manual_seed(0)
    fits, others = layer_of(24, 8, 30, 2, random), [layer_of(25, 8, 30, 2, random), layer_of(24, 8, 30, 3, random)]
    x = torch.ones(1, 6, 24)
    at(HERE[-1]).encode(x, [fits[0], fits[0]], None)
    for other, _ in others:
        with pytest.raises(ValueError, match="do not fit"):
            at(HERE[-1]).encode(x, [fits[0], other], None)


# --- modules that hold layers -----------------------------------------------------------------------------------------


class Net(nn.Module):
    """Gives its tokens to three layers, with one thing changed."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change, self.last = change, None
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
        every = []
        for place, layer in enumerate(self.layers):
            mask = attention_mask
            if self.change == "other mask" and place == 1 and mask is not None:
                mask = mask.roll(1, -1)
            if self.change == "changed mask" and place == 1 and mask is not None:
                mask[..., -1] = mask[..., 0]
            if self.change == "no mask" and place == 1:
                mask = None
            if self.change == "skips" and place == 1:
                continue
            if self.change == "scale" and layer.heads == 4:  # the layer's own attribute
                x = 0.5 * x
            if self.change == "early exit" and x.abs().mean() > 1e9:
                break
            if self.change == "kind" and not isinstance(x, Tensor):
                return torch.zeros(1)
            x = layer(x, mask)
            every.append(x)
            if self.change == "between":
                x = x + 0.1
        if self.change == "stores":
            self.last = every[0]
        if self.change == "again":
            x = self.layers[1](x, attention_mask)
        if self.change == "mean":
            return sum(every) / 3
        if self.change == "collects":
            return x, tuple(every)
        return {"output": x} if self.change == "mapping" else (x,) if self.change == "tuple" else x


JOINED = ["", "mapping", "tuple"]
OTHERS = [
    "other mask",
    "changed mask",
    "no mask",
    "skips",
    "scale",
    "early exit",
    "between",
    "stores",
    "again",
    "mean",
    "kind",
]


@pytest.mark.parametrize(
    ("change", "joined"), [*((one, True) for one in JOINED), *((one, False) for one in (*OTHERS, "collects"))]
)
@torch.no_grad()
def test_only_what_is_passed_on_is_joined(change: str, joined: bool, calls: list[int]) -> None:
    torch.manual_seed(0)
    model = prune(Net(change))
    fast = platon.sparsify(model, dense_above=1)
    assert isinstance(vars(fast)["forward"], EncoderStack)
    x, seen = torch.randn(3, 9, 24), torch.rand(3, 1, 9, 9) < 0.6
    fast(x)  # the first call tries what a layer computes
    for mask in (None, seen):
        calls.clear()
        got = fast(x, None if mask is None else mask.clone())
        same_masks = mask is None and change in ("other mask", "changed mask", "no mask")
        assert (calls == [3]) == (joined or same_masks)
        want = model(x, None if mask is None else mask.clone())
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if change == "stores":
        assert isinstance(fast.last, Tensor)


@torch.no_grad()
def test_what_changes_after_sparsify_is_seen(calls: list[int]) -> None:
    torch.manual_seed(0)
    fast = platon.sparsify(prune(Net()), dense_above=1)
    x = torch.randn(2, 8, 24)
    before = fast(x)

    def layers_in_calls() -> list[int]:
        """After a comparison with the module's own way."""
        torch.testing.assert_close(fast(x), type(fast).forward(fast, x), rtol=1e-4, atol=1e-5)
        calls.clear()
        fast(x)
        return list(calls)

    assert layers_in_calls() == [3]
    handle = fast.layers[1].register_forward_hook(lambda *call: 2 * call[2])
    assert layers_in_calls() == [1, 1, 1]
    assert not torch.equal(fast(x), before)
    handle.remove()
    handle = fast.layers[1].up.register_forward_pre_hook(lambda *call: None)
    assert layers_in_calls() == [1, 1]
    handle.remove()
    assert layers_in_calls() == [3]
    handle = nn.modules.module.register_module_forward_hook(lambda *call: None)
    assert layers_in_calls() == []
    handle.remove()
    first, second, third = fast.layers
    fast.layers = nn.ModuleList([first, third, second])
    assert layers_in_calls() == [1, 1, 1]
    fast.layers = nn.ModuleList([first, second])
    assert layers_in_calls() == [1, 1]
    fast.layers = nn.ModuleList([first, second, third])
    own = vars(second)["forward"]
    second.forward = lambda x, mask=None: own(x, mask) + 1
    assert layers_in_calls() == [1, 1, 1]
    del second.__dict__["forward"]
    assert layers_in_calls() == [1, 1]
    second.forward = own
    assert layers_in_calls() == [3]
    second.last.norm.weight.mul_(2)
    assert layers_in_calls() == [3]
    assert not torch.equal(fast(x), before)
    second.query.columns = second.query.columns[:-1]
    with pytest.raises(ValueError, match="cannot compute with its buffers"):
        fast(x)


@torch.no_grad()
def test_layers_with_heads_of_their_own_share_a_mask_that_is_the_same_for_all(calls: list[int]) -> None:
    torch.manual_seed(0)
    model = Net()
    model.layers[1] = Layer(heads=2, made=12)
    fast = platon.sparsify(prune(model), dense_above=1)
    x = torch.randn(3, 9, 24)
    fast(x)
    for heads in (1, 2, 4):
        mask = torch.rand(3, heads, 9, 9) < 0.6
        calls.clear()
        if heads == 1:
            torch.testing.assert_close(fast(x, mask), model(x, mask), rtol=1e-4, atol=1e-5)
            assert calls == [3]
        else:  # for some layers only; PyTorch says so
            with pytest.raises(RuntimeError, match="size of tensor"):
                fast(x, mask)
            assert 3 not in calls


@torch.no_grad()
def test_threads_do_not_see_each_others_tokens() -> None:
    fast = platon.sparsify(prune(BertModel(BertConfig(**SMALL))), dense_above=1)
    random = torch.Generator().manual_seed(0)
    batches = [torch.randint(3, 99, (1 + place, 8 + place), generator=random) for place in range(4)]
    want = [fast(ids).last_hidden_state for ids in batches]
    wrong: list[int] = []

    def work(place: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                got = fast(batches[place]).last_hidden_state
                wrong.extend([] if torch.equal(got, want[place]) else [place])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


@torch.no_grad()
def test_a_copy_has_layers_of_its_own(calls: list[int]) -> None:
    fast = platon.sparsify(prune(BertModel(BertConfig(**SMALL))), dense_above=1)
    before = fast(IDS, attention_mask=padding()).last_hidden_state
    other = copy.deepcopy(fast)
    other.encoder.layer[1].output.LayerNorm.weight.mul_(2)
    calls.clear()
    assert not torch.equal(other(IDS, attention_mask=padding()).last_hidden_state, before)
    assert torch.equal(fast(IDS, attention_mask=padding()).last_hidden_state, before)
    assert calls == [2, 2]
