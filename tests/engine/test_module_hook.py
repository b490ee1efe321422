"""Copies of a model to which a training is attached: they are models like any other, and bring nothing along."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import platon
from kernel_levels import needs_kernel
from platon.deploy.layer import SparseLinear
from platon.engine.module_hook import ModuleHook
from tiny_models import seeded

IDS = torch.randint(5, 90, (4, 9), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 0, 1])


def bert(seed: int = 0) -> nn.Module:
    config = BertConfig(vocab_size=99, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80)
    return seeded(lambda: BertForSequenceClassification(config), seed)


class Counted(nn.Module):
    """A teacher that counts how often it is asked."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.asked = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return self.inner(*args, **kwargs)


def pickled(model: nn.Module) -> nn.Module:
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    found: nn.Module = torch.load(written, weights_only=False)
    return found


def hooks_of(model: nn.Module) -> list[Any]:
    held = [hooks for one in model.modules() for hooks in (one._forward_hooks, one._forward_pre_hooks)]
    return [hook for hooks in held for hook in hooks.values()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    model.train()
    loss: Tensor = model(IDS, labels=LABELS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.fixture
def trained() -> tuple[nn.Module, platon.Distillation, Counted, torch.optim.Optimizer]:
    """A model after three steps of Wanda with a teacher, whose hidden states count; both are still attached."""
    model, teacher = bert(), Counted(bert(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    platon.Pruner(model, optimizer, score=platon.Wanda(), schedule=platon.Constant(0.3))
    distillation = platon.Distillation(model, teacher, hidden_weight=1.0)
    for _ in range(3):
        train(model, optimizer)
    return model, distillation, teacher, optimizer


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_brings_nothing_along(copied: Any, trained: Any) -> None:
    model, distillation, teacher, optimizer = trained
    twin = copied(model)
    assert hooks_of(model)
    assert all(isinstance(hook, ModuleHook) and hook.call is None for hook in hooks_of(twin))
    asked = teacher.asked
    train(twin, torch.optim.SGD(twin.parameters(), lr=1e-3))
    assert teacher.asked == asked
    assert model.state_dict().keys() == twin.state_dict().keys()
    before = distillation.terms
    train(model, optimizer)  # which goes on as before
    assert teacher.asked == asked + 1
    assert distillation.terms is not before


def test_a_copy_computes_the_same(trained: Any) -> None:
    model = trained[0]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS).logits, twin.eval()(IDS).logits)


@needs_kernel
def test_what_is_attached_keeps_no_layer_dense(trained: Any) -> None:
    model = trained[0].eval()
    fast = platon.sparsify(model, dense_above=0.5)
    linears = [one for one in model.modules() if isinstance(one, nn.Linear)]
    sparse = [one for one in linears if int(one.weight.count_nonzero()) <= 0.5 * one.weight.numel()]
    assert len(sparse) >= 12
    assert sum(isinstance(one, SparseLinear) for one in fast.modules()) == len(sparse)
    with torch.no_grad():
        torch.testing.assert_close(fast(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


@needs_kernel
@torch.no_grad()
def test_what_is_attached_to_a_sparsified_model_is_called() -> None:
    """Its layers are one call of the kernel, unless somebody waits for what comes out of them."""
    fast = platon.sparsify(bert().eval(), dense_above=1)
    fast(IDS)  # with a trial
    seen: list[int] = []
    handle = fast.bert.encoder.layer[1].register_forward_hook(ModuleHook(lambda *call: seen.append(1)))
    for twin, expected in ((fast, [1]), (copy.deepcopy(fast), [])):
        seen.clear()
        twin(IDS)
        assert seen == expected
    handle.remove()
