"""The task `embed`: an embedding model learns to embed texts as the dense model does. It needs no labels.

The model is any encoder, or a sentence-transformers folder, whose pooling and normalisation are kept. Measured on texts
that are held out: the mean cosine to the dense model's embeddings, the rank correlation of the similarities of all
pairs of texts, and the overlap of each text's ten nearest neighbours; and, on pairs that people have scored, Spearman's
correlation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import ModelOutput

from platon.lab.errors import UserError
from platon.lab.tasks import dataset, similarity
from platon.lab.tasks.answer import VectorAnswer
from platon.lab.tasks.corpus import TEXT, Pairs, read_new_texts, read_pairs, read_texts
from platon.lab.tasks.dataset import Split
from platon.lab.tasks.model import Pretrained
from platon.lab.tasks.path import locate_model
from platon.lab.tasks.pooling import Pooling, SentenceFormat, read_format
from platon.lab.tasks.sequence import allowed_length, lengths, tokenise
from platon.lab.tasks.target import logits_of
from platon.lab.tasks.task import NEW, EvaluationRequest, Prepared, Request, Rows, Task

#: tokens, where the model does not say: longer texts are cut
MAX_LENGTH = 512
PAIRS = "pairs"  #: the split of scored pairs


@dataclass
class EmbeddingOutput(ModelOutput):
    """What the model gives while it is trained and measured here; the saved model is the plain encoder."""

    loss: Tensor | None = None
    sentence_embedding: Tensor | None = None


@dataclass(frozen=True)
class Embed:
    """A forward hook that turns an encoder's output into embeddings."""

    pooling: Pooling

    def __call__(self, model: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> EmbeddingOutput:
        return EmbeddingOutput(sentence_embedding=self.pooling(output.last_hidden_state, inputs["attention_mask"]))


class SentenceProcessor:
    """A tokenizer that is saved with the files of sentence-transformers beside it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: SentenceFormat, width: int, max_length: int) -> None:
        self.tokenizer, self.form, self.width, self.max_length = tokenizer, form, width, max_length

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def save_pretrained(self, folder: str | Path, **others: Any) -> None:
        self.tokenizer.save_pretrained(folder, **others)
        self.form.save(Path(folder), self.width, self.max_length)


def prepare(task: Task, request: Request) -> Prepared:
    """Texts in `request.data`, pairs in `request.pairs`, and the encoder in `request.model`."""
    if request.model is None:
        raise UserError(f"{task.name} needs a model; give an encoder or a sentence-transformers folder with --model")
    form = read_format(locate_model(request.model))
    texts = read_texts(request) if request.labelled else {NEW: read_new_texts(request)}
    pairs = (
        None if request.pairs is None or not request.labelled else read_pairs(Path(request.pairs), request.eval_rows)
    )
    pretrained = Pretrained(task, replace(request, model=form.encoder))
    tokenizer = pretrained.tokenizer()
    length = allowed_length(request.max_length, form.max_length or MAX_LENGTH, tokenizer, pretrained.config)

    used = {name: s.take(request.train_rows if name == "train" else request.eval_rows) for name, s in texts.items()}
    if pairs is not None:
        used[PAIRS] = Split(Dataset.from_dict({TEXT: pairs.texts}), str(request.pairs))
    fingerprint = dataset.digest(used, (TEXT,))
    encode = partial(_encode, tokenizer=tokenizer, form=form, length=length)
    rows = {name: tokenise(split.rows, encode, f"{fingerprint[:16]}-{name}") for name, split in used.items()}
    evaluation: dict[str, Rows] = {name: one for name, one in rows.items() if name != "train"}
    collate = DataCollatorWithPadding(tokenizer)

    adapt = partial(_adapt, pooling=form.pooling)

    def build() -> PreTrainedModel:
        return adapt(pretrained.build())

    # The random state of a training must not depend on this.
    dense: dict[str, NDArray[Any]] = {}
    with torch.random.fork_rng(devices=[]):
        if request.labelled:
            reference = _dense_model(task, request) or build()
            dense = {name: embed(reference, rows[name], collate) for name in evaluation}
    return Prepared(
        build=build,
        train=rows.get("train", ()),
        evaluation=evaluation,
        collate=collate,
        score=partial(_score, dense=dense, pairs=pairs),
        chance={name: _chance(name, vectors) for name, vectors in dense.items()},
        metrics=task.metrics,
        fingerprint=fingerprint,
        processor=SentenceProcessor(tokenizer, form, pretrained.config.hidden_size, length),
        lengths=lengths(rows),
        label_names=(),
        is_constant=similarity.is_constant,
        counts={} if pairs is None else {PAIRS: len(pairs.scores)},
        notes=pretrained.notes,
        about=[
            ("data", str(request.data)),
            *((name, f"{len(one):,} texts") for name, one in rows.items()),
            ("texts", f"longest {max(map(max, lengths(rows).values())):,} tokens, cut at {length:,}"),
        ],
        answers=lambda predictions: [VectorAnswer(row) for row in logits_of(predictions)],
        source=used[NEW].rows if NEW in used else None,
        adapt=adapt,
    )


def _adapt(model: PreTrainedModel, pooling: Pooling) -> PreTrainedModel:
    """The encoder with a hook that gives embeddings; one that has it stays as it is."""
    if not any(isinstance(hook, Embed) for hook in model._forward_hooks.values()):
        model.register_forward_hook(Embed(pooling), with_kwargs=True)
    return model


def _dense_model(task: Task, request: Request) -> PreTrainedModel | None:
    """The model that an evaluated one was trained from; `None` in a training, which starts from it."""
    if not isinstance(request, EvaluationRequest) or request.trained_from is None:
        return None
    form = read_format(locate_model(request.trained_from))
    return _adapt(Pretrained(task, replace(request, model=form.encoder)).build(), form.pooling)


def embed(model: PreTrainedModel, rows: Any, collate: Callable[[list[Any]], Any], batch: int = 64) -> NDArray[Any]:
    """The embeddings of tokenised rows, in their order. The model is left in evaluation mode."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model.eval().to(device)
    order = np.argsort(lengths({"": rows})[""], kind="stable")  # texts of similar length together: less padding
    found: list[NDArray[Any]] = []
    with torch.no_grad():
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch].tolist()
            output = model(**{name: t.to(device) for name, t in collate([rows[i] for i in chosen]).items()})
            found.append(output.sentence_embedding.float().cpu().numpy())
    return np.concatenate(found)[np.argsort(order)]


def _encode(
    batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase, form: SentenceFormat, length: int
) -> dict[str, Any]:
    texts = [form.prompt + (text.lower() if form.lower else text) for text in batch[TEXT]]
    return dict(tokenizer(texts, truncation=True, max_length=length))


def _score(
    split: str, predictions: Any, labels: Any, *, dense: Mapping[str, NDArray[Any]], pairs: Pairs | None
) -> dict[str, float]:
    ours = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
    theirs = dense[split]
    if split == PAIRS:
        assert pairs is not None
        return {
            "spearman": similarity.pair_spearman(ours, pairs.scores),
            "dense_spearman": similarity.pair_spearman(theirs, pairs.scores),
        }
    return {
        "cosine": similarity.mean_cosine(ours, theirs),
        "rank_correlation": similarity.rank_correlation(ours, theirs),
        "neighbours": similarity.neighbour_overlap(ours, theirs),
    }


def _chance(split: str, dense: NDArray[Any]) -> dict[str, float]:
    """What the same embedding for every text reaches."""
    if split == PAIRS:
        return {"spearman": 0.0, "dense_spearman": 0.0}
    others = max(len(dense) - 1, 1)
    return {
        "cosine": similarity.constant_cosine(dense),
        "rank_correlation": 0.0,
        "neighbours": min(similarity.NEIGHBOURS, others) / others,
    }
