"""`platon.sparsify` on models of several kinds, with the compiled kernel and with what takes its place."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    GPT2Config,
    GPT2Model,
    T5Config,
    T5EncoderModel,
    ViTForImageClassification,
)
from transformers.pytorch_utils import Conv1D

import platon
from platon.deploy import calibration, sparse_kernel
from platon.deploy.layer import CsrLinear, SparseLinear
from platon.deploy.sparse_matrix import from_dense
from platon.deploy.sparse_operator import csr_linear, sparse_linear

SMALL = {"vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(0, 99, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["kernel", "torch.sparse"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """The class that sparse layers are of; a machine without a compiler goes through the second alone."""
    if request.param == "kernel":
        if isinstance(sparse_kernel.find(), str):
            pytest.skip(str(sparse_kernel.find()))
        return SparseLinear
    monkeypatch.setattr(sparse_kernel, "find", lambda: "this test hides it")
    return CsrLinear


pytestmark = [
    pytest.mark.filterwarnings("ignore:no compiled sparse kernel"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # DeBERTa's
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found first, so that no test builds it again; then nothing is read from or left in the user's cache."""
    sparse_kernel.find()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def prune(model: nn.Module, density: float = 0.2) -> nn.Module:
    """Every linear weight at random, unevenly."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                share = density * 2 * torch.rand((), generator=random)
                weight[torch.rand(weight.shape, generator=random) >= share] = 0
    return model


def sparse_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear | CsrLinear)}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 80), nn.Tanh(), nn.Linear(80, 5, bias=False))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(48, 2, 96, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def deberta() -> nn.Module:
    from transformers import DebertaV2Model  # here, where the warning that its import gives is let pass

    config = DebertaV2Config(**SMALL, intermediate_size=96, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return DebertaV2Model(config)


def picture(model: ViTForImageClassification) -> Tensor:
    return model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))).logits


def states(model: nn.Module) -> Tensor:
    return model(IDS).last_hidden_state


def numbers(model: nn.Module) -> Tensor:
    return model(torch.randn(3, 7, 48, generator=torch.Generator().manual_seed(0)))


# How to build it, how to run it, how many of its linear layers are sparse, and how many of those take an activation.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], int, int]] = {
    "bert": (lambda: BertModel(BertConfig(**SMALL, intermediate_size=96)), states, 13, 2),
    "deberta": (deberta, states, 16, 2),
    "gpt2": (lambda: GPT2Model(GPT2Config(vocab_size=99, n_embd=48, n_layer=2, n_head=2)), states, 8, 2),
    "albert": (
        lambda: AlbertModel(AlbertConfig(**SMALL, embedding_size=16, intermediate_size=96)),
        states,
        8,
        1,
    ),
    "t5": (
        lambda: T5EncoderModel(T5Config(vocab_size=99, d_model=48, d_kv=24, d_ff=96, num_layers=2, num_heads=2)),
        states,
        12,
        2,
    ),
    "mlp": (mlp, numbers, 3, 1),
    "encoder": (encoder, numbers, 4, 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_outputs_and_an_untouched_model(name: str, engine: type[nn.Module]) -> None:
    build, run, count, fused = MODELS[name]
    torch.manual_seed(0)
    model = prune(build()).train()
    before = copy.deepcopy(model.state_dict())
    fast = platon.sparsify(model, dense_above=1.0)
    layers = sparse_layers(fast)
    assert {type(layer) for layer in layers.values()} == {engine}
    assert len(layers) == count
    assert sum(layer.activation != "none" for layer in layers.values()) == fused
    assert not fast.training
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not sparse_layers(model)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    want = run(model.eval())
    got = run(fast)  # without no_grad: nothing in it asks for a gradient
    assert not got.requires_grad
    torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    torch.testing.assert_close(run(fast), got, rtol=0, atol=0)


def test_vit_and_its_dropout(vit: ViTForImageClassification, engine: type[nn.Module]) -> None:
    fast = platon.sparsify(prune(vit), dense_above=1.0)
    fused = [name for name, layer in sparse_layers(fast).items() if layer.activation == "gelu"]
    assert len(fused) == 2
    torch.testing.assert_close(picture(fast), picture(vit.eval()).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full(density: float, engine: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = mlp().eval()
    for layer in model:
        if isinstance(layer, nn.Linear) and not density:
            nn.init.zeros_(layer.weight)
    fast = platon.sparsify(model, dense_above=1.0)
    assert len(sparse_layers(fast)) == 3
    torch.testing.assert_close(numbers(fast), numbers(model).detach(), rtol=1e-4, atol=1e-6)


# --- activations ------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Holds what a feed-forward part holds, and does something else with it."""

    def __init__(self, act: nn.Module, forward: str) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(48, 48), act, nn.Linear(48, 48)
        self.kind = forward

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "plain":
                return self.second(self.act(self.first(x)))
            case "before":
                return self.second(self.first(self.act(x)))
            case "after":
                return self.act(self.second(self.first(x)))
            case "twice":
                return self.act(self.second(self.act(self.first(x))))
            case _:
                return self.second(self.act(self.first(x))) + x


@pytest.mark.parametrize("kind", ["plain", "before", "after", "twice", "residual"])
@pytest.mark.parametrize(
    ("act", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.SiLU(), "none"),
        (nn.PReLU(), "none"),
        (nn.LayerNorm(48), "none"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_activation_is_taken_only_where_it_follows(
    act: nn.Module, name: str, kind: str, engine: type[nn.Module]
) -> None:
    torch.manual_seed(0)
    model = prune(Odd(act, kind)).eval()
    fast = platon.sparsify(model, dense_above=1.0)
    assert fast.first.activation == (name if kind in ("plain", "residual") else "none")
    assert fast.second.activation == (name if kind == "after" else "none")
    torch.testing.assert_close(numbers(fast), numbers(model).detach(), rtol=1e-4, atol=1e-5)


def test_an_activation_that_is_used_elsewhere_stays(engine: type[nn.Module]) -> None:
    torch.manual_seed(0)
    act = nn.GELU()
    model = prune(nn.Sequential(Odd(act, "plain"), act, Odd(act, "plain"))).eval()
    fast = platon.sparsify(model, dense_above=1.0)
    assert [layer.activation for layer in sparse_layers(fast).values()] == ["none"] * 4
    torch.testing.assert_close(numbers(fast), numbers(model).detach(), rtol=1e-4, atol=1e-5)


class Gated(nn.Module):
    """A gated feed-forward part; `long_only`: the gate is used for long inputs alone."""

    def __init__(self, act: nn.Module, long_only: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.act = nn.Linear(48, 96), nn.Linear(48, 96), nn.Linear(96, 48), act
        self.long_only = long_only

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)
        if not self.long_only or x.shape[-2] > 50:
            made = made * (self.gate(x) if self.long_only else self.act(self.gate(x)))
        return self.down(made)


@pytest.mark.parametrize(("act", "name"), [(nn.GELU(approximate="tanh"), "gelu_tanh"), (nn.SiLU(), "none")])
def test_the_gate_of_a_feed_forward_part_takes_the_activation(
    act: nn.Module, name: str, engine: type[nn.Module]
) -> None:
    torch.manual_seed(0)
    model = prune(nn.Sequential(Gated(act), Gated(copy.deepcopy(act)))).eval()
    with torch.no_grad():
        model[0].down.weight.zero_()  # whatever comes before it: the other one, which is alike, shows what follows what
    fast = platon.sparsify(model, dense_above=1.0)
    assert [layer.activation for layer in sparse_layers(fast).values()] == [name, "none", "none"] * 2
    torch.testing.assert_close(numbers(fast), numbers(model).detach(), rtol=1e-4, atol=1e-5)


def test_an_activation_that_a_trial_does_not_see_stays(engine: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = prune(Gated(nn.GELU(), long_only=True)).eval()
    fast = platon.sparsify(model, dense_above=1.0)
    assert [layer.activation for layer in sparse_layers(fast).values()] == ["none"] * 3
    x = torch.randn(60, 48)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_each_activation_in_a_row_is_taken(engine: type[nn.Module]) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(48, 48) for _ in range(3)]
    model = prune(nn.Sequential(linears[0], nn.GELU(), linears[1], nn.ReLU(), linears[2])).eval()
    fast = platon.sparsify(model, dense_above=1.0)
    assert [layer.activation for layer in sparse_layers(fast).values()] == ["gelu", "relu", "none"]
    torch.testing.assert_close(numbers(fast), numbers(model).detach(), rtol=1e-4, atol=1e-5)


# --- what becomes sparse ----------------------------------------------------------------------------------------------


def test_dense_where_the_share_of_non_zeros_is_higher(engine: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = mlp()
    with torch.no_grad():
        model[0].weight[:, ::2] = 0
        model[2].weight[:, 3:] = 0
    fast = platon.sparsify(model, dense_above=0.4)
    assert list(sparse_layers(fast)) == ["2"]
    assert type(fast[0]) is nn.Linear
    assert list(sparse_layers(platon.sparsify(model, dense_above=0.5))) == ["0", "2"]
    again = platon.sparsify(fast, dense_above=1.0)
    assert len(sparse_layers(again)) == 3
    torch.testing.assert_close(numbers(again), numbers(model.eval()).detach(), rtol=1e-4, atol=1e-5)


def test_calibration_finds_where_sparse_stops_winning(
    engine: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that favours sparse layers up to 30 % and knows shapes apart; each is measured once, then known."""
    measured: list[tuple[int, ...]] = []

    def gain(dense: Callable[[], Tensor], sparse: Callable[[], Tensor]) -> float:
        torch.testing.assert_close(dense(), sparse(), rtol=1e-4, atol=1e-4)
        weight = dense.func.weight  # type: ignore[attr-defined]
        measured.append(tuple(weight.shape))
        share = int(weight.count_nonzero()) / weight.numel()
        return 0.33 / share * calibration._GAIN if weight.shape[0] == 96 else 0.5

    monkeypatch.setattr(calibration, "gain", gain)
    make = SparseLinear if engine is SparseLinear else CsrLinear
    assert calibration.limit(make, 96, 48, 128) == 0.3
    assert calibration.limit(make, 80, 96, 128) == 0
    assert calibration.limit(make, 5, 80, 128) == 0
    assert set(measured) == {(96, 48), (80, 96)}, "a layer of a few weights is not worth measuring"
    assert 3 < len(measured) < 12
    count = len(measured)
    model = mlp()
    with torch.no_grad():
        model[0].weight[:, 14:] = 0  # 29 %
        model[2].weight.zero_()
    assert list(sparse_layers(platon.sparsify(model))) == ["0"]
    assert len(measured) == count, "read from the cache"
    (file,) = (tmp_path / "cache" / "platon").glob("speed-*.json")
    assert len(json.loads(file.read_text())) == 2
    calibration.limit(make, 96, 48, 16)
    assert len(measured) > count, "another number of tokens is another question"
    for damage in ("{", "[1]", '{"a": "b"}', '{"a": null}'):
        file.write_text(damage)
        assert calibration.limit(make, 96, 48, 128) == 0.3


def test_few_tokens_are_measured_with_weights_that_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many copies as it takes take turns; otherwise a decoder's layers would be judged by their speed in a cache."""
    seen: list[nn.Linear] = []
    monkeypatch.setattr(calibration, "_COLD", 3 * 96 * 48 * 4)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: seen.append(self) or F.linear(x, self.weight, self.bias))

    def gain(dense: Callable[[], Tensor], sparse: Callable[[], Tensor]) -> float:
        seen.clear()
        for _ in range(6):
            torch.testing.assert_close(dense(), sparse(), rtol=1e-4, atol=1e-4)
        assert len({id(one) for one in seen}) == 3
        return 2.0

    monkeypatch.setattr(calibration, "gain", gain)
    assert calibration.limit(CsrLinear, 96, 48, 1) == 0.6


def test_calibration_survives_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    monkeypatch.setattr(calibration, "gain", lambda dense, sparse: 2.0)
    assert calibration.limit(CsrLinear, 96, 48, 128) == 0.6


def test_calibration_measures_for_real(engine: type[nn.Module]) -> None:
    """A number, within its range, and the same one again; which one is the machine's business."""
    first = calibration.limit(SparseLinear if engine is SparseLinear else CsrLinear, 128, 96, 16)
    assert 0 <= first <= 0.6
    assert calibration.limit(SparseLinear if engine is SparseLinear else CsrLinear, 128, 96, 16) == first


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def fast(engine: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return platon.sparsify(prune(mlp()), dense_above=1.0)


def test_training_is_refused(fast: nn.Module) -> None:
    x = torch.randn(2, 48)
    with pytest.raises(ValueError, match=r"for inference and was asked to train; call \.eval\(\)"):
        fast.train()(x)
    fast.eval()
    with pytest.raises(ValueError, match="asked to train"):
        fast(x.requires_grad_())
    with torch.no_grad():
        assert fast(x).shape == (2, 5)


def test_other_numbers_are_refused(fast: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"takes float32 on the CPU with 48 features last, got torch.float64 of shape"):
        fast(torch.randn(2, 48).double())
    with pytest.raises(ValueError, match=r"48 features last, got torch.float32 of shape \(2, 47\)"):
        fast(torch.randn(2, 47))
    with pytest.raises(ValueError, match=r"'0.weight' is torch.bfloat16 on cpu.*call model.float\(\).cpu\(\) first"):
        platon.sparsify(mlp().bfloat16())
    with pytest.raises(ValueError, match=r"dense_above must be in \[0, 1\], got 30; write 0.3"):
        platon.sparsify(mlp(), dense_above=30)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        platon.sparsify(mlp(), tokens=0)
    with pytest.raises(ValueError, match="Tanh has no linear layers"):
        platon.sparsify(nn.Tanh())


def test_a_model_cast_to_half_precision_is_refused(fast: nn.Module) -> None:
    with pytest.raises(ValueError, match="leave the model in float32"):
        fast.half()(torch.randn(2, 48).half())


class Gathered(Conv1D):
    """Is a Conv1D, and more than one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(-1))


def test_subclasses_stay(engine: type[nn.Module]) -> None:
    model = nn.Sequential(Gathered(96, 48), Conv1D(5, 96)).eval()
    fast = platon.sparsify(model, dense_above=1.0)
    assert list(sparse_layers(fast)) == ["1"]
    torch.testing.assert_close(numbers(fast), numbers(model).detach(), rtol=1e-4, atol=1e-6)


def test_hooked_and_parametrized_layers_stay(engine: type[nn.Module]) -> None:
    model = prune(mlp())
    seen = []
    model[0].register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    nn.utils.parametrizations.weight_norm(model[2])
    fast = platon.sparsify(model, dense_above=1.0)
    assert list(sparse_layers(fast)) == ["4"]
    numbers(fast)
    assert seen == [(3, 7, 96)]


def test_the_fallback_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_kernel, "find", lambda: "there is no C compiler ('cc' is not found); install one")
    with pytest.warns(
        UserWarning, match=r"no compiled sparse kernel: there is no C compiler .* torch.sparse takes its"
    ):
        platon.sparsify(prune(mlp()), dense_above=1.0)


# --- compiled, exported, copied ---------------------------------------------------------------------------------------

needs_kernel = pytest.mark.skipif(isinstance(sparse_kernel.find(), str), reason=f"no kernel: {sparse_kernel.find()}")


@pytest.fixture
def sparse(engine: type[nn.Module]) -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield platon.sparsify(prune(nn.Sequential(Odd(nn.GELU(), "plain"), nn.Linear(48, 4))), dense_above=1.0)
    torch._dynamo.reset()


@needs_kernel
def test_the_op_keeps_the_rules_of_ops() -> None:
    matrix = from_dense(prune(nn.Linear(48, 70)).weight)
    for x in (torch.randn(3, 48), torch.randn(2, 3, 48), torch.randn(48)):
        arguments = (*matrix[:4], torch.randn(70), matrix.rows, matrix.width, "gelu")
        torch.library.opcheck(sparse_linear, (x, *arguments))


def test_the_op_of_the_fallback_keeps_them_too() -> None:
    layer = CsrLinear(prune(nn.Linear(48, 70)).weight)
    for bias in (None, torch.randn(70)):
        held = (layer.starts, layer.columns, layer.values, bias, 70, "none")
        torch.library.opcheck(csr_linear, (torch.randn(2, 3, 48), *held))


def test_compile_sees_through(sparse: nn.Module) -> None:
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for shape in ((3, 48), (5, 48), (2, 3, 48)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), sparse(x), rtol=0, atol=0)


def test_export_sees_through(sparse: nn.Module, engine: type[nn.Module]) -> None:
    tokens = torch.export.Dim("tokens", min=1, max=512)
    program = torch.export.export(sparse, (torch.randn(4, 48),), dynamic_shapes=({0: tokens},))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count(f"platon.{'sparse' if engine is SparseLinear else 'csr'}_linear.default") == 3
    x = torch.randn(130, 48)
    torch.testing.assert_close(program.module()(x), sparse(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_whoever_records_sees_an_operator(sparse: nn.Module) -> None:
    """And not the numbers that went by while recording."""
    x, other = torch.randn(3, 48), torch.randn(3, 48)
    with torch.no_grad():
        for recorded in (make_fx(sparse)(x), torch.jit.trace(sparse, x, check_trace=False)):
            torch.testing.assert_close(recorded(other), sparse(other), rtol=0, atol=0)


def test_a_program_that_needs_the_kernel_says_so(sparse: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported or copied to a machine without it."""
    if isinstance(sparse[1], CsrLinear):
        pytest.skip("needs none")
    monkeypatch.setattr(sparse_kernel, "find", lambda: "there is no C compiler")
    with pytest.raises(ValueError, match="this model needs the compiled kernel, and there is no C compiler; call"):
        sparse(torch.randn(3, 48))


def test_state_and_copies(sparse: nn.Module) -> None:
    x = torch.randn(3, 48)
    twin = copy.deepcopy(sparse)
    torch.testing.assert_close(twin(x), sparse(x), rtol=0, atol=0)
    twin[1].values.zero_()
    assert not torch.equal(twin(x), sparse(x))
    twin.load_state_dict(sparse.state_dict())
    torch.testing.assert_close(twin(x), sparse(x), rtol=0, atol=0)
    dense = F.linear(sparse[0](x), sparse[1].weight, sparse[1].bias)
    torch.testing.assert_close(dense, sparse(x), rtol=1e-4, atol=1e-6)
    assert "kept=" in repr(sparse)


def test_a_bert_classifier_end_to_end(
    bert: BertForSequenceClassification, batch: dict[str, Tensor], engine: type[nn.Module]
) -> None:
    """Pruned by the pruner, measured by the clock: whatever it decides, the outputs are the model's."""
    optimizer = torch.optim.SGD(bert.parameters(), lr=0.1)
    platon.Pruner(bert, optimizer, schedule=platon.Constant(0.1))
    bert(**batch).loss.backward()
    optimizer.step()
    fast = platon.sparsify(bert, tokens=32)
    bert.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(**batch).logits, bert(**batch).logits, rtol=1e-4, atol=1e-5)


# --- the library ------------------------------------------------------------------------------------------------------


def find_in_a_process(**environment: str) -> str:
    """What `sparse_kernel.find` gives in a process with this environment."""
    script = (
        "from platon.deploy.sparse_kernel import find\n"
        "found = find()\n"
        "print(found if isinstance(found, str) else 'found')"
    )
    return in_a_process(script, **environment)


def in_a_process(script: str, **environment: str) -> str:
    """What it prints."""
    source = str(Path(platon.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": source, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@needs_kernel
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted where Linux lists them")
def test_the_threads_are_those_that_pytorch_has() -> None:
    """No second pool: after a dense product on two threads a sparse one starts none, and two is what it is given."""
    script = (
        "import os, torch\n"
        "from platon.deploy.layer import SparseLinear\n"
        "torch.set_num_threads(2)\n"
        "x, dense = torch.randn(256, 512), torch.nn.Linear(512, 1024).requires_grad_(False)\n"
        "sparse = SparseLinear(dense.weight)\n"
        "x @ x.t(), dense(x), (x.repeat(64, 1) * 2).sum()\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "sparse(x)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    assert in_a_process(script, PATH=os.environ["PATH"]) == "0"


def test_a_machine_without_a_compiler_or_with_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sparse_kernel.build(tmp_path / "no" / "folder.so", "--no-such-option") is not None
    assert not any((tmp_path / "no").glob("*"))
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setenv("PATH", "/nowhere")
    problem = sparse_kernel.build(tmp_path / "kernel.so")
    assert problem is not None
    assert "there is no C compiler ('/nowhere/cc' is not found)" in problem
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    problem = sparse_kernel.build(tmp_path / "file" / "kernel.so")
    assert problem is not None


def test_the_kernel_can_be_named_or_turned_off(tmp_path: Path) -> None:
    off = find_in_a_process(PLATON_KERNEL="")
    assert off == "PLATON_KERNEL is empty, which turns the compiled kernel off"
    (tmp_path / "bad.so").write_text("not a library")
    assert "does not load" in find_in_a_process(PLATON_KERNEL=str(tmp_path / "bad.so"))


@needs_kernel
def test_a_kernel_named_without_a_folder_is_a_file_here(tmp_path: Path) -> None:
    found = sparse_kernel.find()
    assert isinstance(found, sparse_kernel.SparseKernel)
    shutil.copy(found.path, tmp_path / "kernel.so")
    script = f"import os\nos.chdir({str(tmp_path)!r})\nfrom platon.deploy.sparse_kernel import find\nprint(find().path)"
    assert in_a_process(script, PLATON_KERNEL="kernel.so") == "kernel.so"


@needs_kernel
def test_a_library_from_other_sources_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sparse_kernel.build(tmp_path / "own" / "first.so"):
        pytest.skip("no compiler")
    source = tmp_path / "source"
    source.mkdir()
    for file in sparse_kernel._SOURCES:
        (source / file.name).write_bytes(file.read_bytes())
    suffix = sparse_kernel.EXTENSION_SUFFIXES[0]
    (source / f"_sparse{suffix}").write_bytes((tmp_path / "own" / "first.so").read_bytes())
    monkeypatch.delenv("PLATON_KERNEL", raising=False)
    monkeypatch.setattr(sparse_kernel, "installed", sparse_kernel.installed.__wrapped__)  # looks again at each call
    monkeypatch.setattr(sparse_kernel, "_HERE", source)
    monkeypatch.setattr(sparse_kernel, "_SOURCES", tuple(source / file.name for file in sparse_kernel._SOURCES))
    found = sparse_kernel.find.__wrapped__()
    assert found.path.parent == source
    (source / "sparse.c").write_text((source / "sparse.c").read_text() + "/* changed */\n")
    found = sparse_kernel.find.__wrapped__()
    assert found.path.parent == tmp_path / "cache" / "platon"
    assert found.digest == sparse_kernel.source_digest()


# --- buffers that were changed ----------------------------------------------------------------------------------------


def altered(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """A change of one buffer: through `load_state_dict` where that takes it, as a damaged file would bring it."""

    def change_buffer(layer: nn.Module) -> None:
        state = {key: value.clone() for key, value in layer.state_dict().items()}
        changed = change(state[name])
        if changed.shape == state[name].shape:
            layer.load_state_dict({**state, name: changed}, assign=True)
        else:
            setattr(layer, name, changed)

    return change_buffer


def first_set(value: int) -> Callable[[Tensor], Tensor]:
    return lambda array: array.index_fill(0, torch.tensor([0]), value)


BUFFERS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "half": (lambda layer: layer.half(), "'values' is torch.float16 on cpu, it has to be torch.float32"),
    "meta": (lambda layer: layer.to("meta"), "'values' is torch.float32 on meta"),
    "counts, more": (altered("counts", lambda a: a + 64), "do not add up to the values"),
    "counts, negative": (altered("counts", first_set(-1)), "'counts' names a row of a panel twice"),
    "counts, a row twice": (altered("counts", lambda a: a // 64 * 64), "'counts' names a row of a panel twice"),
    "a row that is not there": (altered("counts", lambda a: a ^ 63), "in a row that is not there, of 70"),
    "columns": (altered("columns", first_set(48)), "'columns' names a column that is not there, of 48"),
    "starts": (altered("starts", first_set(1 << 40)), "'starts' and the numbers of non-zeros"),
    "starts, negative": (altered("starts", first_set(-5)), "'starts' and the numbers of non-zeros"),
    "values, short": (altered("values", lambda a: a[:-1]), "'columns' has .* elements, .* fit this matrix"),
    "values, strided": (altered("values", lambda a: a.repeat_interleave(2)[::2]), "it has to be one row"),
    "values, one repeated": (altered("values", lambda a: a[:1].expand(len(a))), "it has to be one row"),
    "bias, short": (altered("bias", lambda a: a[:3]), "'bias' has 3 elements, 70 fit this matrix"),
    "bias, double": (altered("bias", lambda a: a.double()), "'bias' is torch.float64"),
    "width": (lambda layer: setattr(layer, "width", 0), "in panels of 0 columns cannot be"),
    "out_features": (lambda layer: setattr(layer, "out_features", 700), "'counts' has .* elements, .* fit this"),
}


@needs_kernel
@pytest.mark.parametrize("change", BUFFERS)
def test_buffers_that_do_not_fit_are_refused(change: str) -> None:
    """By the layer before anything is read, and the same layer works again with the buffers that it had."""
    torch.manual_seed(0)
    layer = SparseLinear(prune(nn.Linear(48, 70)).weight, torch.randn(70))
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.randn(5, 48)
    expected = layer(x)
    alter, said = BUFFERS[change]
    alter(layer)
    for _ in range(2):  # a refusal is not remembered as a check
        with pytest.raises(ValueError, match=said) as caught:
            layer(x)
        assert "\n" not in str(caught.value)
    layer.width, layer.out_features = 48, 70
    for name, value in state.items():
        setattr(layer, name, value)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)


@needs_kernel
def test_a_buffer_changed_in_place_is_noticed() -> None:
    layer = SparseLinear(prune(nn.Linear(48, 70)).weight)
    x = torch.randn(5, 48)
    layer(x)
    layer.columns[0] = 77
    with pytest.raises(ValueError, match="'columns' names a column that is not there"):
        layer(x)


@needs_kernel
def test_the_operator_refuses_arrays_of_another_kind() -> None:
    """What an exported program calls; it checks shapes and precisions, and the kernel the rest."""
    matrix = from_dense(prune(nn.Linear(48, 70)).weight)
    x, sizes = torch.randn(5, 48), (70, matrix.width, "none")
    with pytest.raises(ValueError, match=r"'values' is torch\.float16"):
        sparse_linear(x, matrix.values.half(), *matrix[1:4], None, *sizes)
    with pytest.raises(ValueError, match="arrays of a sparse matrix do not fit 70 × 48 weights"):
        sparse_linear(x, *matrix[:3], matrix.starts + 1, None, *sizes)


@pytest.mark.parametrize("change", ["half", "columns", "bias, short"])
def test_buffers_of_the_fallback_are_checked_too(change: str) -> None:
    layer = CsrLinear(prune(nn.Linear(48, 70)).weight, torch.randn(70))
    BUFFERS[change][0](layer)
    with pytest.raises(ValueError, match="a sparse layer cannot compute with its buffers: ") as caught:
        layer(torch.randn(5, 48))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_maps_over_inputs(sparse: nn.Module, dim: int) -> None:
    x = torch.randn(5, 3, 48)
    torch.testing.assert_close(torch.vmap(sparse, in_dims=dim)(x), sparse(x.movedim(dim, 0)), rtol=1e-5, atol=1e-6)


def test_vmap_over_weights_is_refused(sparse: nn.Module) -> None:
    state = {name: torch.stack([value, value]) for name, value in sparse.state_dict().items()}
    x = torch.randn(3, 48)
    with pytest.raises(ValueError, match="vmap over the weights of a sparse layer is not possible"):
        torch.vmap(lambda state: torch.func.functional_call(sparse, state, (x,)))(state)


def test_derivatives_are_refused(sparse: nn.Module) -> None:
    """Forward-mode ones too, which would be lost without a word."""
    x = torch.randn(3, 48)
    with pytest.raises(ValueError, match="asked to train"):
        torch.func.jvp(sparse, (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="asked to train"):
        sparse(torch.autograd.forward_ad.make_dual(x, x))


@needs_kernel
def test_no_memory_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = copy.copy(sparse_kernel.find())
    assert not isinstance(found, str)
    monkeypatch.setattr(found, "_linears", lambda *arguments: 1)
    with pytest.raises(MemoryError, match=rf"48 features on {torch.get_num_threads()} threads; use fewer"):
        found.linear(torch.randn(5, 48), from_dense(torch.ones(70, 48)), None)
