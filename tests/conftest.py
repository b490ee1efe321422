"""Small models built from config, and batches for them; the same ones wherever they are asked for.

tests/lab brings its own: folders with a tokenizer beside the model.
"""

import os

# Before anything imports a hub client: nothing here may reach for the network. Two workers share two cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable

import pytest
import torch
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


@pytest.fixture
def bert() -> BertForSequenceClassification:
    """A BERT classifier with dropout on; 81,920 prunable weights, so that selection goes through its sample."""
    config = BertConfig(
        vocab_size=99,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=192,
        max_position_embeddings=16,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return seeded(lambda: BertForSequenceClassification(config))


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
