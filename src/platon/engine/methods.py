"""The names that a user types -> what they mean. A new method is a score and a line here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from platon.engine.learned import HardConcrete, Movement, SoftMovement
from platon.engine.score import Score
from platon.engine.smoothed import Magnitude, Platon, Ratio, Sensitivity, Uncertainty
from platon.engine.wanda import Wanda

_PLATON = (
    "Zhang et al., PLATON: Pruning Large Transformer Models with Upper Confidence Bound of Weight Importance, 2022"
)
_MOVEMENT = "Sanh et al., Movement Pruning: Adaptive Sparsity by Fine-Tuning, 2020"


@dataclass(frozen=True)
class Method:
    """A named score.

    Args:
        score: its dataclass; `None` trains without pruning.
        title: its name in tables and figures.
        line: what it does, in one line.
        citation: who proposed it.
        holds_zeros: whether weights that are zero at the start stay zero.
    """

    score: type[Score] | None
    title: str
    line: str
    citation: str
    holds_zeros: bool = False

    @property
    def verb(self) -> str:
        """What a training with it does."""
        return "training" if self.score is None else "pruning"

    def settings(self) -> tuple[str, ...]:
        """The names of the settings that the score reads."""
        return () if self.score is None else tuple(field.name for field in fields(self.score))

    def build(self, settings: Mapping[str, Any]) -> Score | None:
        """The score with those of the settings that it knows; `None` leaves a setting to the score."""
        if self.score is None:
            return None
        known = self.settings()
        return self.score(**{name: value for name, value in settings.items() if name in known and value is not None})


METHODS: dict[str, Method] = {
    "platon": Method(
        Platon,
        "PLATON",
        "smoothed sensitivity times its uncertainty: unsure weights are kept and explored",
        _PLATON,
    ),
    "magnitude": Method(
        Magnitude,
        "Magnitude",
        "the weight's own size; zeroed weights go on being updated",
        "Zhu & Gupta, To prune, or not to prune: Exploring the efficacy of pruning for model compression, 2018",
    ),
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
        _MOVEMENT,
    ),
    "soft-movement": Method(
        SoftMovement,
        "Soft-Movement",
        "learned scores above a fixed value stay, and a penalty pushes them below it",
        _MOVEMENT,
    ),
    "l0": Method(
        HardConcrete,
        "ℓ0 regularisation",
        "random gates that can be exactly zero, and a penalty on how many are open",
        "Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018",
    ),
    "sensitivity": Method(Sensitivity, "S = Ī", "ablation: smoothed sensitivity without its uncertainty", _PLATON),
    "uncertainty": Method(Uncertainty, "S = Ū", "ablation: the uncertainty of sensitivity alone", _PLATON),
    "ratio": Method(
        Ratio, "S = Ī / Ū", "ablation: sensitivity divided by its uncertainty, so that sure weights stay", _PLATON
    ),
    "dense": Method(None, "Dense", "no pruning: the twin to compare with", "-"),
    "hold": Method(None, "Held", "no pruning: a pruned model is trained further, and its zeros stay", "-", True),
}
