"""A teacher beside a model: what is added to the loss, what is left alone, and what is refused."""

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import platon
from platon.engine.distillation.hidden import PROJECTION, paired


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"platon_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle = _load("distillation_oracle")

_SIZE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
_BERT = hf.BertConfig(**_SIZE)
_GPT2 = hf.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2)
_T5 = hf.T5Config(
    vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
)
_VIT = hf.ViTConfig(
    image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
)
Make = Callable[[], nn.Module]
MODELS: dict[str, Make] = {
    "classes": lambda: hf.BertForSequenceClassification(_BERT),
    "regression": lambda: hf.BertForSequenceClassification(hf.BertConfig(**_SIZE, num_labels=1)),
    "spans": lambda: hf.BertForQuestionAnswering(_BERT),
    "tokens": lambda: hf.BertForTokenClassification(_BERT),
    "masked": lambda: hf.BertForMaskedLM(_BERT),
    "causal": lambda: hf.GPT2LMHeadModel(_GPT2),
    "text to text": lambda: hf.T5ForConditionalGeneration(_T5),
    "images": lambda: hf.ViTForImageClassification(_VIT),
    "states": lambda: hf.BertModel(_BERT, add_pooling_layer=False),
}


def made(name: str, seed: int = 0) -> nn.Module:
    """In training mode, with larger weights than new models have: their answers would hardly differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]().train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4)
    return model


def batch(name: str, rows: int = 3) -> dict[str, Tensor]:
    """Inputs with padding and labels, some of them -100."""
    random = torch.Generator().manual_seed(1)
    if name == "images":
        pixels = torch.randn(rows, 3, 8, 8, generator=random)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (rows,), generator=random)}
    ids = torch.randint(3, 31, (rows, 7), generator=random)
    mask = torch.ones(rows, 7, dtype=torch.int64)
    mask[-1, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    places = ids.masked_fill(mask == 0, -100)
    places[0, :2] = -100
    short = torch.randint(3, 31, (rows, 5), generator=random)
    short[0, 3:] = -100
    labels: dict[str, dict[str, Tensor]] = {
        "classes": {"labels": torch.randint(0, 2, (rows,), generator=random)},
        "regression": {"labels": torch.randn(rows, generator=random)},
        "spans": {"start_positions": torch.arange(rows), "end_positions": torch.arange(rows) + 1},
        "tokens": {"labels": torch.where(places == -100, places, places % 2)},
        "masked": {"labels": places},
        "causal": {"labels": places},
        "text to text": {"labels": short},
        "states": {},
    }
    return inputs | labels[name]


def expected(name: str, student: Any, teacher: Any, inputs: dict[str, Tensor], temperature: float) -> Tensor:
    """What the oracle says of the outputs."""
    labels, mask = inputs.get("labels"), inputs.get("attention_mask")
    match name:
        case "classes" | "images":
            return oracle.classes(student.logits, teacher.logits, labels, temperature)
        case "regression":
            return oracle.regression(student.logits, teacher.logits)
        case "spans":
            ours, theirs = ((o.start_logits, o.end_logits) for o in (student, teacher))
            return oracle.spans(ours, theirs, mask, temperature)
        case "states":
            return oracle.hidden([student.last_hidden_state], [teacher.last_hidden_state], mask)
        case "text to text":
            return oracle.tokens(student.logits, teacher.logits, labels, None, temperature)
    return oracle.tokens(student.logits, teacher.logits, labels, mask, temperature, name == "causal")


def without_dropout(model: nn.Module) -> nn.Module:
    """Still in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout_prob", "attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_becomes_the_mixture(name: str) -> None:
    student, teacher, inputs = without_dropout(made(name)), made(name, seed=1), batch(name)
    plain = student(**inputs)
    answer = copy.deepcopy(teacher).eval()(**inputs)
    weight = 1.0 if name == "states" else 0.3
    distilled = expected(name, plain, answer, inputs, 2.0).detach()
    distillation = platon.Distillation(student, teacher, weight=weight, temperature=2.0)
    output = student(**inputs)
    right = distilled if name == "states" else oracle.mixture(plain.loss, distilled, weight)
    torch.testing.assert_close(output["loss"], right)
    torch.testing.assert_close(distillation.terms["outputs"], distilled)
    output["loss"].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    torch.testing.assert_close(distillation.loss(output), distilled)


@pytest.mark.parametrize("name", ["classes", "tokens", "images"])
def test_hidden_states(name: str) -> None:
    student, teacher, inputs = without_dropout(made(name)), made(name, seed=1), batch(name)
    ours = student(**inputs, output_hidden_states=True)
    theirs = copy.deepcopy(teacher).eval()(**inputs, output_hidden_states=True)
    counts = None
    if name == "tokens":
        counts = (inputs["labels"] != -100).sum(1).tolist()
    hidden = oracle.hidden(ours.hidden_states[1:], theirs.hidden_states[1:], inputs.get("attention_mask"), counts)
    right = oracle.mixture(ours.loss, expected(name, ours, theirs, inputs, 2.0) + 3 * hidden, 0.5)
    gradients = torch.autograd.grad(right, list(student.parameters()))
    platon.Distillation(student, teacher, hidden_weight=3)
    output = student(**inputs)
    torch.testing.assert_close(output.loss, right)
    output.loss.backward()
    for parameter, gradient in zip(student.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_an_encoder_and_its_decoder_have_padding_of_their_own() -> None:
    student, teacher, inputs = without_dropout(made("text to text")), made("text to text", 1), batch("text to text")
    distillation = platon.Distillation(student, teacher, weight=1, hidden_weight=1)
    student(**inputs)
    before = distillation.terms
    inputs["input_ids"][-1, 4:] = 5  # padding of the encoder
    student(**inputs)
    torch.testing.assert_close(distillation.terms, before)
    inputs["input_ids"][-1, 3] = 5
    student(**inputs)
    assert distillation.terms["hidden"] != before["hidden"]


# --- what is left alone -----------------------------------------------------------------------------------------------


def trained(distil: Callable[[nn.Module], Any], steps: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    """Weights and random state after a training with dropout."""
    torch.manual_seed(0)
    model = made("classes")
    distil(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(**batch("classes")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), torch.get_rng_state()


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_weight_training_is_the_same_bit_for_bit() -> None:
    plain, random = trained(lambda model: None)
    ours, after = trained(lambda model: platon.Distillation(model, "self", weight=0, hidden_weight=1))
    assert same(ours, plain)
    assert torch.equal(after, random)


class Restless(hf.BertForSequenceClassification):
    """Draws a random number in evaluation too, as some models do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("teacher", [lambda: made("classes", 1), lambda: Restless(_BERT), lambda: "self"])
def test_random_state_is_that_of_a_training_without(teacher: Callable[[], Any]) -> None:
    _, random = trained(lambda model: None)
    given = teacher()
    before = torch.get_rng_state()
    ours, after = trained(lambda model: platon.Distillation(model, given, hidden_weight=1))
    assert torch.equal(after, random)
    torch.set_rng_state(before)
    assert same(ours, trained(lambda model: platon.Distillation(model, given, hidden_weight=1))[0])


def test_evaluation_is_untouched() -> None:
    model, inputs = made("classes"), batch("classes")
    before = model.eval()(**inputs)
    distillation = platon.Distillation(model, made("classes", 1), weight=1, hidden_weight=1)
    assert torch.equal(model(**inputs).loss, before.loss)
    with torch.no_grad():
        model.train()(**inputs)
    assert distillation.terms == {}


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_detach_leaves_nothing_behind() -> None:
    model, teacher = made("classes"), wider_teacher()
    before, theirs, names = hooks(model), hooks(teacher), list(model.state_dict())
    distillation = platon.Distillation(model, teacher, hidden_weight=1)
    model(**batch("classes")).loss.backward()
    assert hooks(model) > before
    distillation.detach()
    distillation.detach()
    assert hooks(model) == before
    assert hooks(teacher) == theirs
    assert list(model.state_dict()) == names
    assert distillation.teacher is None
    distillation = platon.Distillation(model, "self")  # again
    model(**batch("classes"))


def test_the_teacher_itself_is_a_frozen_copy() -> None:
    model, inputs = without_dropout(made("classes")), batch("classes")
    distillation = platon.Distillation(model, "self", weight=1, hidden_weight=1)
    loss = model(**inputs).loss
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert not any(parameter.requires_grad for parameter in distillation.teacher.parameters())
    with torch.no_grad():
        model.classifier.weight.add_(torch.randn_like(model.classifier.weight))
    assert model(**inputs).loss > 1e-3


# --- depth and width --------------------------------------------------------------------------------------------------


def wider_teacher() -> nn.Module:
    size = {**_SIZE, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4}
    return hf.BertForSequenceClassification(hf.BertConfig(**size))


def test_layers_are_paired_evenly_and_last_with_last() -> None:
    assert paired(6, 6) == {i: i for i in range(6)}
    assert paired(3, 12) == {0: 3, 1: 7, 2: 11}
    assert paired(6, 4) == {0: 0, 2: 1, 3: 2, 5: 3}
    assert paired(1, 1) == {0: 0}


def test_layers_as_the_user_pairs_them() -> None:
    inputs = batch("classes")
    deep = hf.BertForSequenceClassification(hf.BertConfig(**{**_SIZE, "num_hidden_layers": 4})).eval()
    student = without_dropout(made("classes"))
    distillation = platon.Distillation(student, deep, hidden_weight=1, layers={1: 2})
    student(**inputs)
    distillation.detach()
    ours, theirs = (m(**inputs, output_hidden_states=True).hidden_states for m in (student, deep))
    right = oracle.hidden([ours[2]], [theirs[3]], inputs["attention_mask"])
    torch.testing.assert_close(distillation.terms["hidden"], right.detach())


def test_projection_is_trained_with_the_model_and_resumes_bit_for_bit() -> None:
    inputs, teacher = batch("classes"), wider_teacher()

    def start() -> tuple[nn.Module, platon.Distillation, torch.optim.Optimizer]:
        model = without_dropout(made("classes"))
        distillation = platon.Distillation(model, teacher, hidden_weight=1)
        return model, distillation, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model, distillation, optimizer = start()
    first = distillation.projection.weight.clone()
    train(model, optimizer, 3)
    assert not torch.equal(distillation.projection.weight, first)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert f"{PROJECTION}.weight" in saved[0]
    train(model, optimizer, 3)
    again, _, other = start()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(again, other, 3)
    assert same(again.state_dict(), model.state_dict())
    hidden = distillation.terms["hidden"]
    train(model, optimizer, 40)
    assert distillation.terms["hidden"] < hidden


def test_states_of_other_trainings_are_refused() -> None:
    model = made("classes")
    state = platon.Distillation(model, "self").state_dict()
    assert json.loads(json.dumps(state)) == state
    platon.Distillation(made("classes"), "self").load_state_dict(state)
    with pytest.raises(ValueError, match=r"teacher is '\w+', not '\w+'; teacher='self' copies the model"):
        platon.Distillation(made("classes", seed=1), "self").load_state_dict(state)
    with pytest.raises(ValueError, match=r"weight is 0.5, not 0.25"):
        platon.Distillation(model, "self", weight=0.25).load_state_dict(state)
    with pytest.raises(ValueError, match="format is missing"):
        platon.Distillation(model, "self").load_state_dict({})


def test_projection_without_an_optimizer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platon.engine.distillation.distillation._PATIENCE", 3)
    model = made("classes")
    optimizer = torch.optim.AdamW(model.parameters())
    platon.Distillation(model, wider_teacher(), hidden_weight=1)
    for _ in range(2):
        model(**batch("classes")).loss.backward()
        optimizer.step()
    with pytest.warns(UserWarning, match="build the optimizer after Distillation"):
        model(**batch("classes"))
