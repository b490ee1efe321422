"""Inputs for models whose configuration does not say what they take."""

from types import SimpleNamespace
from typing import Any

import pytest
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
