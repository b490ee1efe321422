"""SQuAD: features, spans, and the way back from logits to answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Trainer, TrainingArguments

from platon.lab.errors import UserError
from platon.lab.settings import Settings
from platon.lab.step_count import StepCounts
from platon.lab.tasks import Prepared, Request, find, squad
from platon.lab.tasks import dataset as sources
from platon.lab.trainer import LabTrainer

Write = Callable[..., Path]
FILLER = "the cat sat on a mat. "


def rows(count: int = 6) -> dict[str, list[Any]]:
    """Contexts of different lengths, most of several windows, with the answer somewhere inside."""
    found: dict[str, list[Any]] = {"id": [], "question": [], "context": [], "answers": []}
    for n in range(count):
        before, answer = FILLER * (n * 3 % 7), f"dog {n}-b"
        found["id"].append(str(n))
        found["question"].append("  who is good?")
        found["context"].append(before + answer + ", " + FILLER * (count - n))
        found["answers"].append({"text": [answer, "dog"], "answer_start": [len(before), len(before)]})
    return found


@pytest.fixture
def data(write_parquet: Write, tmp_path: Path) -> Path:
    for split in ("train", "validation"):
        write_parquet(f"squad/{split}.parquet", **rows())
    return tmp_path


@pytest.fixture
def prepared(data: Path, tiny_bert: Path) -> Prepared:
    return find("squad").prepare(Request(data=data, model=str(tiny_bert), max_length=40, stride=12))


def logits_at(prepared: Prepared) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Logits of a model that knows the answer where a window has it, and is unsure elsewhere."""
    windows = prepared.evaluation["validation"]
    labels = np.array(windows["start_positions"][:]), np.array(windows["end_positions"][:])
    noise = np.random.default_rng(0).normal(size=(2, len(windows), 40))
    for logits, positions in zip(noise, labels, strict=True):
        logits[np.arange(len(windows)), positions] += 50 * (positions > 0)
    return noise[0], noise[1], labels


def test_windows_cover_every_answer(prepared: Prepared, tiny_bert: Path) -> None:
    assert len(prepared.train) > 6
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    for window in prepared.train:
        start, end = window["start_positions"], window["end_positions"]
        assert len(window["input_ids"]) <= 40
        if start:
            assert tokenizer.decode(window["input_ids"][start : end + 1]).startswith("dog")
        else:
            assert end == 0
    assert sum(start > 0 for start in prepared.train["start_positions"]) >= 6
    assert prepared.lengths["train"] == [len(ids) for ids in prepared.train["input_ids"]]


def test_perfect_logits_give_the_gold_answers(prepared: Prepared) -> None:
    start, end, labels = logits_at(prepared)
    assert prepared.score("validation", (start, end), labels) == {"f1": 1.0, "exact_match": 1.0}
    assert prepared.score("validation", (start, end, "hidden states"), labels)["f1"] == 1.0


def test_padding_between_batches_changes_nothing(prepared: Prepared) -> None:
    start, end, labels = logits_at(prepared)
    wide = [np.pad(x, ((0, 0), (0, 9)), constant_values=-100) for x in (start, end)]
    assert prepared.score("validation", tuple(wide), labels)["exact_match"] == 1.0


def test_diverged_logits_give_empty_answers(prepared: Prepared) -> None:
    start, end, labels = logits_at(prepared)
    assert prepared.score("validation", (start * np.nan, end), labels) == {"f1": 0.0, "exact_match": 0.0}


def test_another_order_is_noticed(prepared: Prepared) -> None:
    start, end, labels = logits_at(prepared)
    with pytest.raises(AssertionError, match="another order"):
        prepared.score("validation", (start[::-1], end[::-1]), (labels[0][::-1], labels[1][::-1]))


def slow_best(start: np.ndarray, end: np.ndarray, offsets: np.ndarray) -> tuple[float, int, int]:
    """The same search, one span at a time."""
    inside = [t for t in range(len(offsets)) if offsets[t, 1] > offsets[t, 0]]
    firsts = sorted(inside, key=lambda t: -start[t])[: squad.BEST]
    lasts = sorted(inside, key=lambda t: -end[t])[: squad.BEST]
    spans = [(start[i] + end[j], i, j) for i in firsts for j in lasts if i <= j < i + squad.LONGEST]
    return max(spans, default=(-np.inf, 0, 0))


def test_best_spans_equal_a_slow_search() -> None:
    draw = np.random.default_rng(1)
    offsets = []
    for length in draw.integers(3, 90, size=60):
        begins = np.arange(length) * 2
        pairs = np.stack([begins, begins + 1], axis=1).astype(np.int32)
        pairs[: draw.integers(0, length + 1)] = 0  # the question
        offsets.append(pairs)
    start, end = draw.normal(size=(2, 60, 90)) * 3
    scores, first, last = squad.best_spans(start, end, offsets)
    for window, pairs in enumerate(offsets):
        expected = slow_best(start[window], end[window], pairs)
        assert scores[window] == expected[0]
        if np.isfinite(expected[0]):
            assert (first[window], last[window]) == expected[1:]


def test_round_trip(data: Path, tiny_bert: Path, write_parquet: Write) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    good = sources.read_parquet([data / "squad" / "train.parquet"])
    assert squad.round_trip(good, tokenizer, 40, 12) == 1.0
    # "ca" is half a token: its tokens give back "cat".
    file = write_parquet(
        "x.parquet", question=["who"], context=["the cat"], answers=[{"text": ["ca"], "answer_start": [4]}]
    )
    assert squad.round_trip(sources.read_parquet([file]), tokenizer, 40, 12) == 0.0


def test_trainer_evaluates(prepared: Prepared, tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=2,
        per_device_eval_batch_size=3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        label_names=list(prepared.label_names),
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        prepared.build(),
        arguments,
        data_collator=prepared.collate,
        train_dataset=prepared.train,
        eval_dataset=prepared.evaluation["validation"],
        compute_metrics=lambda p: prepared.score("validation", p.predictions, p.label_ids),
    )
    trainer.train()
    found = trainer.evaluate()
    assert 0 <= found["eval_f1"] <= 1
    assert found["eval_loss"] > 0


def test_rows_are_measured_by_length_and_scored_in_their_order(prepared: Prepared, tmp_path: Path) -> None:
    seen: list[Any] = []
    prepared.score = lambda split, predictions, labels: seen.extend((predictions, labels)) or {"f1": 0.0}
    windows = prepared.evaluation["validation"]
    assert sorted(prepared.lengths["validation"]) != prepared.lengths["validation"]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=3, use_cpu=True, label_names=list(prepared.label_names)
    )
    arguments.remove_unused_columns = False
    model = prepared.build().eval()
    LabTrainer(Settings(task="squad"), StepCounts(1, 0, 0, 0, 1, 1, 1), prepared, model=model, args=arguments).measure()
    (starts, ends), labels = seen
    assert labels[0].tolist() == windows["start_positions"][:]
    assert labels[1].tolist() == windows["end_positions"][:]
    for number, window in enumerate(windows):
        with torch.no_grad():
            alone = model(**prepared.collate([window]))
        length = len(window["input_ids"])
        np.testing.assert_allclose(starts[number, :length], alone.start_logits[0], atol=1e-5)
        np.testing.assert_allclose(ends[number, :length], alone.end_logits[0], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"answers": [{"text": ["x"], "answer_start": [900]}]},
            r"row 0 of .*train\.parquet has an answer at 900, outside",
        ),
        ({"answers": [{"text": [], "answer_start": []}]}, r"row 0 of .*train\.parquet has no answer; in SQuAD v1\.1"),
        ({"answers": ["dog"]}, r"column 'answers' of .* must hold text and answer_start, but holds string"),
        ({"question": [None]}, r"row 0 of .* has no text in column 'question'|must hold text, but holds null"),
        ({"context": None}, r"train\.parquet has no column 'context'; it has: id, question, answers"),
    ],
)
def test_wrong_rows(change: dict[str, Any], sentence: str, data: Path, write_parquet: Write, tiny_bert: Path) -> None:
    columns = {name: values for name, values in ({k: v[:1] for k, v in rows().items()} | change).items() if values}
    write_parquet("squad/train.parquet", **columns)
    with pytest.raises(UserError, match=sentence):
        find("squad").prepare(Request(data=data, model=str(tiny_bert)))


def test_no_room_for_the_context(data: Path, tiny_bert: Path) -> None:
    with pytest.raises(
        UserError, match=r"max_length 20 leaves \d+ tokens .*, not more than the stride 15; raise max_length"
    ):
        find("squad").prepare(Request(data=data, model=str(tiny_bert), max_length=20, stride=15))


def test_evaluation_counts_questions_and_needs_no_training_file(data: Path, tiny_bert: Path) -> None:
    questions = len(sources.read_parquet([data / "squad" / "validation.parquet"]))
    (data / "squad" / "train.parquet").unlink()
    asked = Request(data=data, max_length=40, stride=12)
    prepared = find("squad").prepare(asked.for_evaluation(tiny_bert))
    assert prepared.counts == {"validation": questions}
    assert len(prepared.evaluation["validation"]) > questions
    assert len(prepared.train) == 0
