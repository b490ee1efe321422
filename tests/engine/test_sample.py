"""Inputs for models: by what their forward pass asks for, and by sizes in their configuration."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf
from torch import Tensor, nn

from platon.engine.proof.discovery import heads
from platon.engine.proof.sample import Case, attempts


class Nameless(nn.Module):
    """Looks like a model of transformers, and its configuration holds no sizes, or something else under their names."""

    main_input_name = "hidden_states"

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**sizes)
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden_states)
        return out


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": [16, 32]}, {"hidden_size": "wide"}, {"hidden_size": -16}])
def test_an_argument_of_unknown_size_is_left_out(sizes: dict[str, Any]) -> None:
    model = Nameless(**sizes)
    assert not any(kwargs for _, kwargs in attempts(model, Case(3, 5)))
    with pytest.raises(ValueError, match="no heads could be proved"):
        heads(model)


def test_an_argument_of_known_size_is_built() -> None:
    model = Nameless(hidden_size=16)
    assert {kwargs["hidden_states"].shape for _, kwargs in attempts(model, Case(3, 5))} == {(3, 5, 16)}
    assert len(heads(model)) == 2


SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44}
WINDOWS = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 44,
    "patch_size": 8,
    "out_hidden_size": 32,
}
UNLIKE_IMAGES: dict[str, Callable[[], nn.Module]] = {
    "patches and their grid": lambda: (
        hf.Qwen2_5_VLForConditionalGeneration(
            hf.Qwen2_5_VLConfig(
                text_config=SMALL | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
                vision_config=WINDOWS | {"window_size": 32, "fullatt_block_indexes": [1]},
            )
        ).model.visual
    ),
    "patches and their shapes": lambda: hf.Siglip2VisionModel(
        hf.Siglip2VisionConfig(**SMALL, patch_size=8, num_patches=16)
    ),
    "a video": lambda: hf.VideoMAEModel(hf.VideoMAEConfig(**SMALL, image_size=32, patch_size=8, num_frames=4)),
    "filter banks": lambda: hf.Wav2Vec2BertModel(hf.Wav2Vec2BertConfig(**SMALL, feature_projection_input_dim=16)),
}


@pytest.mark.parametrize("name", UNLIKE_IMAGES)
def test_inputs_that_are_no_plain_image(name: str) -> None:
    assert [group.count for group in heads(UNLIKE_IMAGES[name]())] == [4, 4]
