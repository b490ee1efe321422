"""What sparse layers compute together: in the kernel, and found in models by trials."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import platon
from kernel_levels import HERE, at, levels, needs_kernel
from platon.deploy.layer import SparseLinear
from platon.deploy.sparse_fusion import fuse
from platon.deploy.sparse_matrix import from_dense
from platon.deploy.sparse_structure import Layer
from platon.deploy.sparse_sum import SparseSum

pytestmark = needs_kernel


SMALL = {"vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(0, 99, (3, 7), generator=torch.Generator().manual_seed(0))


def draw(rows: int, columns: int, density: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A sparse matrix and a bias."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=random)
    return weight * (torch.rand(rows, columns, generator=random) < density), torch.randn(rows, generator=random)


def prune(model: nn.Module) -> nn.Module:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and not any(part in name for part in ("embed", "wte", "wpe")):
                weight[torch.rand(weight.shape, generator=random) >= 0.2] = 0
    return model


# --- the kernel -------------------------------------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("tokens", [1, 5, 64, 130, 200])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_matrices_side_by_side(level: int, tokens: int, threads: int) -> None:
    shapes = ((130, 0.3), (64, 0.0), (7, 1.0))
    parts = [draw(rows, 300, density) for rows, density in shapes]
    x = torch.randn(tokens, 300)
    packed = [from_dense(weight) for weight, _ in parts]
    layers = [Layer.of(matrix, bias, "none") for matrix, (_, bias) in zip(packed, parts, strict=True)]
    for out, (weight, bias) in zip(at(level).linears(x, layers, threads), parts, strict=True):
        want = F.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)


@levels
@pytest.mark.parametrize("tokens", [1, 5, 64, 130, 200])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["alone", "sum", "own sum", "norm", "sum and norm"])
def test_matrices_one_after_the_other(level: int, tokens: int, threads: int, kind: str) -> None:
    first, first_bias = draw(150, 70, 0.3)
    last, last_bias = draw(70, 150, 0.3, seed=1)
    x = torch.randn(tokens, 70)
    added = x if kind == "own sum" else torch.randn(tokens, 100)[:, :70]  # other strides
    weight, bias = torch.randn(70), torch.randn(70)
    packed = [from_dense(first), from_dense(last)]
    layers = [Layer.of(packed[0], first_bias, "gelu"), Layer.of(packed[1], last_bias, "none")]
    norm = (weight, bias, 1e-6) if "norm" in kind else None
    got = at(level).chain(x, layers, added if "sum" in kind else None, norm, threads)
    middle = F.gelu(F.linear(x.double(), first.double(), first_bias.double()))
    want = F.linear(middle, last.double(), last_bias.double()) + (added.double() if "sum" in kind else 0)
    if norm:
        want = F.layer_norm(want, (70,), weight.double(), bias.double(), 1e-6)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_a_norm_without_numbers_and_far_from_zero() -> None:
    (weight, _), x = draw(96, 40, 0.5), torch.randn(33, 40)
    matrix, bias = from_dense(weight), torch.full((96,), 1000.0)
    got = at(HERE[-1]).chain(x, [Layer.of(matrix, bias, "none")], None, (None, None, 1e-5))
    want = F.layer_norm(F.linear(x.double(), weight.double(), bias.double()), (96,), eps=1e-5)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


def test_layers_that_do_not_fit_each_other_are_refused() -> None:
    matrices = [from_dense(torch.ones(8, 5)), from_dense(torch.ones(6, 7))]
    layers = [Layer.of(matrix, None, "none") for matrix in matrices]
    for call in (at(HERE[-1]).linears, at(HERE[-1]).chain):
        with pytest.raises(ValueError, match="arrays of a sparse matrix do not fit 8 × 5 weights"):
            call(torch.ones(3, 5), layers)
    with pytest.raises(ValueError, match="do not fit"):
        at(HERE[-1]).chain(torch.ones(3, 5), layers[:1], None, (torch.ones(7), None, 1e-5))


# --- what is found in models ------------------------------------------------------------------------------------------


def bert() -> BertModel:
    torch.manual_seed(0)
    return prune(BertModel(BertConfig(**SMALL, intermediate_size=96))).eval()


def test_bert_computes_together_what_belongs_together() -> None:
    model = bert()
    fast = platon.sparsify(model, dense_above=1.0)
    for block in fast.encoder.layer:
        attention = block.attention.self
        assert attention.query.siblings == (attention.key, attention.value)
        assert attention.key.is_sibling
        assert attention.value.is_sibling
        assert isinstance(block.attention.output, SparseSum)
        assert isinstance(block.output, SparseSum)
        assert block.output.dense.before == (block.intermediate.dense,)
    assert {name for name, _ in fast.named_buffers()} >= {
        "encoder.layer.0.intermediate.dense.values",
        "encoder.layer.0.output.dense.bias",
        "encoder.layer.1.attention.self.key.counts",
    }
    mask = torch.ones_like(IDS)
    mask[0, 4:] = 0
    with torch.no_grad():
        want = model(IDS, attention_mask=mask).last_hidden_state
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for again in (fast, copy.deepcopy(fast)):
                torch.testing.assert_close(
                    again(IDS, attention_mask=mask).last_hidden_state, want, rtol=1e-4, atol=1e-5
                )


def test_a_loaded_model_computes_together_too(tmp_path: Path) -> None:
    fast = platon.sparsify(bert(), dense_above=1.0)
    again = platon.load(platon.save(fast, tmp_path / "fast"))
    assert isinstance(again.encoder.layer[1].output, SparseSum)
    assert again.encoder.layer[1].output.dense.before
    assert again.encoder.layer[1].attention.self.query.siblings
    assert torch.equal(again(IDS).last_hidden_state, fast(IDS).last_hidden_state)
    assert again.state_dict().keys() == fast.state_dict().keys()


def test_gpt2_and_llama() -> None:
    torch.manual_seed(0)
    gpt2 = prune(GPT2Model(GPT2Config(vocab_size=99, n_embd=48, n_layer=2, n_head=2))).eval()
    fast = platon.sparsify(gpt2, dense_above=1.0)
    assert all(block.mlp.c_proj.before == (block.mlp.c_fc,) for block in fast.h)
    torch.testing.assert_close(fast(IDS).last_hidden_state, gpt2(IDS).last_hidden_state, rtol=1e-4, atol=1e-5)
    config = LlamaConfig(**SMALL, num_key_value_heads=1, intermediate_size=96)
    llama = prune(LlamaModel(config)).eval()
    fast = platon.sparsify(llama, dense_above=1.0)
    for block in fast.layers:
        attention = block.self_attn
        assert attention.q_proj.siblings == (attention.k_proj, attention.v_proj), "o_proj reads something else"
        assert block.mlp.gate_proj.siblings == (block.mlp.up_proj,)
    torch.testing.assert_close(fast(IDS).last_hidden_state, llama(IDS).last_hidden_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_layers_that_gather_become_sparse(name: str, tmp_path: Path) -> None:
    """After `compact` a layer reads some features; its sparse form has zeros for the others."""
    torch.manual_seed(0)
    model = bert() if name == "bert" else prune(GPT2Model(GPT2Config(vocab_size=99, n_embd=48, n_layer=2, n_head=2)))
    parts = [module for module in model.eval().modules() if hasattr(module, "weight") and module.weight.ndim == 2]
    with torch.no_grad():
        for part in parts[-6:]:
            if isinstance(part, nn.Linear):
                part.weight[:, ::3] = 0
            elif type(part).__name__ == "Conv1D":
                part.weight[::3] = 0
    small = platon.compact(model)
    assert any(hasattr(module, "gathers_columns") for module in small.modules())
    fast = platon.sparsify(small, dense_above=1.0)
    assert not any(hasattr(module, "gathers_columns") for module in fast.modules())
    want = model(IDS).last_hidden_state
    torch.testing.assert_close(fast(IDS).last_hidden_state, want, rtol=1e-4, atol=1e-5)
    again = platon.load(platon.save(fast, tmp_path / "fast"))
    assert torch.equal(again(IDS).last_hidden_state, fast(IDS).last_hidden_state)


class Block(nn.Module):
    """A feed-forward part with a sum and a norm, computed in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.start, self.end = nn.Sequential(nn.Linear(48, 96), nn.GELU()), End(kind)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        middle = self.start(x)
        if self.kind == "used twice":
            return self.end(middle, x) + middle.mean(-1, keepdim=True)
        return self.end(middle, x)


class End(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dense, self.norm, self.kind = nn.Linear(96, 48), nn.LayerNorm(48), kind

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        match self.kind:
            case "norm first":
                return self.norm(self.dense(x)) + added
            case "no sum":
                return self.norm(self.dense(x))
            case "scaled":
                return self.norm(self.dense(x) + 1.01 * added)
            case _:
                return self.norm(self.dense(x) + added)


@pytest.mark.parametrize("kind", ["plain", "used twice", "norm first", "no sum", "scaled"])
def test_only_what_a_trial_confirms(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(prune(Block(kind)), prune(Block("plain"))).eval()
    fast = platon.sparsify(model, dense_above=1.0)
    block = fast[0]
    assert isinstance(block.end, SparseSum) == (kind in ("plain", "used twice"))
    x = torch.randn(3, 7, 48)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    assert bool(block.end.dense.before) == (kind != "used twice")
    assert isinstance(fast[1].end, SparseSum)


class Adding(nn.Module):
    """norm(dense(x) + factor · added), where one of several attributes holds the factor."""

    def __init__(self, kind: str, factor: float) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(48, 48), nn.LayerNorm(48)
        self.held: Any = {
            "number": lambda: factor,
            "tensor": lambda: torch.tensor(factor),
            "closure": lambda: lambda: factor,
            "list": lambda: [[factor]],
            "object": lambda: {"factor": factor},
        }[kind]()

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        held = self.held() if callable(self.held) else self.held
        factor = held[0][0] if isinstance(held, list) else held["factor"] if isinstance(held, dict) else held
        return self.norm(self.dense(x) + factor * added)


@pytest.mark.parametrize("kind", ["number", "tensor", "closure", "list", "object"])
def test_what_holds_for_one_module_is_not_taken_for_another(kind: str) -> None:
    """Modules of one class and one shape, which differ in what they hold: each has a trial of its own."""
    torch.manual_seed(0)
    model = nn.ModuleList(prune(Adding(kind, factor)) for factor in (1.0, 1.5, 1.0)).eval()
    fast = platon.sparsify(model, dense_above=1.0)
    assert [isinstance(one, SparseSum) for one in fast] == [True, False, True]
    x = torch.randn(3, 48)
    for one, other in zip(fast, model, strict=True):
        torch.testing.assert_close(one(x, x), other(x, x).detach(), rtol=1e-4, atol=1e-5)


class Reader(nn.Module):
    """Three layers of which two read the same tokens; the tokens of the third are other ones, or changed in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(48, 48) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        total = self.a(x) + self.b(x)
        if self.kind == "in place":
            x.mul_(2)
        elif self.kind == "other":
            x = x * 2
        return total + self.c(x)


@pytest.mark.parametrize("kind", ["same", "other", "in place"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_siblings_are_those_that_read_the_same_tokens(kind: str, context: type[torch.no_grad]) -> None:
    torch.manual_seed(0)
    model = prune(Reader(kind)).eval()
    fast = platon.sparsify(model, dense_above=1.0)
    x = torch.randn(3, 7, 48)
    with context():
        x = x.clone()  # one of inference mode where that is on
        for _ in range(3):
            torch.testing.assert_close(fast(x.clone()), model(x.clone()), rtol=1e-4, atol=1e-5)


def test_fusing_twice_changes_nothing() -> None:
    fast = platon.sparsify(bert(), dense_above=1.0)
    want = fast(IDS).last_hidden_state
    fuse(fast)
    again = platon.sparsify(fast, dense_above=1.0)
    assert torch.equal(fast(IDS).last_hidden_state, want)
    assert torch.equal(again(IDS).last_hidden_state, want)


def test_what_is_added_has_to_fit() -> None:
    fast = platon.sparsify(bert(), dense_above=1.0)
    end = fast.encoder.layer[0].output
    x = torch.randn(3, 48)
    assert end(hidden_states=x, input_tensor=x).shape == (3, 48)
    for added in (torch.randn(3, 47), torch.randn(48), torch.randn(3, 48).double()):
        with pytest.raises(ValueError, match=r"adds float32 on the CPU of shape \(3, 48\) to its product, got"):
            end(x, added)
    with pytest.raises(ValueError, match="asked to train"):
        end(x, x.clone().requires_grad_())


def test_export_and_compile_see_plain_layers() -> None:
    torch.manual_seed(0)
    fast = platon.sparsify(prune(Block("plain")).eval(), dense_above=1.0)
    assert isinstance(fast.end, SparseSum)
    assert isinstance(fast.start[0], SparseLinear)
    x = torch.randn(3, 48)
    program = torch.export.export(fast, (x,))
    assert sum("sparse_linear" in str(node.target) for node in program.graph.nodes) == 2
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    for one in (program.module(), compiled):
        torch.testing.assert_close(one(x), fast(x), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
