"""Small real things, made on the spot: a tokenizer with a model beside it, and data in the hub's layout."""

import io
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)
from transformers.utils import logging

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a WordPiece tokenizer that can spell any ASCII text, and a BERT of one layer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    folder.mkdir()
    signs = [c for c in string.printable if c.strip() and not c.isupper()]
    words = ["the", "cat", "dog", "sat", "on", "mat", "good", "bad", "film", "is", "a", "who", "where"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs, *words, *(f"##{c}" for c in signs)]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(tokens)) + "\n")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=64)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    _save(folder, tokenizer, BertForSequenceClassification(config))
    return folder


@pytest.fixture(scope="session")
def tiny_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ViT of one layer for images of 8 px, and its image processor."""
    folder = tmp_path_factory.mktemp("models") / "tiny-vit"
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    _save(folder, ViTImageProcessorPil(size={"height": 8, "width": 8}), ViTForImageClassification(config))
    return folder


def _save(folder: Path, processor: Any, model: Any) -> None:
    logging.disable_progress_bar()
    processor.save_pretrained(folder)
    model.save_pretrained(folder)


@pytest.fixture
def write_parquet(tmp_path: Path) -> Write:
    """Write columns to a file below the test's folder; gives the file."""

    def write(name: str, **columns: Any) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), file)
        return file

    return write


@pytest.fixture
def write_sst2(write_parquet: Write, tmp_path: Path) -> Write:
    """SST-2 in the hub's layout below the test's folder, with these labels; gives the folder."""

    def write(train: list[Any] | None = None, validation: list[Any] | None = None) -> Path:
        for split, labels in {"train": train, "validation": validation}.items():
            labels = [0, 1] * 10 if labels is None else labels
            texts = [f"film {n} is {'good' if label == 1 else 'bad'}" for n, label in enumerate(labels)]
            column = pa.array(labels, pa.int64() if not labels else None)
            write_parquet(f"glue/sst2/{split}.parquet", sentence=pa.array(texts, pa.string()), label=column)
        return tmp_path

    return write


def png(value: int, side: int = 8) -> bytes:
    """A PNG of noise, different for each value."""
    pixels = np.random.default_rng(value).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture
def make_png() -> Callable[..., bytes]:
    """`png`, for tests in other files."""
    return png


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a network, and without waiting for retries."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes and an end token, and a Llama of two layers for 64 tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    _save(folder, byte_tokenizer(eos_token="<|endoftext|>"), LlamaForCausalLM(tiny_llama_config()))
    return folder


def tiny_llama_config() -> LlamaConfig:
    torch.manual_seed(0)
    return LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=257,
    )


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    signs = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    bytes_only = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(signs)}, merges=[("t", "h")]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, **special)
