"""Each kind of distillation loss and its gradient against the oracle, on outputs of any shape."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import platon
from platon.engine.distillation import divergence


def _load(name: str) -> ModuleType:
    # Test files are not importable by name, so that two folders may hold files of the same one.
    spec = importlib.util.spec_from_file_location(f"platon_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle = _load("distillation_oracle")

SIZES = st.integers(1, 5)


@dataclass
class Output:
    """What a model may give out; the names are transformers'."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    sentence_embedding: Tensor | None = None


class Answers(nn.Module):
    """A model whose parameters are what it gives out."""

    def __init__(self, seed: int, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.answers = nn.ParameterDict(
            {n: nn.Parameter(torch.randn(s, generator=random, dtype=torch.float64)) for n, s in shapes.items()}
        )

    def forward(self, attention_mask: Tensor | None = None, labels: Tensor | None = None, **others: Any) -> Output:
        return Output(**dict(self.answers.items()))


def compared(
    shapes: dict[str, tuple[int, ...]], inputs: dict[str, Any], **settings: Any
) -> tuple[Tensor, Answers, Answers]:
    """The distillation loss after a backward pass, the student and the teacher."""
    student, teacher = Answers(0, **shapes), Answers(1, **shapes)
    distillation = platon.Distillation(student, teacher, weight=1, **settings)
    loss = student(**inputs).loss
    loss.backward()
    distillation.detach()
    return loss, student, teacher


def check(loss: Tensor, student: Answers, expected: Any) -> None:
    """Loss and gradients are those of `expected`, a function of the student's answers."""
    copies = {name: p.detach().clone().requires_grad_() for name, p in student.answers.items()}
    right = expected(copies)
    right.backward()
    torch.testing.assert_close(loss, right)
    for name, parameter in student.answers.items():
        torch.testing.assert_close(parameter.grad, copies[name].grad)


def drawn_mask(data: st.DataObject, rows: int, length: int) -> Tensor | None:
    """Padding behind at least one token of each row; or no mask."""
    if not data.draw(st.booleans()):
        return None
    lengths = data.draw(st.lists(st.integers(1, length), min_size=rows, max_size=rows))
    return torch.tensor([[int(i < n) for i in range(length)] for n in lengths])


def drawn_labels(data: st.DataObject, shape: tuple[int, ...], classes: int) -> Tensor | None:
    """Some of them -100, perhaps all; or no labels."""
    if not data.draw(st.booleans()):
        return None
    count = int(torch.tensor(shape).prod())
    values = st.one_of(st.just(-100), st.integers(0, classes - 1))
    return torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count))).view(shape)


def given_inputs(**inputs: Tensor | None) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if value is not None}


TEMPERATURES = st.sampled_from([0.5, 1.0, 2.0, 7.0])


@given(rows=SIZES, classes=st.integers(2, 5), temperature=TEMPERATURES, data=st.data())
def test_classes(rows: int, classes: int, temperature: float, data: st.DataObject) -> None:
    labels = drawn_labels(data, (rows,), classes)
    loss, student, teacher = compared({"logits": (rows, classes)}, given_inputs(labels=labels), temperature=temperature)
    check(loss, student, lambda own: oracle.classes(own["logits"], teacher.answers["logits"].data, labels, temperature))


@given(rows=SIZES, classes=SIZES, temperature=TEMPERATURES)
def test_multi_label(rows: int, classes: int, temperature: float) -> None:
    shapes = {"logits": (rows, classes)}
    loss, student, teacher = compared(shapes, {}, kind="multi-label", temperature=temperature)
    check(loss, student, lambda own: oracle.multi_label(own["logits"], teacher.answers["logits"].data, temperature))


@given(rows=SIZES, numbers=SIZES)
def test_regression(rows: int, numbers: int) -> None:
    kind = None if numbers == 1 else "regression"
    loss, student, teacher = compared({"logits": (rows, numbers)}, {}, kind=kind)
    check(loss, student, lambda own: oracle.regression(own["logits"], teacher.answers["logits"].data))


@given(rows=SIZES, length=SIZES, temperature=TEMPERATURES, data=st.data())
def test_spans(rows: int, length: int, temperature: float, data: st.DataObject) -> None:
    mask = drawn_mask(data, rows, length)
    shapes = {"start_logits": (rows, length), "end_logits": (rows, length)}
    loss, student, teacher = compared(shapes, given_inputs(attention_mask=mask), temperature=temperature)
    theirs = tuple(p.data for p in teacher.answers.values())
    check(loss, student, lambda own: oracle.spans(tuple(own.values()), theirs, mask, temperature))


@given(rows=SIZES, length=SIZES, words=SIZES, causal=st.booleans(), temperature=TEMPERATURES, data=st.data())
def test_tokens(rows: int, length: int, words: int, causal: bool, temperature: float, data: st.DataObject) -> None:
    mask, labels = drawn_mask(data, rows, length), drawn_labels(data, (rows, length), words)
    inputs = given_inputs(attention_mask=mask, labels=labels)
    kind = "causal" if causal else None
    loss, student, teacher = compared({"logits": (rows, length, words)}, inputs, kind=kind, temperature=temperature)
    theirs = teacher.answers["logits"].data
    check(loss, student, lambda own: oracle.tokens(own["logits"], theirs, labels, mask, temperature, causal))


@given(rows=SIZES, width=SIZES)
def test_embedding(rows: int, width: int) -> None:
    loss, student, teacher = compared({"sentence_embedding": (rows, width)}, {})
    theirs = teacher.answers["sentence_embedding"].data
    check(loss, student, lambda own: oracle.embedding(own["sentence_embedding"], theirs))


@given(rows=SIZES, length=SIZES, width=SIZES, data=st.data())
def test_last_states(rows: int, length: int, width: int, data: st.DataObject) -> None:
    mask = drawn_mask(data, rows, length)
    shapes = {"last_hidden_state": (rows, length, width)}
    loss, student, teacher = compared(shapes, given_inputs(attention_mask=mask))
    theirs = teacher.answers["last_hidden_state"].data
    check(loss, student, lambda own: oracle.hidden([own["last_hidden_state"]], [theirs], mask))


def test_padding_may_hold_anything() -> None:
    student = torch.randn(2, 3, 4, requires_grad=True)
    teacher = torch.randn(2, 3, 4)
    teacher[1, 2] = float("nan")
    tokens = torch.tensor([[True, True, True], [True, True, False]])
    divergence.relative_error(student, teacher, tokens).sum().backward()
    assert student.grad.isfinite().all()
    assert not student.grad[1, 2].any()


def test_a_class_that_the_teacher_rules_out_adds_nothing() -> None:
    student = torch.tensor([[0.1, 0.2, float("-inf")]], requires_grad=True)
    teacher = torch.tensor([[0.4, 0.2, float("-inf")]])
    everything = torch.tensor([True])
    loss = divergence.divergence(student, teacher, everything, 2.0)
    loss.sum().backward()
    expected = oracle.kl(student.detach()[0, :2], teacher[0, :2], 2.0)
    torch.testing.assert_close(loss[0], expected)
    assert student.grad.isfinite().all()


# --- a vocabulary -----------------------------------------------------------------------------------------------------


def test_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(13, 10, requires_grad=True), torch.randn(13, 10)
    counts = torch.rand(13) > 0.3
    whole = divergence.divergence(student, teacher, counts, 2.0)
    (gradient,) = torch.autograd.grad(whole.sum(), student)
    monkeypatch.setattr(divergence, "_CHUNK", 30)
    parts = divergence.divergence(student, teacher, counts, 2.0)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts.sum(), student)[0], gradient)


class Largest(TorchDispatchMode):
    """The largest tensor of float32 that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.numel = max(self.numel, tensor.numel())
        return made


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "_CHUNK", 2000)
    student = torch.randn(40, 500).bfloat16().requires_grad_()
    teacher = torch.randn(40, 500).bfloat16()
    with Largest() as seen:
        divergence.divergence(student, teacher, torch.ones(40, dtype=torch.bool), 2.0).sum().backward()
    assert 0 < seen.numel <= 2000
    assert student.grad.dtype == torch.bfloat16
