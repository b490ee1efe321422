"""Models that were fine-tuned with LoRA and merged. Runs where peft is installed; nothing of platon needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import platon

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 60}
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "bert": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**SMALL)),
        ["query", "value", "intermediate.dense"],
    ),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)), ["q_proj", "v_proj", "down_proj"]),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, bos_token_id=1, eos_token_id=2)
        ),
        ["c_attn", "c_fc"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_is_cut_exactly(name: str) -> None:
    peft: Any = pytest.importorskip("peft")
    build, targets = MODELS[name]
    torch.manual_seed(0)
    conv = {"fan_in_fan_out": True} if name == "gpt2" else {}
    tuned = peft.get_peft_model(build(), peft.LoraConfig(r=4, target_modules=targets, **conv))
    tokens = torch.randint(0, 60, (3, 9))
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        tuned(tokens).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model = tuned.merge_and_unload().eval()
    with pytest.raises(ValueError, match="unfreeze the matrices"):
        platon.heads(model)
    model.requires_grad_(True)
    groups = platon.heads(model) + platon.neurons(model)
    assert len(groups.groups) == 4
    with torch.no_grad():
        for group in groups.groups:
            kept = torch.arange(group.count) % 2 == 0
            for part in group.slices:
                part.parameter.mul_(part.expand(kept.float()))
        small = platon.compact(model)
        torch.testing.assert_close(small(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)
    assert sum(p.numel() for p in small.parameters()) < 0.8 * sum(p.numel() for p in model.parameters())
