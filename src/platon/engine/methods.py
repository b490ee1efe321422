"""The names that a user types -> what they mean. A new method is a score and a line here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from platon.engine.learned import HardConcrete, Movement, SoftMovement
from platon.engine.score import Score
from platon.engine.smoothed import Magnitude, Platon, Ratio, Sensitivity, Uncertainty, Wanda

_ZHANG = "Zhang et al., PLATON: Pruning Large Transformer Models with Upper Confidence Bound of Weight Importance, 2022"
_ZHU = "Zhu & Gupta, To prune, or not to prune: Exploring the efficacy of pruning for model compression, 2018"
_SANH = "Sanh et al., Movement Pruning: Adaptive Sparsity by Fine-Tuning, 2020"


@dataclass(frozen=True)
class Method:
    score: type[Score] | None  #: `None` trains without pruning
    title: str  #: its name in tables and figures
    line: str  #: what it does, in one line
    citation: str  #: who proposed it
    holds_zeros: bool = False  #: whether weights that are zero at the start stay zero

    @property
    def verb(self) -> str:
        return "training" if self.score is None else "pruning"

    def build(self, settings: Mapping[str, Any]) -> Score | None:
        """The score with those of the settings that it knows; `None` leaves a setting to the score."""
        if self.score is None:
            return None
        known = {field.name for field in fields(self.score)}
        return self.score(**{name: value for name, value in settings.items() if name in known and value is not None})


METHODS: dict[str, Method] = {
    "platon": Method(
        Platon, "PLATON", "smoothed sensitivity times its uncertainty: unsure weights are kept and explored", _ZHANG
    ),
    "magnitude": Method(Magnitude, "Magnitude", "the weight's own size; zeroed weights go on being updated", _ZHU),
    "wanda": Method(
        Wanda,
        "Wanda",
        "the weight's size times the norm of what it multiplies, compared inside a row; needs no training",
        "Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2024",
    ),
    "movement": Method(
        Movement,
        "Movement",
        "a learned score: weights that move away from zero stay; pruned ones come back with their value",
        _SANH,
    ),
    "soft-movement": Method(
        SoftMovement,
        "Soft-Movement",
        "learned scores above a fixed value stay, and a penalty pushes them below it",
        _SANH,
    ),
    "l0": Method(
        HardConcrete,
        "ℓ0 regularisation",
        "random gates that can be exactly zero, and a penalty on how many are open",
        "Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018",
    ),
    "sensitivity": Method(Sensitivity, "S = Ī", "ablation: smoothed sensitivity without its uncertainty", _ZHANG),
    "uncertainty": Method(Uncertainty, "S = Ū", "ablation: the uncertainty of sensitivity alone", _ZHANG),
    "ratio": Method(
        Ratio, "S = Ī / Ū", "ablation: sensitivity divided by its uncertainty, so that sure weights stay", _ZHANG
    ),
    "dense": Method(None, "Dense", "no pruning: the twin to compare with", "-"),
    "hold": Method(None, "Held", "no pruning: a pruned model is trained further, and its zeros stay", "-", True),
}
