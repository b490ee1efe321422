"""PLATON on heads and neurons, killed, resumed and compacted: an encoder, a decoder, an encoder-decoder and vision."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import platon

STEPS, KILLED = 8, 5
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 60,
}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 60}


def words(model: Any, rows: int, random: torch.Generator) -> dict[str, Tensor]:
    """Tokens, and the same tokens as labels."""
    tokens = torch.randint(5, 60, (rows, 7), generator=random)
    return {"input_ids": tokens, "labels": tokens.flip(1)}


def images(model: Any, rows: int, random: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(rows, 3, 16, 16, generator=random)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (rows,), generator=random)}


Inputs = Callable[[Any, int, torch.Generator], dict[str, Tensor]]
MODELS: dict[str, tuple[Callable[[], Any], Inputs]] = {
    "encoder": (lambda: hf.XLMRobertaForMaskedLM(hf.XLMRobertaConfig(**SMALL)), words),
    "decoder": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, num_key_value_heads=2)), words),
    "encoder-decoder": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)), words),
    "vision": (
        lambda: hf.Dinov2ForImageClassification(
            hf.Dinov2Config(**{**SMALL, "mlp_ratio": 1}, image_size=16, patch_size=8, num_labels=2)
        ),
        images,
    ),
}


class Training:
    """A model, its optimizer and its pruner."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        build, self.inputs = MODELS[name]
        self.model = build().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        units = platon.heads(self.model) + platon.neurons(self.model)
        schedule = platon.Cubic(final=0.5, total=STEPS, warmup=1, cooldown=2)
        self.pruner = platon.Pruner(self.model, self.optimizer, schedule=schedule, units=units)

    def run(self, steps: range, after: Callable[[int], None] = lambda step: None) -> None:
        for step in steps:
            torch.manual_seed(step)  # dropout
            batch = self.inputs(self.model, 4, torch.Generator().manual_seed(step))
            self.model(**batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            after(step)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.pruner


def killed(name: str, file: Path) -> None:
    """Train in a process that saves after every step and ends by SIGKILL in the middle."""
    child = os.fork()
    if child == 0:
        try:
            training = Training(name)

            def save(step: int) -> None:
                torch.save([part.state_dict() for part in training.parts], file)
                if step == KILLED:
                    os.kill(os.getpid(), signal.SIGKILL)

            training.run(range(STEPS), save)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.fixture(scope="module", params=MODELS)
def pruned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """A name, the model after an undisturbed training, and after one that was killed and resumed."""
    file = tmp_path_factory.mktemp("killed") / "state.pt"
    whole = Training(request.param)
    whole.run(range(STEPS))
    killed(request.param, file)
    resumed = Training(request.param)
    for part, state in zip(resumed.parts, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    resumed.run(range(KILLED + 1, STEPS))
    return request.param, whole.model.eval(), resumed.model.eval()


def test_resumed_to_the_same_bits(pruned: tuple[str, Any, Any]) -> None:
    _, whole, resumed = pruned
    for (name, one), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_compacted(pruned: tuple[str, Any, Any], tmp_path: Path) -> None:
    """Half of the weights in heads and neurons are gone, outputs and generated tokens stay, saved and loaded too."""
    name, model, _ = pruned
    small = platon.compact(model)
    units = platon.heads(model).count + platon.neurons(model).count
    gone = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in small.parameters())
    assert gone >= 0.95 * 0.5 * units
    batch = MODELS[name][1](model, 3, torch.Generator().manual_seed(99))
    with torch.no_grad():
        expected, found = model(**batch).logits, small(**batch).logits
    assert float((expected - found).abs().max()) <= 1e-5 * float(expected.abs().max().clamp(min=1))
    if "decoder" in name:
        assert torch.equal(generated(model, batch), generated(small, batch))
    platon.save(small, tmp_path / "small")
    with torch.no_grad():
        assert torch.equal(platon.load(tmp_path / "small")(**batch).logits, found)


def generated(model: Any, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["input_ids"]
    found: Tensor = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found


ELSEWHERE = """
import sys, torch, platon
model = platon.load(sys.argv[1])
batch = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(model(**batch).logits, sys.argv[3])
"""


@pytest.mark.slow
def test_loaded_in_a_new_process(pruned: tuple[str, Any, Any], tmp_path: Path) -> None:
    name, model, _ = pruned
    small = platon.compact(model)
    batch = MODELS[name][1](model, 3, torch.Generator().manual_seed(99))
    platon.save(small, tmp_path / "small")
    torch.save(batch, tmp_path / "batch.pt")
    files = [str(tmp_path / part) for part in ("small", "batch.pt", "logits.pt")]
    subprocess.run([sys.executable, "-c", ELSEWHERE, *files], check=True)
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), small(**batch).logits)
