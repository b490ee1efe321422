"""Words and the tokens of a model: a word's tag is learned and read at its first token.

A row that is longer than the model takes becomes several pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from platon.lab.tasks import conll
from platon.lab.tasks.answer import TagsAnswer
from platon.lab.tasks.model import Pretrained
from platon.lab.tasks.tags import OUTSIDE
from platon.lab.tasks.target import logits_of, softmax

IGNORED = -100  # the loss leaves out tokens with this label


def word_tokenizer(pretrained: Pretrained) -> PreTrainedTokenizerBase:
    """The tokenizer, ready for lists of words; byte-level ones need a blank before the first word."""
    tokenizer = pretrained.tokenizer()
    if getattr(tokenizer, "add_prefix_space", None) is False:
        tokenizer = pretrained.tokenizer(add_prefix_space=True)
    tokenizer.padding_side = "right"  # so that tokens keep their positions
    return tokenizer


@dataclass(frozen=True)
class WordEncoder:
    """Turns rows of words into pieces of at most `length` tokens.

    `row` is the row that a piece comes from, and `word` the number of the word that starts at a token, otherwise -1.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int
    numbers: Mapping[str, int]

    def __call__(self, batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        encoded = self.tokenizer(
            [list(words) for words in batch[conll.WORDS]],
            is_split_into_words=True,
            truncation=True,
            max_length=self.length,
            return_overflowing_tokens=True,
        )
        places = encoded.pop("overflow_to_sample_mapping")
        made: dict[str, list[Any]] = dict(encoded) | {"row": [numbers[place] for place in places], "word": []}
        seen: set[tuple[int, int]] = set()
        for piece, place in enumerate(places):
            first = []
            for word in encoded.word_ids(piece):
                is_first = word is not None and (place, word) not in seen
                first.append(word if is_first else -1)
                if is_first:
                    seen.add((place, word))
            made["word"].append(first)
        if conll.TAGS in batch:
            tags = batch[conll.TAGS]
            made["labels"] = [
                [IGNORED if word < 0 else self.numbers[tags[place][word]] for word in first]
                for place, first in zip(places, made["word"], strict=True)
            ]
        return made


@dataclass(frozen=True)
class TagReader:
    """Reads the tags of words from the logits of pieces.

    A word without a token (a sign that the tokenizer drops) gets O, or the first tag where there is no O.
    """

    names: tuple[str, ...]
    words: Sequence[Sequence[str]]
    rows: Sequence[int]
    firsts: Sequence[Sequence[int]]

    def read(self, predictions: Any) -> list[TagsAnswer]:
        """The tags and their probabilities, row by row."""
        nothing = self.names.index(OUTSIDE) if OUTSIDE in self.names else 0
        tags = [[nothing] * len(words) for words in self.words]
        sure = [[0.0] * len(words) for words in self.words]
        for row, first, logits in zip(self.rows, self.firsts, logits_of(predictions), strict=True):
            places = [place for place, word in enumerate(first) if word >= 0]
            found = softmax(logits[places])
            for place, best, probability in zip(places, found.argmax(-1), found.max(-1), strict=True):
                tags[row][first[place]], sure[row][first[place]] = int(best), float(probability)
        return [
            TagsAnswer(words, [self.names[number] for number in numbers], some)
            for words, numbers, some in zip(self.words, tags, sure, strict=True)
        ]


def is_constant(predictions: Any) -> bool:
    """Whether every token gets the same tag; padding, of which all logits are -100, does not count."""
    logits = logits_of(predictions)
    real = ~(logits == IGNORED).all(-1)
    said = logits.argmax(-1)[real]
    return len(said) > 1 and bool((said == said[0]).all() or not np.isfinite(logits[real]).all())
