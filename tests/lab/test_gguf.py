"""GGUF checkpoints as a start: read, pruned, saved as an ordinary model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from platon.lab.errors import UserError
from platon.lab.run import prune
from platon.lab.settings import resolve
from platon.lab.tasks import Request, find

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key matrix in the order of llama.cpp, which rotates neighbours and not halves."""
    return weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def checkpoint(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as one GGUF file, by the package's own writer."""
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    config, file = model.config, tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = AutoTokenizer.from_pretrained(tiny_llama).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(257)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in model.state_dict().items():
        theirs = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }.get(name)
        if theirs is None:
            _, _, number, *inner, leaf = name.split(".")
            theirs = f"blk.{number}.{names['.'.join(inner)]}.{leaf}"
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        kind = theirs.split(".")[2] if theirs.startswith("blk") else ""
        stored = permuted(tensor, heads[kind]) if kind in heads else tensor
        writer.add_tensor(theirs, stored.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_gguf_file_is_a_start_like_any_other(
    as_folder: bool, checkpoint: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat on the mat. " * 30)
    flags = {"task": "lm", "data": str(texts), "model": str(checkpoint.parent if as_folder else checkpoint)}
    flags |= {"steps": 0, "method": "magnitude", "keep": 0.5, "fast": False}
    record = prune(resolve(flags=flags), tmp_path / "r")
    assert record["kept"] == 0.5
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "model")
    assert not hasattr(saved.config, "quantization_config")
    before = LlamaForCausalLM.from_pretrained(tiny_llama)
    for name, parameter in saved.named_parameters():
        kept = parameter != 0
        assert torch.equal(parameter, before.get_parameter(name) * kept), name


def test_what_is_no_gguf_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat on the mat.")
    whole = checkpoint.read_bytes()
    for name, content, sentence in (
        ("no.gguf", b"not one", r"no.gguf is not a GGUF file: it does not start with GGUF"),
        ("cut.gguf", whole[: len(whole) // 2], r"cannot load the .* of .*cut.gguf"),
        ("short.gguf", whole[:40], r"cannot load the .* of .*short.gguf"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            find("lm").prepare(Request(data=texts, model=str(file))).build()
    with pytest.raises(UserError, match=r"has 3 GGUF files; name one of them"):
        find("lm").prepare(Request(data=texts, model=str(tmp_path)))
