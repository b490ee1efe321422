"""The exact set of prunable matrices, written by hand for every family."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import transformers as hf
from torch import nn

from platon.engine.topology import blocks, matrices

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {**SIZE, "vocab_size": 99}
CAUSAL = {**TEXT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE = {**SIZE, "image_size": 16, "patch_size": 8}
DEBERTA = {
    **TEXT,
    "relative_attention": True,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "conv_kernel_size": 3,
}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    "vocab_size": 99,
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
}
CLIP = {
    "text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": IMAGE,
    "projection_dim": 16,
}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2}

BERT_LAYER = (
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
CROSS_LAYER = (*(f"crossattention.{n}" for n in ("self.query", "self.key", "self.value", "output.dense")), *BERT_LAYER)
ALBERT_LAYER = (*(f"attention.{name}" for name in ("query", "key", "value", "dense")), "ffn", "ffn_output")
DISTIL_LAYER = (*(f"attention.{name}_lin" for name in ("q", "k", "v", "out")), "ffn.lin1", "ffn.lin2")
MPNET_LAYER = (*(f"attention.attn.{name}" for name in "qkvo"), "intermediate.dense", "output.dense")
DEBERTA_LAYER = tuple(n + "_proj" if n.startswith("attention.self") else n for n in BERT_LAYER)
DEBERTA_PLACES = tuple(f"attention.self.pos_{name}_proj" for name in ("key", "query"))
VIT_LAYER = (*(f"attention.{name}_proj" for name in "qkvo"), "mlp.fc1", "mlp.fc2")
SELF = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out"))
CROSS = tuple(f"encoder_attn.{name}_proj" for name in ("q", "k", "v", "out"))
CLIP_LAYER = (*SELF, "mlp.fc1", "mlp.fc2")
LLAMA_LAYER = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
GPT2_LAYER = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
T5_SELF = tuple(f"layer.0.SelfAttention.{name}" for name in "qkvo")
T5_CROSS = tuple(f"layer.1.EncDecAttention.{name}" for name in "qkvo")


def names(prefix: str, layer: Iterable[str], layers: int = 2) -> list[str]:
    return [f"{prefix}.{i}.{name}.weight" for i in range(layers) for name in layer]


def t5_names(prefix: str, feed_forward: tuple[str, ...], layers: int = 2) -> list[str]:
    encoder = (*T5_SELF, *(f"layer.1.DenseReluDense.{name}" for name in feed_forward))
    decoder = (*T5_SELF, *T5_CROSS, *(f"layer.2.DenseReluDense.{name}" for name in feed_forward))
    return names(f"{prefix}encoder.block", encoder, layers) + names(f"{prefix}decoder.block", decoder, layers)


def torch_names(prefix: str, attentions: tuple[str, ...]) -> list[str]:
    packed = [f"{prefix}.{i}.{name}.in_proj_weight" for i in range(2) for name in attentions]
    return packed + names(prefix, (*(f"{name}.out_proj" for name in attentions), "linear1", "linear2"))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)


Case = tuple[Callable[[], nn.Module], int, list[str]]

# A name: the model, how many blocks it has, its prunable matrices.
FAMILIES: dict[str, Case] = {
    "bert": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT)),
        2,
        names("bert.encoder.layer", BERT_LAYER),
    ),
    "bert, bare": (lambda: hf.BertModel(hf.BertConfig(**TEXT)), 2, names("encoder.layer", BERT_LAYER)),
    "bert, tied language head": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),
        2,
        names("bert.encoder.layer", BERT_LAYER),
    ),
    "bert, one layer": (
        lambda: hf.BertForQuestionAnswering(hf.BertConfig(**{**TEXT, "num_hidden_layers": 1})),
        1,
        names("bert.encoder.layer", BERT_LAYER, layers=1),
    ),
    "bert, cross attention": (
        lambda: hf.BertLMHeadModel(hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)),
        2,
        names("bert.encoder.layer", CROSS_LAYER),
    ),
    "roberta": (
        lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT)),
        2,
        names("roberta.encoder.layer", BERT_LAYER),
    ),
    "distilbert": (
        lambda: hf.DistilBertForQuestionAnswering(
            hf.DistilBertConfig(vocab_size=99, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
        ),
        2,
        names("distilbert.transformer.layer", DISTIL_LAYER),
    ),
    "electra": (  # projects its embeddings
        lambda: hf.ElectraForSequenceClassification(hf.ElectraConfig(**TEXT, embedding_size=16)),
        2,
        names("electra.encoder.layer", BERT_LAYER),
    ),
    "albert": (  # two layers, one block
        lambda: hf.AlbertForSequenceClassification(hf.AlbertConfig(**TEXT, embedding_size=16)),
        1,
        names("albert.encoder.albert_layer_groups.0.albert_layers", ALBERT_LAYER, layers=1),
    ),
    "albert, groups": (
        lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=16, num_hidden_groups=2, inner_group_num=2)),
        4,
        names("encoder.albert_layer_groups.0.albert_layers", ALBERT_LAYER)
        + names("encoder.albert_layer_groups.1.albert_layers", ALBERT_LAYER),
    ),
    "mpnet": (
        lambda: hf.MPNetForSequenceClassification(hf.MPNetConfig(**TEXT)),
        2,
        names("mpnet.encoder.layer", MPNET_LAYER),
    ),
    "deberta, own position projections": (
        lambda: hf.DebertaV2ForSequenceClassification(
            hf.DebertaV2Config(**DEBERTA, pos_att_type="p2c|c2p", share_att_key=False)
        ),
        2,
        names("deberta.encoder.layer", (*DEBERTA_LAYER, *DEBERTA_PLACES)),
    ),
    "deberta, shared position projections": (  # version 3
        lambda: hf.DebertaV2ForSequenceClassification(
            hf.DebertaV2Config(**DEBERTA, pos_att_type="p2c|c2p", share_att_key=True)
        ),
        2,
        names("deberta.encoder.layer", DEBERTA_LAYER),
    ),
    "deberta, one position projection": (
        lambda: hf.DebertaV2ForQuestionAnswering(
            hf.DebertaV2Config(**DEBERTA, pos_att_type=["c2p"], share_att_key=False)
        ),
        2,
        names("deberta.encoder.layer", (*DEBERTA_LAYER, "attention.self.pos_key_proj")),
    ),
    "mobilebert": (  # each block holds a list of feed-forwards
        lambda: hf.MobileBertForSequenceClassification(
            hf.MobileBertConfig(**TEXT, embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2)
        ),
        2,
        names(
            "mobilebert.encoder.layer",
            (
                *BERT_LAYER,
                "output.bottleneck.dense",
                "bottleneck.input.dense",
                "bottleneck.attention.dense",
                "ffn.0.intermediate.dense",
                "ffn.0.output.dense",
            ),
        ),
    ),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE)), 2, names("vit.layers", VIT_LAYER)),
    "vit, pooler": (lambda: hf.ViTModel(hf.ViTConfig(**IMAGE)), 2, names("layers", VIT_LAYER)),
    "deit": (
        lambda: hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**IMAGE)),
        2,
        names("deit.layers", VIT_LAYER),
    ),
    "beit": (
        lambda: hf.BeitForImageClassification(hf.BeitConfig(**IMAGE, use_relative_position_bias=True)),
        2,
        names("beit.layers", VIT_LAYER),
    ),
    "swin": (  # stages of one and two blocks, patch merging between them
        lambda: hf.SwinForImageClassification(hf.SwinConfig(**SWIN)),
        3,
        names("swin.encoder.layers.0.blocks", VIT_LAYER, layers=1) + names("swin.encoder.layers.1.blocks", VIT_LAYER),
    ),
    "clip": (
        lambda: hf.CLIPModel(hf.CLIPConfig(**CLIP)),
        4,
        names("text_model.encoder.layers", CLIP_LAYER) + names("vision_model.encoder.layers", CLIP_LAYER),
    ),
    "t5, tied language head": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        4,
        t5_names("", ("wi", "wo")),
    ),
    "t5, one layer": (
        lambda: hf.T5Model(hf.T5Config(**{**T5, "num_layers": 1})),
        2,
        t5_names("", ("wi", "wo"), layers=1),
    ),
    "t5 v1.1": (
        lambda: hf.T5ForSequenceClassification(hf.T5Config(**T5, feed_forward_proj="gated-gelu")),
        4,
        t5_names("transformer.", ("wi_0", "wi_1", "wo")),
    ),
    "bart": (
        lambda: hf.BartForSequenceClassification(hf.BartConfig(**BART)),
        4,
        names("model.encoder.layers", (*SELF, "fc1", "fc2"))
        + names("model.decoder.layers", (*SELF, *CROSS, "fc1", "fc2")),
    ),
    "gpt2, tied language head": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
        2,
        names("transformer.h", GPT2_LAYER),
    ),
    "gpt2, one layer": (
        lambda: hf.GPT2Model(hf.GPT2Config(**{**GPT2, "n_layer": 1})),
        1,
        names("h", GPT2_LAYER, layers=1),
    ),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**CAUSAL)), 2, names("model.layers", LLAMA_LAYER)),
    "qwen2, tied language head": (
        lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**CAUSAL, tie_word_embeddings=True)),
        2,
        names("model.layers", LLAMA_LAYER),
    ),
    "qwen3": (  # norms inside attention
        lambda: hf.Qwen3ForSequenceClassification(hf.Qwen3Config(**CAUSAL, head_dim=16)),
        2,
        names("model.layers", LLAMA_LAYER),
    ),
    "olmo": (  # norms without parameters, of a class of its own
        lambda: hf.OlmoForCausalLM(hf.OlmoConfig(**CAUSAL)),
        2,
        names("model.layers", LLAMA_LAYER),
    ),
    "mixtral": (  # fused experts and the router's bare weight stay out
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**CAUSAL, num_local_experts=4)),
        2,
        names("model.layers", LLAMA_LAYER[:4]),
    ),
    "torch encoder": (
        lambda: nn.TransformerEncoder(encoder_layer(), 2),
        2,
        torch_names("layers", ("self_attn",)),
    ),
    "torch transformer": (
        lambda: nn.Transformer(32, 2, 2, 2, 64, batch_first=True),
        4,
        torch_names("encoder.layers", ("self_attn",)) + torch_names("decoder.layers", ("self_attn", "multihead_attn")),
    ),
}


# Importing DeBERTa's own module scripts a function.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_matrices_in_the_blocks(family: str) -> None:
    build, count, expected = FAMILIES[family]
    model = build()
    found = matrices(model)
    assert sorted(found) == sorted(expected)
    assert len(blocks(model)) == count
    parameters = dict(model.named_parameters())
    assert list(found) == [name for name in parameters if name in found]
    assert all(found[name] is parameters[name] and found[name].ndim == 2 for name in found)


def test_blocks_by_name_in_model_order() -> None:
    model = hf.SwinForImageClassification(hf.SwinConfig(**SWIN))
    found = blocks(model)
    assert list(found) == [f"swin.encoder.layers.{i}" for i in ("0.blocks.0", "1.blocks.0", "1.blocks.1")]
    assert all(module is model.get_submodule(name) for name, module in found.items())


def test_parts_of_a_block_are_no_blocks() -> None:
    # A sparse T5 block is an attention and a feed-forward of many experts: each has enough matrices, neither repeats.
    config = hf.SwitchTransformersConfig(**T5, num_experts=4, num_decoder_layers=2, encoder_sparse_step=1)
    model = hf.SwitchTransformersModel(config)
    assert list(blocks(model)) == [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)]


class Block(nn.Module):
    """Hand-written and flat: all four matrices in one module."""

    def __init__(self, width: int = 8, norm: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False) if norm else nn.Identity()


class OtherBlock(Block):
    pass


FLAT = ("qkv", "out", "up", "down")


def test_blocks_in_a_sequential_with_everything_else() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 2))
    assert list(matrices(model)) == [f"{i}.{name}.weight" for i in (1, 2) for name in FLAT]


def test_blocks_in_a_dict() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Block(), "1": Block()}), "head": nn.Linear(8, 2)})
    assert list(blocks(model)) == ["layers.0", "layers.1"]


def test_blocks_of_two_classes_in_turns() -> None:
    assert list(blocks(nn.ModuleList([Block(), OtherBlock(), Block()]))) == ["0", "1", "2"]


def test_blocks_without_a_norm_module() -> None:
    def block() -> nn.Module:
        attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q", "k", "v", "o")})
        return nn.ModuleDict({"attention": attention, "mlp": nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))})

    assert list(blocks(nn.ModuleDict({"h": nn.ModuleList([block(), block()])}))) == ["h.0", "h.1"]
    assert not blocks(nn.ModuleList([Block(norm=False), Block(norm=False)])), "a bare attention looks just like this"


def test_plain_gate_in_a_block_counts() -> None:
    config = hf.Qwen2MoeConfig(**CAUSAL, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    shared = [f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    expected = names("model.layers", (*LLAMA_LAYER[:4], *shared, "mlp.shared_expert_gate"))
    assert sorted(matrices(hf.Qwen2MoeForCausalLM(config))) == sorted(expected)


def test_attention_with_separate_projections() -> None:
    layer = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, kdim=4, vdim=6), "norm": nn.LayerNorm(8)})
    found = list(matrices(nn.ModuleList([layer])))
    assert found == [f"0.attention.{name}" for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")] + [
        "0.attention.out_proj.weight"
    ]


def test_frozen_parameters_stay_out() -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT))
    model.bert.encoder.layer[0].requires_grad_(False)
    model.bert.encoder.layer[1].output.dense.weight.requires_grad_(False)
    expected = [f"bert.encoder.layer.1.{name}.weight" for name in BERT_LAYER if name != "output.dense"]
    assert list(matrices(model)) == expected
    assert len(blocks(model)) == 2


def test_tied_matrices_count_once() -> None:
    model = nn.ModuleList([Block(), Block()])
    model[1].up.weight = model[0].up.weight
    assert list(matrices(model)) == [f"0.{name}.weight" for name in FLAT] + [
        "1.qkv.weight",
        "1.out.weight",
        "1.down.weight",
    ]


def test_repeated_block_counts_once() -> None:
    block = Block()
    model = nn.ModuleDict({"first": block, "layers": nn.ModuleList([block, block, Block()])})
    assert list(blocks(model)) == ["first", "layers.2"]
    assert list(matrices(model)) == [f"{place}.{name}.weight" for place in ("first", "layers.2") for name in FLAT]


@pytest.mark.parametrize("other", [nn.Linear(8, 8), nn.Embedding(8, 8)])
def test_matrix_tied_to_the_outside_stays_out(other: nn.Module) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()]), "other": other})
    model["layers"][1].out.weight = other.weight
    assert "layers.1.out.weight" not in matrices(model)
    assert len(matrices(model)) == 7


def test_plain_network_warns_and_keeps_the_last_linear_out() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 2))
    assert blocks(model) == {}
    with pytest.warns(UserWarning, match="Sequential has no transformer blocks"):
        assert list(matrices(model)) == ["0.weight", "2.0.weight"]
    model[0].requires_grad_(False)
    with pytest.warns(UserWarning, match="1 of them"):
        assert list(matrices(model)) == ["2.0.weight"]


@pytest.mark.parametrize("model", [nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), nn.Linear(4, 2)])
def test_nothing_to_prune(model: nn.Module) -> None:
    with pytest.warns(UserWarning, match="0 of them"):
        assert matrices(model) == {}


class Wrapper(nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (Wrapper, "module."),
        (lambda model: torch.compile(model, backend="eager"), "_orig_mod."),
        (lambda model: Wrapper(torch.compile(model, backend="eager")), "module._orig_mod."),
        (nn.Sequential, "0."),
    ],
)
def test_wrappers_only_add_a_prefix(wrap: Callable[[nn.Module], nn.Module], prefix: str) -> None:
    model = hf.BertForPreTraining(hf.BertConfig(**TEXT))
    expected = [prefix + name for name in matrices(model)]
    wrapped = wrap(model)
    assert len(expected) == 12
    assert list(matrices(wrapped)) == expected
    assert list(blocks(wrapped)) == [f"{prefix}bert.encoder.layer.{i}" for i in range(2)]


def test_blocks_compiled_one_by_one() -> None:
    model = nn.ModuleList([torch.compile(Block(), backend="eager") for _ in range(2)])
    assert list(matrices(model)) == [f"{i}._orig_mod.{name}.weight" for i in range(2) for name in FLAT]
