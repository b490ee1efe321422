"""The same losses in every loop: plain, accelerate, Trainer; accumulated, compiled, in bfloat16, while pruning."""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader

import platon
from platon.engine.methods import METHODS


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"platon_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle = _load("distillation_oracle")

_SIZE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_CONFIG = hf.BertConfig(vocab_size=31, **_SIZE)
STEPS, ROWS, RATE = 4, 4, 1e-2
SETTINGS: dict[str, Any] = {"weight": 0.4, "temperature": 3.0, "hidden_weight": 0.5}


def bert(seed: int = 0, kind: Any = hf.BertForSequenceClassification) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(_CONFIG).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4)
    return model


def row(number: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 31, (6,), generator=random)
    mask = torch.ones(6, dtype=torch.int64)
    mask[4 + number % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[0] % 2}


DATA = [row(number) for number in range(STEPS * ROWS)]


def batches(size: int = ROWS) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(DATA, batch_size=size)


def answers(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch, output_hidden_states=True)


def oracle_loss(model: nn.Module, teacher: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        theirs = answers(teacher, batch)
    ours = answers(model, batch)
    distilled = oracle.classes(ours.logits, theirs.logits, batch["labels"], SETTINGS["temperature"])
    hidden = oracle.hidden(ours.hidden_states[1:], theirs.hidden_states[1:], batch["attention_mask"])
    return oracle.mixture(ours.loss, distilled + SETTINGS["hidden_weight"] * hidden, SETTINGS["weight"])


@pytest.fixture(scope="module")
def right() -> list[float]:
    """The losses of a loop that computes everything itself."""
    model, teacher = bert(), bert(1).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in batches():
        loss = oracle_loss(model, teacher, batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


# --- loops ------------------------------------------------------------------------------------------------------------


def plain_losses(model: nn.Module, loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in batches():
        loss = loss_of(model, batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_plain_loop(right: list[float]) -> None:
    model = bert()
    platon.Distillation(model, bert(1), **SETTINGS)
    assert plain_losses(model, lambda m, b: m(**b).loss) == pytest.approx(right, rel=1e-5)


def test_loop_with_a_loss_of_its_own(right: list[float]) -> None:
    model = bert()
    distillation = platon.Distillation(model, bert(1), **SETTINGS)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        output = model(**batch)
        assert output.loss is None
        return distillation.loss(output, F.cross_entropy(output.logits, labels))

    assert plain_losses(model, loss) == pytest.approx(right, rel=1e-5)


def test_tuples_and_arguments_by_position(right: list[float]) -> None:
    model = bert()
    platon.Distillation(model, bert(1), **SETTINGS)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nothing = [None] * 3
        inputs = [batch["input_ids"], batch["attention_mask"], *nothing, batch["labels"]]
        return model(*inputs, return_dict=False)[0]

    assert plain_losses(model, loss) == pytest.approx(right, rel=1e-5)


def test_accelerate(right: list[float]) -> None:
    accelerator = Accelerator(cpu=True)
    model = bert()
    platon.Distillation(model, bert(1), **SETTINGS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(right, rel=1e-5)


def trainer_losses(folder: Path, model: nn.Module, accumulate: int, data: Any = DATA, **others: Any) -> list[float]:
    arguments = hf.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // accumulate,
        gradient_accumulation_steps=accumulate,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    trainer = hf.Trainer(model, arguments, train_dataset=data, **others)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_trainer(right: list[float], tmp_path: Path) -> None:
    model = bert()
    platon.Distillation(model, bert(1), **SETTINGS)
    assert trainer_losses(tmp_path, model, 1) == pytest.approx(right, rel=1e-4)


def test_trainer_with_a_loss_of_its_own(right: list[float], tmp_path: Path) -> None:
    model = bert()
    distillation = platon.Distillation(model, bert(1), **SETTINGS)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        task = F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch
        return distillation.loss(outputs, task, num_items_in_batch=num_items_in_batch)

    assert trainer_losses(tmp_path, model, 2, compute_loss_func=loss) == pytest.approx(right, rel=1e-4)


# --- accumulation -----------------------------------------------------------------------------------------------------


def gpt2(seed: int) -> nn.Module:
    config = hf.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return still(hf.GPT2LMHeadModel(config).train())


def vit(seed: int) -> nn.Module:
    size = {name: _SIZE[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return hf.ViTForImageClassification(hf.ViTConfig(**size, intermediate_size=24, image_size=8, patch_size=4))


def still(model: nn.Module) -> nn.Module:
    """Without dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def texts(rows: int = 5) -> tuple[dict[str, Tensor], int]:
    """Texts for a language model, and the number of their tokens that are to be predicted."""
    ids = torch.randint(3, 31, (rows, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 2:] = labels[3, :4] = -100
    return {"input_ids": ids, "labels": labels}, int((labels[:, 1:] != -100).sum())


def images(rows: int = 5) -> tuple[dict[str, Tensor], int]:
    pixels = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.arange(rows) % 2}, rows


@pytest.mark.parametrize(("make", "data"), [(gpt2, texts), (vit, images)])
def test_accumulated_gradients_are_those_of_one_big_batch(
    make: Callable[[int], nn.Module], data: Callable[[], tuple[dict[str, Tensor], int]]
) -> None:
    """Batches with different numbers of items, divided by the number in all of them."""
    inputs, items = data()

    def gradients(parts: list[slice]) -> list[Tensor]:
        model = make(0).train()
        platon.Distillation(model, make(1), weight=0.7, hidden_weight=2)
        for part in parts:
            batch = {name: tensor[part] for name, tensor in inputs.items()}
            model(**batch, num_items_in_batch=items).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    whole = gradients([slice(None)])
    for ours, theirs in zip(gradients([slice(0, 1), slice(1, 5)]), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_mixture_follows_a_model_that_ignores_the_number_of_items() -> None:
    """As BERT's classifiers do: their loss stays the mean of the batch."""
    batch = next(iter(batches()))
    model, teacher = bert(), bert(1).eval()
    right = oracle_loss(model, teacher, batch)
    platon.Distillation(model, teacher, **SETTINGS)
    torch.testing.assert_close(model(**batch, num_items_in_batch=torch.tensor(3 * ROWS)).loss, right)


def test_trainer_accumulates(tmp_path: Path) -> None:
    """Two batches of different numbers of items a step: the losses of a training with all rows in one batch."""
    ids = torch.randint(3, 31, (16, 6), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(6) < 2 + torch.arange(16)[:, None] % 5, ids, -100)
    data = [{"input_ids": i, "labels": n} for i, n in zip(ids, labels, strict=True)]

    def losses(accumulate: int) -> list[float]:
        model = gpt2(0)
        platon.Distillation(model, gpt2(1), **SETTINGS)
        return trainer_losses(tmp_path / str(accumulate), model, accumulate, data)

    assert losses(2) == pytest.approx(losses(1), rel=1e-4)


# --- precision, compilation, checkpointing ----------------------------------------------------------------------------


def teacher_precision(model: nn.Module) -> list[torch.dtype]:
    """The dtypes in which the first linear layer of a teacher works, as they come."""
    seen: list[torch.dtype] = []
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    linear.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    return seen


def test_autocast(right: list[float]) -> None:
    model, teacher = bert(), bert(1)
    seen = teacher_precision(teacher)
    platon.Distillation(model, teacher, **SETTINGS)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**next(iter(batches()))).loss
    loss.backward()
    assert seen == [torch.bfloat16]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(right[0], rel=0.05)
    model(**next(iter(batches())))
    assert seen == [torch.bfloat16, torch.float32]


def test_autocast_inside_of_forward(right: list[float]) -> None:
    """Where accelerate puts it: our hooks are outside."""
    model, teacher = bert(), bert(1)
    seen = teacher_precision(teacher)
    platon.Distillation(model, teacher, **SETTINGS)
    AcceleratorState._reset_state(reset_partial_state=True)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert model(**next(iter(batches()))).loss.item() == pytest.approx(right[0], rel=0.05)
    assert seen == [torch.bfloat16]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("outside", [False, True])
def test_compiled(right: list[float], outside: bool) -> None:
    torch.compiler.reset()
    model = bert()
    compiled = torch.compile(model, backend="aot_eager")
    platon.Distillation(compiled if outside else model, bert(1), **SETTINGS)
    assert plain_losses(compiled, lambda m, b: m(**b).loss) == pytest.approx(right, rel=1e-4)
    torch.compiler.reset()


def test_gradient_checkpointing(right: list[float]) -> None:
    model = bert()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    platon.Distillation(model, bert(1), **SETTINGS)
    assert plain_losses(model, lambda m, b: m(**b).loss) == pytest.approx(right, rel=1e-5)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_refused() -> None:
    model = bert()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    platon.Distillation(model, bert(1), **SETTINGS)
    with pytest.raises(ValueError, match=r"'use_reentrant': False"):
        model(**next(iter(batches())))


# --- while pruning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.score is not None])
def test_every_method_prunes_beside_a_teacher(method: str) -> None:
    """A model whose only loss is the teacher's: it is pruned exactly, and learns from the teacher alone."""
    model = bert()
    distillation = platon.Distillation(model, "self", weight=1, hidden_weight=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    score = METHODS[method].build({})
    schedule = platon.Cubic(final=0.5, total=8, warmup=1, cooldown=3)
    pruner = platon.Pruner(model, optimizer, score=score, schedule=schedule)
    batch = next(iter(batches()))
    for _ in range(8):
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert pruner.kept() == pytest.approx(0.5, abs=1e-3)
    pruner.detach()
    distillation.detach()
    for name, mask in pruner.masks().items():
        assert not model.get_parameter(name)[~mask].any()
    with torch.no_grad():
        assert model.eval()(**batch).logits.isfinite().all()


def test_learning_from_a_teacher_brings_the_model_closer() -> None:
    model, teacher = bert(), bert(1)
    dense = copy.deepcopy(teacher).eval()
    batch = next(iter(batches(16)))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def distance() -> float:
        with torch.no_grad():
            return F.mse_loss(model.eval()(**inputs).logits, dense(**inputs).logits).item()

    before = distance()
    platon.Distillation(model.train(), teacher, weight=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance() < 0.2 * before
