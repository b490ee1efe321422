"""Tags of words: entities in them, and the metrics of both.

Entities are found as conlleval and seqeval do: an entity ends where its type changes, at a B, S or U, after an E, L, S
or U, and at an O. Tags without such a prefix, of which one is O, are the types themselves: words in a row with the same
tag are one entity. Where no tag is O (parts of speech), there are no entities, and the tags are counted one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

OUTSIDE = "O"
_PREFIXES = frozenset("BIESLU")
_STARTS, _ENDS = frozenset("BSU"), frozenset("ESLU")

Tags = Sequence[str]
Entity = tuple[str, int, int]  # type, first word, last word


def entities(tags: Tags) -> list[Entity]:
    """The entities of one sentence, in their order."""
    found: list[Entity] = []
    first, kind, before = 0, "", OUTSIDE
    for position, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, type_of_tag = tag.partition("-") if tag != OUTSIDE else (OUTSIDE, "", "")
        ends = before != OUTSIDE and (prefix == OUTSIDE or prefix in _STARTS or before in _ENDS or type_of_tag != kind)
        if ends:
            found.append((kind, first, position - 1))
        if prefix != OUTSIDE and (before == OUTSIDE or ends):
            first, kind = position, type_of_tag
        before = prefix
    return found


@dataclass(frozen=True)
class Scheme:
    """How tags are read: whether there are entities in them, and by which metrics they are measured."""

    title: str
    metrics: tuple[str, ...]
    spelt: Callable[[str], str] = str  #: a tag with the prefix that `entities` expects

    def score(self, predicted: Sequence[Tags], true: Sequence[Tags]) -> dict[str, float]:
        """The metrics over all sentences."""
        pairs = [pair for said, are in zip(predicted, true, strict=True) for pair in zip(said, are, strict=True)]
        right = sum(said == are for said, are in pairs)
        accuracy = right / len(pairs) if pairs else 0.0
        if "macro_f1" in self.metrics:
            return {"accuracy": accuracy, "macro_f1": _macro_f1(pairs)}
        ours, theirs = (
            {(row, *one) for row, tags in enumerate(rows) for one in entities([self.spelt(tag) for tag in tags])}
            for rows in (predicted, true)
        )
        hits = len(ours & theirs)
        return {
            "f1": 2 * hits / (len(ours) + len(theirs)) if hits else 0.0,
            "precision": hits / len(ours) if hits else 0.0,
            "recall": hits / len(theirs) if hits else 0.0,
            "accuracy": accuracy,
        }

    def chance(self, names: Sequence[str], true: Sequence[Tags]) -> dict[str, float]:
        """The best that the same tag for every word reaches, metric by metric."""
        found = [self.score([[name] * len(tags) for tags in true], true) for name in names]
        return {metric: max(one[metric] for one in found) for metric in self.metrics}

    def described(self, rows: Sequence[Tags]) -> dict[str, int]:
        """What is counted, by name: entities of each type, or words of each tag."""
        counted: dict[str, int] = {}
        for tags in rows:
            names: Any = tags
            if "f1" in self.metrics:
                names = [kind for kind, _, _ in entities([self.spelt(tag) for tag in tags])]
            for name in names:
                counted[name] = counted.get(name, 0) + 1
        return counted


ENTITIES = Scheme("entities", ("f1", "precision", "recall", "accuracy"))
TYPES = Scheme(
    "entities, words in a row with the same tag",
    ENTITIES.metrics,
    lambda tag: tag if tag == OUTSIDE else f"I-{tag}",
)
WORDS = Scheme("one tag for each word", ("accuracy", "macro_f1"))


def scheme_of(names: Sequence[str]) -> Scheme:
    """How tags of these names are read."""
    inside = [name for name in names if name != OUTSIDE]
    if inside and all(name[0] in _PREFIXES and (len(name) == 1 or name[1] == "-") for name in inside):
        return ENTITIES
    return TYPES if OUTSIDE in names else WORDS


def _macro_f1(pairs: Sequence[tuple[str, str]]) -> float:
    """The mean F1 of the tags that occur."""
    names = sorted({name for pair in pairs for name in pair})
    said, true = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
    scores = []
    for name in names:
        hits = int(np.sum((said == name) & (true == name)))
        scores.append(2 * hits / int(np.sum(said == name) + np.sum(true == name)) if hits else 0.0)
    return float(np.mean(scores)) if scores else 0.0
