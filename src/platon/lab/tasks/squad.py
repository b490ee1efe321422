"""SQuAD v1.1: the answer to a question is a span of its context.

A context longer than the model's input is cut into overlapping pieces. Question and piece together are a feature; the
answer is the best span of all features of a question.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray
from transformers import BatchEncoding, DataCollatorWithPadding, PreTrainedTokenizerBase

from platon.lab.errors import UserError
from platon.lab.tasks import dataset, metrics
from platon.lab.tasks.dataset import HubDataset, Split
from platon.lab.tasks.model import Pretrained
from platon.lab.tasks.sequence import allowed_length, lengths, tokenise
from platon.lab.tasks.task import Prepared, Request, Task

SQUAD = HubDataset("rajpurkar/squad", None, ("squad", "squad/plain_text", "plain_text", "."))
COLUMNS = ("question", "context", "answers")
MAX_LENGTH, STRIDE = 384, 128
BEST, LONGEST = 20, 30  # start and end positions considered in a feature; tokens in an answer


def prepare(task: Task, request: Request) -> Prepared:
    """SQuAD from the hub, from DIR/squad, or from DIR itself."""
    splits = SQUAD.read(request.data, ({} if request.evaluation_only else {"train": True}) | {"validation": True})
    for split in splits.values():
        _require_answers(split.require(COLUMNS))
    pretrained = Pretrained(task, request)
    tokenizer = pretrained.tokenizer()
    tokenizer.padding_side = "right"  # padding must not shift the positions of answers
    length = allowed_length(request.max_length, MAX_LENGTH, tokenizer, pretrained.config)
    stride = request.stride or min(STRIDE, length // 3)
    used = {name: s.take(request.train_rows if name == "train" else request.eval_rows) for name, s in splits.items()}
    _require_room(used.values(), tokenizer, length, stride)

    fingerprint = dataset.digest(used, COLUMNS)
    encode = partial(make_features, tokenizer=tokenizer, length=length, stride=stride)
    features = {
        name: tokenise(split.rows, encode, f"{fingerprint[:16]}-{name}", numbered=name == "validation")
        for name, split in used.items()
    }
    decoder = AnswerDecoder.of(used["validation"].rows, features["validation"])
    return Prepared(
        build=pretrained.build,
        train=features.get("train", ()),
        evaluation={"validation": features["validation"].remove_columns(["row", "offsets"])},
        collate=DataCollatorWithPadding(tokenizer),
        score=decoder.score,
        chance={"validation": dict.fromkeys(task.metrics, 0.0)},
        about=[
            (name, f"{len(split.rows):,} questions, {len(features[name]):,} features") for name, split in used.items()
        ],
        metrics=task.metrics,
        fingerprint=fingerprint,
        processor=tokenizer,
        lengths=lengths(features),
        label_names=("start_positions", "end_positions"),
        counts={"validation": len(used["validation"].rows)},
        notes=pretrained.notes,
    )


def make_features(
    batch: dict[str, list[Any]],
    numbers: list[int] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    stride: int,
) -> dict[str, Any]:
    """The features of all rows, with the position of the answer's first and last token.

    A feature without the complete answer points at its first token. Given the rows' numbers, each feature also gets a
    `row` and `offsets`: where its tokens begin and end in the context, (0, 0) for tokens outside it.
    """
    encoded = cut(batch, tokenizer, length, stride)
    owners, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
    golds = [(batch["answers"][row]["answer_start"][0], batch["answers"][row]["text"][0]) for row in owners]
    spans = [find_span(encoded, feature, *gold) or (0, 0) for feature, gold in enumerate(golds)]
    found = {**encoded, "start_positions": [s for s, _ in spans], "end_positions": [e for _, e in spans]}
    if numbers is not None:
        context = [np.array([s == 1 for s in encoded.sequence_ids(f)])[:, None] for f in range(len(owners))]
        found["row"] = [numbers[row] for row in owners]
        found["offsets"] = [
            (np.array(o, np.int32) * inside).ravel() for o, inside in zip(offsets, context, strict=True)
        ]
    return found


def cut(batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, length: int, stride: int) -> BatchEncoding:
    """The tokens of all features, with their offsets and the row of the batch that each comes from."""
    return tokenizer(
        # Some questions begin with many blanks, which would take tokens from the context.
        [question.lstrip() for question in batch["question"]],
        batch["context"],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


def find_span(encoded: Any, feature: int, start: int, text: str) -> tuple[int, int] | None:
    """The first and last token of these characters of the context; None unless the feature has all of them."""
    blanks = len(text) - len(text.lstrip())
    first = encoded.char_to_token(feature, start + blanks, 1)
    last = encoded.char_to_token(feature, start + len(text.rstrip()) - 1, 1)
    return None if first is None or last is None else (first, last)


@dataclass(frozen=True)
class AnswerDecoder:
    """Turns the logits of features into answers.

    rows: the row of each feature; offsets: (tokens, 2) for each, from `make_features`; starts: its answer's position.
    """

    contexts: list[str]
    golds: list[list[str]]
    rows: NDArray[np.int64]
    offsets: list[NDArray[np.int32]]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, examples: Dataset, features: Dataset) -> AnswerDecoder:
        """The decoder for these examples and the features made of them."""
        columns = features.with_format("numpy")
        return cls(
            list(examples["context"]),
            [answers["text"] for answers in examples["answers"]],
            np.asarray(columns["row"][:]),
            [np.asarray(o).reshape(-1, 2) for o in columns["offsets"][:]],
            np.asarray(columns["start_positions"][:]),
        )

    def score(self, split: str, predictions: Any, labels: Any) -> dict[str, float]:
        """F1 and exact match of the answers that (start logits, end logits, …) give."""
        if labels is not None:
            given = np.asarray(labels[0])
            assert np.array_equal(given, self.starts), "the features were evaluated in another order than they were cut"
        return metrics.squad(self.answers(predictions[0], predictions[1]), self.golds)

    def answers(self, start_logits: NDArray[Any], end_logits: NDArray[Any]) -> list[str]:
        """The best span over all features of each example, or an empty answer when no span is possible."""
        best_score = np.full(len(self.contexts), -np.inf)
        best = [""] * len(self.contexts)
        for low in range(0, len(self.rows), 256):
            chunk = slice(low, low + 256)
            scores, first, last = best_spans(start_logits[chunk], end_logits[chunk], self.offsets[chunk])
            for feature, score, start, end in zip(range(low, low + 256), scores, first, last, strict=False):
                row = self.rows[feature]
                if score > best_score[row]:
                    offsets = self.offsets[feature]
                    best_score[row] = score
                    # Tokens of some vocabularies include the blank before the word.
                    best[row] = self.contexts[row][offsets[start, 0] : offsets[end, 1]].strip()
        return best


def best_spans(
    start_logits: NDArray[Any], end_logits: NDArray[Any], offsets: list[NDArray[np.int32]]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """For each feature the best span's score (-inf when there is none), first and last token.

    The spans come from the 20 best starts and the 20 best ends inside the context; those that end before they start, or
    are longer than 30 tokens, are dropped.
    """
    width = start_logits.shape[1]
    context = np.zeros((len(offsets), width), dtype=bool)
    for feature, pairs in enumerate(offsets):
        context[feature, : len(pairs)] = pairs[:, 1] > pairs[:, 0]

    def top(logits: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        inside = np.where(context & ~np.isnan(logits), logits, -np.inf).astype(np.float64)
        order = np.argsort(-inside, axis=1, kind="stable")[:, :BEST]
        return order, np.take_along_axis(inside, order, axis=1)

    (first, first_score), (last, last_score) = top(start_logits), top(end_logits)
    size = last[:, None, :] - first[:, :, None] + 1
    total = np.where((size > 0) & (size <= LONGEST), first_score[:, :, None] + last_score[:, None, :], -np.inf)
    flat = total.reshape(len(total), -1)
    winner = flat.argmax(axis=1)
    which = np.arange(len(flat))
    i, j = np.divmod(winner, last.shape[1])
    return flat[which, winner], first[which, i], last[which, j]


def round_trip(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, length: int = MAX_LENGTH, stride: int = STRIDE
) -> float:
    """The share of gold answers inside a feature whose tokens give back exactly their text."""
    inside = exact = 0
    for batch in rows.iter(256):
        encoded = cut(batch, tokenizer, length, stride)
        for feature, row in enumerate(encoded["overflow_to_sample_mapping"]):
            context, answers, offsets = batch["context"][row], batch["answers"][row], encoded["offset_mapping"][feature]
            for start, text in zip(answers["answer_start"], answers["text"], strict=True):
                span = find_span(encoded, feature, start, text)
                if span is not None:
                    inside += 1
                    exact += context[offsets[span[0]][0] : offsets[span[1]][1]].strip() == text.strip()
    return exact / inside if inside else 0.0


def _require_answers(split: Split) -> None:
    """Raise unless every row has an answer, inside its context."""
    for column in ("question", "context"):
        split.require_text(column)
    kind = split.rows.data.column("answers").type
    if not (pa.types.is_struct(kind) and {"text", "answer_start"} <= {field.name for field in kind}):
        raise UserError(f"column 'answers' of {split.where} must hold text and answer_start, but holds {kind}")
    columns = split.rows.select_columns(["context", "answers"])
    for row, (context, answers) in enumerate(zip(columns["context"], columns["answers"], strict=True)):
        if not answers["text"] or len(answers["text"]) != len(answers["answer_start"]):
            raise UserError(f"row {row} of {split.where} has no answer; in SQuAD v1.1 every question has one")
        for start, text in zip(answers["answer_start"], answers["text"], strict=True):
            if start < 0 or start + len(text) > len(context):
                where = f"row {row} of {split.where}"
                raise UserError(f"{where} has an answer at {start}, outside its {len(context)} characters of context")


def _require_room(splits: Iterable[Split], tokenizer: PreTrainedTokenizerBase, length: int, stride: int) -> None:
    """Raise unless the longest question leaves room for a piece of context larger than the overlap."""
    longest = 0
    for split in splits:
        for batch in split.rows.select_columns(["question"]).iter(4096):
            longest = max(longest, *map(len, tokenizer(batch["question"], add_special_tokens=False)["input_ids"]))
    room = length - longest - tokenizer.num_special_tokens_to_add(pair=True)
    if room <= stride:
        raise UserError(
            f"max_length {length} leaves {max(room, 0)} tokens of context beside the longest question ({longest}), "
            f"not more than the stride {stride}; raise max_length or lower stride"
        )
