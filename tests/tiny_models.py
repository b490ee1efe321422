"""Small models built from config, and batches for them; the same ones wherever they are asked for.

tests/lab brings its own: folders with a tokenizer beside the model.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

torch.set_num_threads(1)

Batch = dict[str, Tensor]


class Block(nn.Module):
    """A transformer block's matrices, without the attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(torch.tanh(self.query(self.norm(x))))
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks between an input and a head that stay dense: 768 prunable weights, steps of a millisecond."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What `build` gives under a seed of its own; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().train()


@pytest.fixture
def make_net() -> Callable[[], nn.Module]:
    """Makes a small network with blocks; equal ones each time."""
    return lambda: seeded(Net)


@pytest.fixture
def net(make_net: Callable[[], nn.Module]) -> nn.Module:
    """One of `make_net`."""
    return make_net()


@pytest.fixture(scope="session")
def bert_config() -> BertConfig:
    """A BERT with dropout on; 81,920 prunable weights, so that selection goes through its sample."""
    return BertConfig(
        vocab_size=99,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=192,
        max_position_embeddings=16,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )


@pytest.fixture
def bert(bert_config: BertConfig) -> BertForSequenceClassification:
    """A classifier of this configuration."""
    return seeded(lambda: BertForSequenceClassification(copy.deepcopy(bert_config)))


@pytest.fixture
def vit() -> ViTForImageClassification:
    """A ViT classifier for images of 8 px, with dropout on."""
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.1,
    )
    return seeded(lambda: ViTForImageClassification(config))


@pytest.fixture
def batch() -> Batch:
    """Four short texts with labels, for `bert`."""
    random = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, 99, (4, 8), generator=random),
        "labels": torch.randint(0, 2, (4,), generator=random),
    }


@pytest.fixture
def images() -> Batch:
    """Four images with labels, for `vit`."""
    random = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(4, 3, 8, 8, generator=random),
        "labels": torch.randint(0, 2, (4,), generator=random),
    }


# --- every architecture whose heads and neurons are known -------------------------------------------------------------

_SIZE: dict[str, Any] = {
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 37,
}
_TEXT: dict[str, Any] = {**_SIZE, "vocab_size": 99, "max_position_embeddings": 32, "pad_token_id": 0}
_CAUSAL: dict[str, Any] = {
    **_TEXT,
    "hidden_size": 18,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_IMAGE: dict[str, Any] = {**_SIZE, "image_size": 16, "patch_size": 8, "num_channels": 1}
_PLACES: dict[str, Any] = {
    "relative_attention": True,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": "p2c|c2p",
}
_DISTIL: dict[str, Any] = {"vocab_size": 99, "dim": 20, "n_layers": 3, "n_heads": 5, "hidden_dim": 37}
_GPT2: dict[str, Any] = {"vocab_size": 99, "n_embd": 20, "n_layer": 3, "n_head": 5, "n_inner": 37}
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Architecture:
    """A model of odd sizes and how its attention lies in it: three layers; five heads of 4, or six on three keys."""

    make: Callable[[], nn.Module]
    layer: str  # the first one
    output: str  # in a layer: what reads the heads
    down: str  # in a layer: what reads the neurons
    groups: int = 5

    def build(self) -> nn.Module:
        """With random biases, since new ones are zero, weights that make heads differ, and without dropout."""

        def made() -> nn.Module:
            with warnings.catch_warnings():  # DeBERTa's module is scripted where it is first imported
                warnings.simplefilter("ignore", DeprecationWarning)
                model = self.make()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(std=0.3)
                    elif parameter.ndim == 2:
                        parameter.mul_(5)
            return model

        return seeded(made).eval()

    def batch(self, model: nn.Module, rows: int = 3, length: int = 7) -> Batch:
        """Inputs without labels; texts with padding at the end of one row."""
        random = torch.Generator().manual_seed(1)
        if model.main_input_name == "pixel_values":
            return {"pixel_values": torch.randn(rows, 1, 16, 16, generator=random)}
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[-1, length - 3 :] = 0
        return {"input_ids": torch.randint(3, 99, (rows, length), generator=random), "attention_mask": mask}


def _bert_like(make: Callable[[], nn.Module], layer: str) -> Architecture:
    return Architecture(make, layer, "attention.output.dense", "output.dense")


ARCHITECTURES: dict[str, Architecture] = {
    "bert": _bert_like(lambda: hf.BertForSequenceClassification(hf.BertConfig(**_TEXT)), "bert.encoder.layer.0"),
    "bert, bare": _bert_like(lambda: hf.BertModel(hf.BertConfig(**_TEXT)), "encoder.layer.0"),
    "bert, tied": _bert_like(lambda: hf.BertForMaskedLM(hf.BertConfig(**_TEXT)), "bert.encoder.layer.0"),
    "roberta": _bert_like(lambda: hf.RobertaForQuestionAnswering(hf.RobertaConfig(**_TEXT)), "roberta.encoder.layer.0"),
    "electra": _bert_like(
        lambda: hf.ElectraForSequenceClassification(hf.ElectraConfig(**_TEXT, embedding_size=8)),
        "electra.encoder.layer.0",
    ),
    "distilbert": Architecture(
        lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**_DISTIL, max_position_embeddings=32)),
        "distilbert.transformer.layer.0",
        "attention.out_lin",
        "ffn.lin2",
    ),
    "mpnet": Architecture(
        lambda: hf.MPNetForSequenceClassification(hf.MPNetConfig(**_TEXT)),
        "mpnet.encoder.layer.0",
        "attention.attn.o",
        "output.dense",
    ),
    "deberta": _bert_like(
        lambda: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**_TEXT, **_PLACES, share_att_key=False)),
        "deberta.encoder.layer.0",
    ),
    "deberta, shared": _bert_like(
        lambda: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**_TEXT, **_PLACES, share_att_key=True)),
        "deberta.encoder.layer.0",
    ),
    "vit": Architecture(
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**_IMAGE)), "vit.layers.0", "attention.o_proj", "mlp.fc2"
    ),
    "vit, no bias": Architecture(
        lambda: hf.ViTModel(hf.ViTConfig(**_IMAGE, qkv_bias=False)), "layers.0", "attention.o_proj", "mlp.fc2"
    ),
    "deit": Architecture(
        lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**_IMAGE)), "deit.layers.0", "attention.o_proj", "mlp.fc2"
    ),
    "gpt2": Architecture(
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2, **_ENDS, n_positions=32)),
        "transformer.h.0",
        "attn.c_proj",
        "mlp.c_proj",
    ),
    "llama": Architecture(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_CAUSAL)),
        "model.layers.0",
        "self_attn.o_proj",
        "mlp.down_proj",
        3,
    ),
    "llama, biases": Architecture(
        lambda: hf.LlamaModel(hf.LlamaConfig(**_CAUSAL, attention_bias=True, mlp_bias=True)),
        "layers.0",
        "self_attn.o_proj",
        "mlp.down_proj",
        3,
    ),
    "qwen2": Architecture(
        lambda: hf.Qwen2ForSequenceClassification(hf.Qwen2Config(**_CAUSAL)),
        "model.layers.0",
        "self_attn.o_proj",
        "mlp.down_proj",
        3,
    ),
    "qwen3": Architecture(
        lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_CAUSAL)),
        "model.layers.0",
        "self_attn.o_proj",
        "mlp.down_proj",
        3,
    ),
}


@pytest.fixture(params=list(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> Architecture:
    """Each of them in turn."""
    return ARCHITECTURES[request.param]


@pytest.fixture
def architectures() -> dict[str, Architecture]:
    """All of them."""
    return ARCHITECTURES
