"""The names that a user types -> what they mean. A new method is a score and a line here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from platon.engine.score import Magnitude, Platon, Score


@dataclass(frozen=True)
class Method:
    """A named score.

    Args:
        score: its dataclass; `None` trains without pruning.
        line: what it does, in one line.
        citation: who proposed it.
    """

    score: type[Score] | None
    line: str
    citation: str

    def build(self, settings: Mapping[str, Any]) -> Score | None:
        """The score with those of the settings that it knows."""
        if self.score is None:
            return None
        known = {field.name for field in fields(self.score)}
        return self.score(**{name: value for name, value in settings.items() if name in known})


METHODS: dict[str, Method] = {
    "platon": Method(
        Platon,
        "smoothed sensitivity times its uncertainty: unsure weights are kept and explored",
        "Zhang et al., PLATON: Pruning Large Transformer Models with Upper Confidence Bound of Weight Importance, 2022",
    ),
    "magnitude": Method(
        Magnitude,
        "the weight's own size; zeroed weights go on being updated",
        "Zhu & Gupta, To prune, or not to prune: Exploring the efficacy of pruning for model compression, 2018",
    ),
    "dense": Method(None, "no pruning: the twin to compare with", "-"),
}
