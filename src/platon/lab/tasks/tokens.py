"""The task `tokens`: a tag for each word of the user's own sentences, such as named entities or parts of speech.

The data is .jsonl, .json or .parquet with a list of words and a list of tags in each row, or a CoNLL file. A word's tag
is learned and read at its first token. A row that is longer than the model takes is read in pieces, so that every word
gets a tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from transformers import DataCollatorForTokenClassification

from platon.lab.errors import UserError
from platon.lab.tasks import conll, dataset
from platon.lab.tasks.answer import Answer
from platon.lab.tasks.dataset import Split
from platon.lab.tasks.holdout import hold_out
from platon.lab.tasks.model import Pretrained, name_labels
from platon.lab.tasks.sentence import Sentences, read_labelled, read_unlabelled
from platon.lab.tasks.sequence import MAX_LENGTH, TEST, allowed_length, lengths, rows_of, tokenise
from platon.lab.tasks.tags import Scheme, scheme_of
from platon.lab.tasks.target import shares
from platon.lab.tasks.task import NEW, Prepared, Request, Rows, Task
from platon.lab.tasks.word import TagReader, WordEncoder, is_constant, word_tokenizer


def prepare(task: Task, request: Request) -> Prepared:
    """Read `request.data`; evaluation alone takes the tags and their order from the model."""
    if request.data is None:
        raise UserError(f"the task {task.name} needs your data; give a file or a folder with --data")
    known = Pretrained(task, request).labels() if request.evaluation_only else None
    splits = read_labelled(request) if request.labelled else {NEW: read_unlabelled(request)}
    found = {name: Sentences.of(split, request) for name, split in splits.items()}
    names = known or tuple(sorted({tag for tags in found["train"].tags for tag in tags}))
    if len(names) < 2 and known is None:
        raise UserError(f"{found['train'].split.where} has the tag {''.join(names)!r} only; two are needed")
    if request.labelled:
        for one in found.values():
            one.require(names, "training does not have" if known is None else "the model does not know")
        if "validation" not in found:
            held = hold_out(found.pop("train").split, request.holdout)
            found = {name: Sentences.of(split, request) for name, split in held.items()} | found
        if request.evaluation_only:
            found.pop("train", None)
    return _prepared(task, request, {name: one.take(rows_of(request, name)) for name, one in found.items()}, names)


def _prepared(task: Task, request: Request, found: Mapping[str, Sentences], names: tuple[str, ...]) -> Prepared:
    config = {key: value for key, value in name_labels(names).items() if key != "problem_type"}
    pretrained = Pretrained(task, request, **config)
    tokenizer = word_tokenizer(pretrained)
    length = allowed_length(request.max_length, MAX_LENGTH, tokenizer, pretrained.config)
    scheme = scheme_of(names)
    plain = {
        name: Split(
            Dataset.from_dict({conll.WORDS: one.words} | ({conll.TAGS: one.tags} if one.tags else {})), one.split.where
        )
        for name, one in found.items()
    }
    fingerprint = dataset.digest(plain, (conll.WORDS, conll.TAGS) if request.labelled else (conll.WORDS,))
    encode = WordEncoder(tokenizer, length, {name: number for number, name in enumerate(names)})
    pieces = {
        name: tokenise(split.rows, encode, f"{fingerprint[:16]}-{name}", numbered=True) for name, split in plain.items()
    }
    readers = {
        name: TagReader(names, found[name].words, piece["row"][:], piece["word"][:]) for name, piece in pieces.items()
    }
    rows = {name: one.remove_columns(["row", "word"]) for name, one in pieces.items()}
    evaluation: dict[str, Rows] = {name: one for name, one in rows.items() if name not in ("train", TEST)}

    def score(split: str, predictions: Any, labels: Any) -> dict[str, float]:
        return scheme.score([answer.tags for answer in readers[split].read(predictions)], found[split].tags)

    def answers(predictions: Any) -> list[Answer]:
        return [*readers[NEW].read(predictions)]

    return Prepared(
        build=pretrained.build,
        train=rows.get("train", ()),
        evaluation=evaluation,
        test={name: rows[name] for name in rows if name == TEST},
        collate=DataCollatorForTokenClassification(tokenizer),
        score=score,
        chance={name: scheme.chance(names, one.tags) for name, one in found.items() if one.tags and name != "train"},
        metrics=scheme.metrics,
        fingerprint=fingerprint,
        processor=tokenizer,
        lengths=lengths(rows),
        counts={name: len(one.words) for name, one in found.items() if name != "train"},
        is_constant=is_constant,
        notes=pretrained.notes,
        about=_about(request, found, scheme, pieces, length),
        answers=answers,
        source=found[NEW].split.rows if NEW in found else None,
    )


def _about(
    request: Request, found: Mapping[str, Sentences], scheme: Scheme, pieces: Mapping[str, Dataset], length: int
) -> list[tuple[str, str]]:
    about = [("data", str(request.data)), ("tags", f"{scheme.title}, measured by {scheme.metrics[0]}")]
    for name, one in found.items():
        counted, words = scheme.described(one.tags), sum(map(len, one.words))
        told = shares(counted, sum(counted.values())) if counted else "none"
        about.append((name, f"{len(one.words):,} rows, {words:,} words: {sum(counted.values()):,} tagged, {told}"))
    longer = sum(len(pieces[name]) - len(one.words) for name, one in found.items())
    longest = max(max(map(len, one["input_ids"][:])) for one in pieces.values())
    told = f"longest {longest:,} tokens; none is cut"
    if longer:
        told = f"rows of more than {length:,} tokens are read in pieces: {longer:,} pieces more than rows"
    return [*about, ("texts", told)]
