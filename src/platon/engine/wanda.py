"""Wanda: a weight counts by its size times that of what it multiplies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from platon.engine.scope import Scope
from platon.engine.score import Score, State


@dataclass(frozen=True)
class Wanda(Score):
    r"""Pruning by weights and activations (Sun et al., 2024): S = |w| ‖x‖, with the input feature x that w multiplies.

    ‖x‖ is taken over the tokens that the model has read while it was trained, or while `prune_once` calibrated it.
    Scores are compared inside a row, that is among the weights of one output feature.
    """

    scope: Scope = field(default="row", kw_only=True)

    reads: ClassVar[Literal["inputs"]] = "inputs"

    def init(self, count: int, device: torch.device) -> State:
        return {"square": torch.zeros(count, dtype=torch.float32, device=device)}

    def update(self, state: Mapping[str, Tensor], signal: Tensor | None, phase: int) -> State:
        """`signal` is ‖x‖ of what each weight has multiplied since the last step."""
        return dict(state) if signal is None else {"square": state["square"] + signal**2}

    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        return weight.float().abs() * state["square"].sqrt()
