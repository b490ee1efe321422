"""GLUE and the user's own texts, from files made here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from platon.lab.errors import UserError
from platon.lab.tasks import Prepared, Request, find, glue
from platon.lab.tasks import dataset as sources

Write = Callable[..., Path]
GLUE = list(glue.COLUMNS)


def forward(prepared: Prepared, split: str) -> dict[str, float]:
    """One batch of everything through a fresh model and the metric."""
    torch.manual_seed(0)
    model = prepared.build().eval()
    rows = prepared.evaluation[split]
    batch = prepared.collate([rows[i] for i in range(len(rows))])
    with torch.no_grad():
        output = model(**batch)
    assert torch.isfinite(output.loss)
    return prepared.score(split, output.logits.numpy(), batch["labels"].numpy())


@pytest.mark.parametrize("name", GLUE)
def test_glue_runs_from_local_files(name: str, tmp_path: Path, write_parquet: Write, tiny_bert: Path) -> None:
    columns = glue.COLUMNS[name]
    labels = [0.0, 2.5, 5.0, 1.2] * 3 if columns.labels is None else [0, 1, len(columns.labels) - 1, 0] * 3
    texts = {column: [f"{column} {n} the cat" for n in range(12)] for column in columns.texts}
    for split in (
        ("train", "validation_matched", "validation_mismatched") if name == "mnli" else ("train", "validation")
    ):
        write_parquet(f"glue/{name}/{split}.parquet", **texts, label=labels, idx=list(range(12)))
    prepared = find(name).prepare(Request(data=tmp_path, model=str(tiny_bert)))
    assert tuple(prepared.evaluation) == find(name).splits
    for split in prepared.evaluation:
        found = forward(prepared, split)
        assert tuple(found) == prepared.metrics == find(name).metrics
        assert prepared.chance[split].keys() == found.keys()
    for split, rows in {"train": prepared.train, **prepared.evaluation}.items():
        assert prepared.lengths[split] == [len(row) for row in rows["input_ids"]]
    config = prepared.build().config
    assert config.num_labels == (len(columns.labels) if columns.labels else 1)
    assert tuple(config.id2label.values()) == (columns.labels or ("score",))


def test_mnli_without_the_mismatched_split(tmp_path: Path, write_parquet: Write, tiny_bert: Path) -> None:
    for split in ("train", "validation_matched"):
        write_parquet(f"mnli/{split}.parquet", premise=["a", "b"], hypothesis=["c", "d"], label=[0, 2])
    prepared = find("mnli").prepare(Request(data=tmp_path, model=str(tiny_bert)))
    assert list(prepared.evaluation) == ["matched"]


def test_places_and_shards(write_sst2: Write, write_parquet: Write, tmp_path: Path, tiny_bert: Path) -> None:
    whole = write_sst2()
    prepared = [
        find("sst2").prepare(Request(data=place, model=str(tiny_bert)))
        for place in (whole, whole / "glue", whole / "glue" / "sst2")
    ]
    rows = {s: sources.read_parquet([whole / "glue" / "sst2" / f"{s}.parquet"])[:] for s in ("train", "validation")}
    for split, columns in rows.items():
        for shard, part in enumerate((slice(0, 7), slice(7, None))):
            write_parquet(
                f"sharded/sst2/{split}-0000{shard}-of-00002.parquet", **{k: v[part] for k, v in columns.items()}
            )
    prepared.append(find("sst2").prepare(Request(data=tmp_path / "sharded", model=str(tiny_bert))))
    assert len({p.fingerprint for p in prepared}) == 1


def test_hub_and_files_give_the_same(write_sst2: Write, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_sst2()
    hub = datasets.DatasetDict(
        {
            split: sources.read_parquet([folder / "glue" / "sst2" / f"{split}.parquet"]).cast_column(
                "label", datasets.ClassLabel(names=["negative", "positive"])
            )
            for split in ("train", "validation")
        }
    )
    hub["test"] = datasets.Dataset.from_dict({"sentence": ["?"], "label": [-1]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: {("nyu-mll/glue", "sst2"): hub}[name, config])
    request = Request(data=folder, model=str(tiny_bert), train_rows=8)
    local, remote = (find("sst2").prepare(r) for r in (request, Request(model=str(tiny_bert), train_rows=8)))
    assert local.fingerprint == remote.fingerprint
    assert local.train[:] == remote.train[:]


def test_subsets_are_fixed_and_fingerprints_follow(write_sst2: Write, tiny_bert: Path) -> None:
    folder = write_sst2()

    def prepare(**asked: Any) -> Prepared:
        return find("sst2").prepare(Request(data=folder, model=str(tiny_bert), **asked))

    np.random.seed(3)  # the training seed must not matter
    few, again, more = prepare(train_rows=6), prepare(train_rows=6), prepare(train_rows=12)
    assert few.train[:] == again.train[:]
    assert few.fingerprint == again.fingerprint != more.fingerprint
    assert {tuple(row) for row in few.train["input_ids"]} < {tuple(row) for row in more.train["input_ids"]}
    assert prepare(train_rows=10**6).fingerprint == prepare().fingerprint
    assert len(prepare(eval_rows=5).evaluation["validation"]) == 5


def test_nothing_is_written_next_to_the_data(write_sst2: Write, tiny_bert: Path) -> None:
    folder = write_sst2()
    before = sorted(folder.rglob("*"))
    find("sst2").prepare(Request(data=folder, model=str(tiny_bert)))
    assert sorted(folder.rglob("*")) == before


def test_a_trained_model_says_its_labels(write_sst2: Write, tiny_bert: Path, tmp_path: Path) -> None:
    prepared = find("sst2").prepare(Request(data=write_sst2(), model=str(tiny_bert)))
    torch.manual_seed(0)
    trainer = Trainer(
        prepared.build(),
        TrainingArguments(
            str(tmp_path / "run"),
            max_steps=3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            label_names=list(prepared.label_names),
            dataloader_pin_memory=False,
        ),
        data_collator=prepared.collate,
        train_dataset=prepared.train,
        eval_dataset=prepared.evaluation["validation"],
        processing_class=prepared.processor,
        compute_metrics=lambda p: prepared.score("validation", p.predictions, p.label_ids),
    )
    trainer.train()
    assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1
    trainer.save_model(str(tmp_path / "saved"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("the cat")["input_ids"]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([0, 1, 7], r"row 2 of .*train\.parquet has the label 7, which is not in 0 to 1"),
        ([0, -1, 1], r"row 1 of .*train\.parquet has the label -1"),
        ([0, None, 1], r"row 1 of .*train\.parquet has the label None"),
        ([0.5, 1.0], r"column 'label' of .*train\.parquet must hold whole numbers, but holds double"),
        ([], r"train\.parquet is empty; at least one row is needed"),
    ],
)
def test_wrong_labels(labels: list[Any], sentence: str, write_sst2: Write, tiny_bert: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        find("sst2").prepare(Request(data=write_sst2(train=labels), model=str(tiny_bert)))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"text": ["a"], "label": [0]}, r"train\.parquet has no column 'sentence'; it has: text, label"),
        ({"sentence": ["a"], "y": [0]}, r"train\.parquet has no column 'label'; it has: sentence, y"),
        ({"sentence": [1], "label": [0]}, r"column 'sentence' of .* must hold text, but holds int64"),
        ({"sentence": ["a", None], "label": [0, 1]}, r"row 1 of .* has no text in column 'sentence'"),
    ],
)
def test_wrong_columns(
    columns: dict[str, Any], sentence: str, write_sst2: Write, write_parquet: Write, tiny_bert: Path
) -> None:
    folder = write_sst2()
    write_parquet("glue/sst2/train.parquet", **columns)
    with pytest.raises(UserError, match=sentence):
        find("sst2").prepare(Request(data=folder, model=str(tiny_bert)))


def test_wrong_scores(write_parquet: Write, tmp_path: Path, tiny_bert: Path) -> None:
    for split, label in {"train": [1.0, 2.0], "validation": [1.0, float("nan")]}.items():
        write_parquet(f"stsb/{split}.parquet", sentence1=["a", "b"], sentence2=["c", "d"], label=label)
    with pytest.raises(UserError, match=r"row 1 of .*validation\.parquet has the label nan, not a number"):
        find("stsb").prepare(Request(data=tmp_path, model=str(tiny_bert)))


def test_missing_files(write_sst2: Write, tmp_path: Path, tiny_bert: Path) -> None:
    folder = write_sst2()
    with pytest.raises(UserError, match=r"no data for this task: expected .*glue/rte/train\.parquet; .* holds: glue"):
        find("rte").prepare(Request(data=folder, model=str(tiny_bert)))
    (folder / "glue" / "sst2" / "validation.parquet").unlink()
    with pytest.raises(UserError, match=r"sst2 has no validation\.parquet; it holds: train\.parquet"):
        find("sst2").prepare(Request(data=folder, model=str(tiny_bert)))


@pytest.mark.parametrize("size", [0, 10, 300])
def test_truncated_parquet(size: int, write_sst2: Write, tiny_bert: Path) -> None:
    folder = write_sst2()
    file = folder / "glue" / "sst2" / "validation.parquet"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(
        UserError, match=r"validation\.parquet is not a complete parquet file; copy or download it again"
    ):
        find("sst2").prepare(Request(data=folder, model=str(tiny_bert)))


def test_length_beyond_the_model(write_sst2: Write, tiny_bert: Path) -> None:
    with pytest.raises(UserError, match="max_length 65 is more than the 64 tokens"):
        find("sst2").prepare(Request(data=write_sst2(), model=str(tiny_bert), max_length=65))
    prepared = find("sst2").prepare(Request(data=write_sst2(), model=str(tiny_bert), max_length=4))
    assert prepared.lengths["train"] == [4] * 20


ROWS = [{"text": f'the cat, {n} "a"\nNone', "mood": ("glad", "sad", "mad")[n % 3]} for n in range(30)]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the format of the file's name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        separator = "\t" if file.suffix == ".tsv" else ","
        quoted = [[f'"{str(cell).replace(chr(34), chr(34) * 2)}"' for cell in row.values()] for row in rows]
        file.write_text("\n".join(separator.join(cells) for cells in [list(rows[0]), *quoted]) + "\n")
    return file


def own(data: Path, model: Path, **asked: Any) -> Prepared:
    return find("text").prepare(Request(data=data, model=str(model), **asked))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_own_text_in_every_format(suffix: str, tmp_path: Path, tiny_bert: Path) -> None:
    file = write_rows(tmp_path / f"reviews.{suffix}", ROWS)
    prepared = own(file, tiny_bert, text_column="text")
    assert (len(prepared.train), len(prepared.evaluation["validation"])) == (27, 3)
    assert prepared.build().config.id2label == {0: "glad", 1: "mad", 2: "sad"}
    assert prepared.metrics == ("accuracy",)
    forward(prepared, "validation")
    same = own(write_rows(tmp_path / "same.jsonl", ROWS), tiny_bert, label_column="mood")
    assert same.fingerprint == prepared.fingerprint


def test_own_folder_pairs_and_numbers(tmp_path: Path, tiny_bert: Path) -> None:
    rows = [{"id": n, "one": f"the cat {n}", "two": "the dog", "class": n % 2 + 3} for n in range(8)]
    write_rows(tmp_path / "data" / "train.csv", rows)
    write_rows(tmp_path / "data" / "dev.jsonl", rows[:4])
    prepared = own(tmp_path / "data", tiny_bert, text_column="one", second_column="two")
    assert (len(prepared.train), len(prepared.evaluation["validation"])) == (8, 4)
    assert prepared.build().config.id2label == {0: "3", 1: "4"}
    assert max(prepared.train["token_type_ids"][0]) == 1
    forward(prepared, "validation")


def test_own_regression(tmp_path: Path, tiny_bert: Path) -> None:
    rows = [{"review": f"the cat {n}", "stars": n / 2} for n in range(10)]
    prepared = own(write_rows(tmp_path / "stars.csv", rows), tiny_bert, holdout=0.5)
    assert prepared.metrics == ("pearson", "spearman")
    assert prepared.build().config.problem_type == "regression"
    forward(prepared, "validation")


def test_labels_that_are_numbers_in_one_file_only(tmp_path: Path, tiny_bert: Path) -> None:
    write_rows(tmp_path / "train.csv", [{"text": "x", "label": label} for label in ("1", "2", "none")])
    write_rows(tmp_path / "validation.csv", [{"text": "x", "label": label} for label in ("1", "2")])
    assert own(tmp_path, tiny_bert).evaluation["validation"]["labels"][:] == [0, 1]


@pytest.mark.parametrize(
    ("rows", "asked", "sentence"),
    [
        ([{"a": "x", "b": "y"}], {}, r"which column of .* is the label\? give --label-column; it has: a, b"),
        (
            [{"a": "x", "b": "y", "label": "z"}],
            {},
            r"which column of .* is the text\? give --text-column; it has: a, b",
        ),
        ([{"a": "x", "label": 1}], {"text_column": "text"}, r"has no column 'text'; it has: a, label"),
        ([{"a": "x", "label": 1}], {"label_column": "y"}, r"has no column 'y'; it has: a, label"),
        ([{"a": "x", "label": 1}] * 2, {}, r"column 'label' of .* has the label 1 only; two are needed"),
        ([{"a": "x", "label": 1}, {"a": "x", "label": None}], {}, r"row 1 of .* has no label in column 'label'"),
        ([{"a": "x", "label": {"b": 1}}], {}, r"column 'label' of .* must hold labels, but holds struct"),
        ([{"a": "x", "label": 1}, {"label": 2}], {}, r"row 1 of .* has no text in column 'a'"),
        (["x"], {}, r"row 0 of .* is no object with columns, but str"),
    ],
)
def test_own_rows_that_are_wrong(
    rows: list[Any], asked: dict[str, str], sentence: str, tmp_path: Path, tiny_bert: Path
) -> None:
    with pytest.raises(UserError, match=sentence):
        own(write_rows(tmp_path / "own.json", rows), tiny_bert, **asked)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("own.csv", b"", r"own\.csv is empty; the first line must name the columns"),
        ("own.csv", b"text,label\n", r"own\.csv is empty; at least one row is needed"),
        ("own.csv", b"text,label\na,0\nb, c,1\n", r"own\.csv, line 3, has 3 cells, but the header has 2"),
        ("own.csv", b"text,label\n\xff\xfe,0\n", r"own\.csv is not UTF-8 text"),
        ("own.jsonl", b'{"text": "a"}\n{"text"', r"own\.jsonl, line 2, is not JSON"),
        ("own.json", b"[1, ", r"own\.json cannot be read"),
        ("own.parquet", b"PAR1", r"own\.parquet is not a complete parquet file"),
        ("own.xlsx", b"", r"own\.xlsx is of no known kind; give one of \.csv"),
    ],
)
def test_own_files_that_are_wrong(name: str, content: bytes, sentence: str, tmp_path: Path, tiny_bert: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        own(tmp_path / name, tiny_bert)


def test_own_folders_that_are_wrong(tmp_path: Path, tiny_bert: Path) -> None:
    with pytest.raises(UserError, match="needs your data; give a file or a folder"):
        find("text").prepare(Request(model=str(tiny_bert)))
    with pytest.raises(UserError, match=r"has no train\.csv.*; it holds: nothing"):
        own(tmp_path, tiny_bert)
    train = write_rows(tmp_path / "train.csv", [{"text": "x", "label": "a"}, {"text": "y", "label": "b"}])
    with pytest.raises(UserError, match=r"trian\.csv does not exist; nearest: 'train\.csv'"):
        own(tmp_path / "trian.csv", tiny_bert)
    write_rows(tmp_path / "validation.csv", [{"text": "x", "label": "c"}])
    with pytest.raises(
        UserError, match=r"row 0 of .*validation\.csv has the label 'c', which training does not have: 'a'"
    ):
        own(tmp_path, tiny_bert)
    write_rows(tmp_path / "train.json", ROWS)
    with pytest.raises(UserError, match=r"has train\.csv and train\.json; keep one"):
        own(train.parent, tiny_bert)


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_json_lines_end_at_newlines_alone(character: str, tmp_path: Path, tiny_bert: Path) -> None:
    rows = [{"text": f"the cat{character}sat {n}", "label": n % 2} for n in range(10)]
    lines = [json.dumps(row, ensure_ascii=False).replace("\\f", "\x0c") for row in rows]
    if character == "\x0c":  # JSON escapes it
        lines = [json.dumps(row) for row in rows]
    (tmp_path / "own.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert len(own(tmp_path / "own.jsonl", tiny_bert).train) == 9


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_texts_are_refused_in_every_format(suffix: str, empty: str, tmp_path: Path, tiny_bert: Path) -> None:
    rows = [{"text": "the cat", "label": "a"}, {"text": "the dog", "label": "b"}, {"text": empty, "label": "a"}]
    with pytest.raises(UserError, match=r"row 2 of .* has no text in column 'text'; fill it in or drop the row"):
        own(write_rows(tmp_path / f"own.{suffix}", rows), tiny_bert)


# --- evaluation of a trained model ------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path, tiny_bert: Path) -> Callable[..., Prepared]:
    """A model that was trained on three classes, and a function that prepares its evaluation on other data."""
    prepared = own(write_rows(tmp_path / "reviews.csv", ROWS), tiny_bert, text_column="text")
    prepared.build().save_pretrained(tmp_path / "model")
    prepared.processor.save_pretrained(tmp_path / "model")
    asked = Request(data=tmp_path / "reviews.csv", text_column="text", eval_rows=2)
    return lambda data=None: find("text").prepare(asked.for_evaluation(tmp_path / "model", data))


def test_evaluation_of_the_same_data_takes_the_same_rows(trained: Callable[..., Prepared], tmp_path: Path) -> None:
    prepared = trained()
    assert len(prepared.train) == 0
    assert prepared.counts == {"validation": 2}
    trained_on = own(tmp_path / "reviews.csv", tmp_path / "model", text_column="text", eval_rows=2)
    assert prepared.evaluation["validation"][:] == trained_on.evaluation["validation"][:]


def test_evaluation_of_other_data_takes_every_row_and_the_models_classes(
    trained: Callable[..., Prepared], tmp_path: Path
) -> None:
    """Without one of the classes, and in an order of its own, the numbers are still the model's."""
    new = write_rows(tmp_path / "new.jsonl", [{"text": "the cat", "mood": mood} for mood in ("sad", "mad", "sad")])
    prepared = trained(new)
    assert prepared.counts == {"validation": 3}
    assert prepared.evaluation["validation"]["labels"][:] == [2, 1, 2]
    assert prepared.build().config.id2label == {0: "glad", 1: "mad", 2: "sad"}
    forward(prepared, "validation")
    one = trained(write_rows(tmp_path / "one.csv", [{"text": "the cat", "mood": "mad"}]))
    assert one.evaluation["validation"]["labels"][:] == [1]


def test_evaluation_of_a_folder_needs_no_training_file(trained: Callable[..., Prepared], tmp_path: Path) -> None:
    write_rows(tmp_path / "other" / "validation.csv", ROWS[:6])
    assert trained(tmp_path / "other").counts == {"validation": 6}
    write_rows(tmp_path / "other" / "train.csv", [{"no": "column"}])
    assert trained(tmp_path / "other").counts == {"validation": 6}


def test_a_label_that_the_model_does_not_know(trained: Callable[..., Prepared], tmp_path: Path) -> None:
    new = write_rows(tmp_path / "new.csv", [*ROWS[:2], {"text": "the cat", "mood": "bored"}])
    with pytest.raises(
        UserError, match=r"row 2 of .*new\.csv has the label 'bored', which the model does not know: 'glad', 'mad'"
    ):
        trained(new)
    wrong = write_rows(tmp_path / "wrong.csv", [{"a": "x", "b": "y", "c": "z"}])
    with pytest.raises(UserError, match=r"is the label\? name it as in the training data; it has: a, b, c"):
        trained(wrong)


def test_evaluation_of_numbers(tmp_path: Path, tiny_bert: Path) -> None:
    rows = [{"review": f"the cat {n}", "stars": n / 2} for n in range(10)]
    asked = Request(data=write_rows(tmp_path / "stars.csv", rows), model=str(tiny_bert))
    prepared = find("text").prepare(asked)
    prepared.build().save_pretrained(tmp_path / "model")
    prepared.processor.save_pretrained(tmp_path / "model")
    again = find("text").prepare(asked.for_evaluation(tmp_path / "model", tmp_path / "stars.csv"))
    assert again.counts == {"validation": 10}
    assert again.metrics == ("pearson", "spearman")


def test_glue_is_evaluated_without_its_training_file(write_sst2: Write, tiny_bert: Path) -> None:
    folder = write_sst2()
    (folder / "glue" / "sst2" / "train.parquet").unlink()
    prepared = find("sst2").prepare(Request(data=folder).for_evaluation(tiny_bert))
    assert (len(prepared.train), prepared.counts) == (0, {"validation": 20})
