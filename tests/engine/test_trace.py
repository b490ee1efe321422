"""A pass that reaches every block without multiplying by its matrices."""

import pytest
import torch
import transformers as hf
from torch import nn

from platon.engine.proof.call import record_blocks, tensors_in
from platon.engine.proof.sample import Case
from platon.engine.proof.trace import Sketch, Watch, steady
from platon.engine.topology import blocks, weights_of

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, intermediate_size=24, num_key_value_heads=1)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=30)),
    "torch": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_sketch_calls_blocks_as_a_pass_does_without_reading_the_matrices(name: str) -> None:
    with steady(), torch.no_grad():
        model = MODELS[name]().eval()
        with Watch({}):
            expected = record_blocks(model, blocks(model), Case(3, 5))
        if name != "torch":  # whose attention takes views of its packed matrix
            for block in blocks(model).values():
                for module in block.modules():
                    for weight in weights_of(module):
                        weight.fill_(float("nan"))
        with Sketch():
            found = record_blocks(model, blocks(model), Case(3, 5))
    assert found.keys() == expected.keys()
    for block, calls in expected.items():
        given, wanted = ([*tensors_in(one[0].arguments)] for one in (found[block], calls))
        assert [tensor.shape for tensor in given] == [tensor.shape for tensor in wanted]
        assert all(bool(tensor.isfinite().all()) for tensor in given if tensor.is_floating_point())
        assert found[block][0].passed == calls[0].passed
