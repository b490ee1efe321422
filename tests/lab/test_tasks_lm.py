"""The task lm: documents, blocks, perplexity, and runs that are measured by it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import platon
from platon.lab import run as lab
from platon.lab.errors import UserError
from platon.lab.finished import evaluate_run
from platon.lab.record import read_record
from platon.lab.run import prune
from platon.lab.settings import ResolvedSettings, resolve
from platon.lab.stop import Interrupted, StopCallback
from platon.lab.tasks import Prepared, Request, find
from platon.lab.tasks.block import IGNORED, BlockCollator, blocks, perplexity, row_losses, windows
from platon.lab.training import Training

Write = Callable[..., Path]
TEXTS = [f"Document {number} says: {'the cat sat on the mat. ' * (number % 5 + 1)}" for number in range(40)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return file


def prepared(data: Path | None, model: Path, **asked: Any) -> Prepared:
    return find("lm").prepare(Request(data=data, model=str(model), **asked))


# --- documents --------------------------------------------------------------------------------------------------------


def tokens_of(rows: Any) -> list[list[int]]:
    return [block.tokens.tolist() for block in rows]


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, tiny_llama: Path, write_parquet: Write) -> None:
    found = []
    for name in ("a.jsonl", "a.json", "a.parquet", "a.csv"):
        file = tmp_path / name
        if name == "a.jsonl":
            file.write_text("\n".join(json.dumps({"text": text, "url": "x"}) for text in TEXTS))
        elif name == "a.json":
            file.write_text(json.dumps([{"text": text} for text in TEXTS]))
        elif name == "a.csv":
            file.write_text("text\n" + "\n".join(f'"{text}"' for text in TEXTS))
        else:
            write_parquet(name, text=TEXTS)
        found.append(prepared(file, tiny_llama))
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text)
    found.append(prepared(folder, tiny_llama))
    assert len({one.fingerprint for one in found}) == 1
    assert tokens_of(found[0].train) == tokens_of(found[-1].train)


def test_wikitext_is_the_same_in_the_hubs_layout_and_as_a_raw_file(
    tmp_path: Path, tiny_llama: Path, write_parquet: Write
) -> None:
    lines = ["", " = A title = \n", " The first line . \n", "", " The second one . \n"]
    for split in ("train", "validation", "test"):
        write_parquet(f"hub/wikitext-2-raw-v1/{split}-00000-of-00001.parquet", text=[f" {split} \n", *lines])
        raw = tmp_path / "raw" / f"wiki.{split.replace('validation', 'valid')}.raw"
        raw.parent.mkdir(exist_ok=True)
        raw.write_text("".join([f" {split} \n", *lines]))
    one, other = (prepared(tmp_path / name, tiny_llama) for name in ("hub", "raw"))
    assert one.fingerprint == other.fingerprint
    assert list(one.evaluation) == ["validation"]
    assert list(one.test) == ["test"]
    assert tokens_of(one.test["test"]) == tokens_of(other.test["test"])


def test_documents_are_read_once_and_held_out_ones_are_not_trained_on(tmp_path: Path, tiny_llama: Path) -> None:
    (tmp_path / "train.txt").write_text("the same text")
    (tmp_path / "validation.jsonl").write_text(json.dumps({"text": "the same text"}))
    with pytest.raises(UserError, match=r"train.txt has no text to learn from"):
        prepared(tmp_path, tiny_llama)
    (tmp_path / "train.txt").unlink()
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in ["one", "one", "the same text"]))
    found = prepared(tmp_path, tiny_llama)
    assert [AutoTokenizer.from_pretrained(tiny_llama).decode(ids) for ids in tokens_of(found.train)] == [
        "one<|endoftext|>"
    ]


def test_the_end_of_a_single_document_is_held_out(tmp_path: Path, tiny_llama: Path) -> None:
    words = " ".join(f"word{number}" for number in range(100))
    (tmp_path / "book.txt").write_text(words)
    found = prepared(tmp_path / "book.txt", tiny_llama, holdout=0.2)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    train, held = (
        "".join(map(tokenizer.decode, tokens_of(rows))) for rows in (found.train, found.evaluation["validation"])
    )
    assert train.removesuffix("<|endoftext|>") + held == words
    assert held.startswith(" word")
    assert len(held) == pytest.approx(0.2 * len(words), abs=8)


# --- blocks and windows -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(2, 9), st.integers(1, 9))
def test_blocks_and_windows_are_those_of_a_brute_force_version(sizes: list[int], length: int, stride: int) -> None:
    stride = min(stride, length)
    start = 0
    for size in sizes:
        document = np.arange(start, start + size, dtype=np.int32)  # tokens of two documents are never equal
        start += size
        # Training: each token is in one block, in its place; blocks of one token have nothing to predict.
        expected = [[start_of + i for i in range(length) if start_of + i < size] for start_of in range(0, size, length)]
        expected = [[int(document[i]) for i in piece] for piece in expected if len(piece) > 1]
        assert [block.tokens.tolist() for block in blocks(document, length)] == expected
        # Measuring: token by token, the first window that holds it predicts it, unless it is the window's first.
        predicted: dict[int, list[int]] = {}
        seen: set[int] = set()
        begin = 0
        while len(seen) < size:
            window = range(begin, min(begin + length, size))
            for place in window:
                if place not in seen and place > begin:
                    predicted[place] = list(range(begin, place))
            seen |= set(window)
            begin += stride
        found = {
            int(block.tokens[i]): block.tokens[:i].tolist()
            for block in windows(document, length, stride)
            for i in range(block.context, len(block.tokens))
        }
        assert found == {int(document[i]): document[context].tolist() for i, context in predicted.items()}


def test_no_block_holds_two_documents_and_each_document_ends(tmp_path: Path, tiny_llama: Path) -> None:
    file = tmp_path / "letters.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"text": letter * size}) for letter, size in zip("abcdef", range(60, 180, 20), strict=True)
        )
    )
    found = prepared(file, tiny_llama, max_length=32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    decoded = [tokenizer.decode(ids) for ids in tokens_of(found.train)]
    assert all(len(set(text.removesuffix("<|endoftext|>"))) <= 1 for text in decoded)
    assert sum(text.endswith("<|endoftext|>") for text in decoded) == 5  # all but the one that is held out
    assert "<|endoftext|>" not in "".join(tokenizer.decode(ids) for ids in tokens_of(found.evaluation["validation"]))


def test_padding_and_context_have_no_labels() -> None:
    short, long = next(blocks(np.arange(3, dtype=np.int32), 8)), list(windows(np.arange(9, dtype=np.int32), 6, 3))[1]
    batch = BlockCollator(99)([short, long])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 99, 99, 99], [3, 4, 5, 6, 7, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert batch["labels"].tolist() == [[IGNORED, 1, 2, IGNORED, IGNORED, IGNORED], [IGNORED] * 3 + [6, 7, 8]]


# --- perplexity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "stride"), [(16, None), (16, 4), (16, 16)])
def test_perplexity_is_that_of_an_independent_loop(
    length: int, stride: int | None, tmp_path: Path, tiny_llama: Path
) -> None:
    text = "It is raining cats and dogs today, and the river rises. " * 2
    (tmp_path / "test.txt").write_text(text)
    model = LlamaForCausalLM.from_pretrained(tiny_llama).eval()
    ids = AutoTokenizer.from_pretrained(tiny_llama)(text)["input_ids"]
    # One prediction at a time, in float64, each in the first window that holds it.
    losses, begin, seen = [], 0, 0
    model.double()
    while seen < len(ids):
        window = ids[begin : begin + length]
        for place in range(max(seen, begin + 1), begin + len(window)):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids[begin:place]])).logits[0, -1]
            losses.append(-float(logits.log_softmax(0)[ids[place]]))
        seen, begin = begin + len(window), begin + (stride or length)
    expected = math.exp(sum(losses) / len(losses))
    task = find("lm").prepare(
        Request(data=tmp_path, model=str(tiny_llama), max_length=length, stride=stride).for_evaluation(tiny_llama)
    )
    assert task.details["context_length"] == length
    assert task.details["stride"] == (stride or length)
    assert task.details["validation_tokens"] == len(losses)
    rows, model = task.evaluation["validation"], model.float()
    batch = task.collate([rows[number] for number in range(len(rows))])
    with torch.no_grad():
        found = row_losses((model(input_ids=batch["input_ids"]).logits,), batch["labels"])
    assert task.score("validation", found.numpy(), None)["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_a_diverged_model_has_a_number() -> None:
    assert perplexity(np.array([[math.nan, 3.0]])) == 1e100
    assert perplexity(np.array([[math.inf, 3.0]])) == 1e100
    assert perplexity(np.array([[3000.0, 3.0]])) == pytest.approx(1e100)


def test_chance_is_the_best_constant_distribution(tmp_path: Path, tiny_llama: Path) -> None:
    (tmp_path / "test.txt").write_text("x" + "aaab" * 4)
    found = find("lm").prepare(Request(data=tmp_path, model=str(tiny_llama)).for_evaluation(tiny_llama))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found.chance["validation"]["perplexity"] == pytest.approx(math.exp(entropy))


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_bad_text_files_are_one_sentence_each(tmp_path: Path, tiny_llama: Path, write_parquet: Write) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n ")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "word.txt").write_text("word")
    (tmp_path / "pdf.pdf").write_text("x")
    (tmp_path / "none").mkdir()
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    write_parquet("numbers.parquet", text=[1, 2])
    write_parquet("two.parquet", title=["a"], body=["b"])
    write_parquet("null.parquet", text=["a", None])
    for name, sentence in {
        "latin.txt": r"latin.txt is not UTF-8 text \(byte 3\); save it as UTF-8",
        "empty.txt": r"empty.txt has no text to learn from or to measure on",
        "broken.jsonl": r"broken.jsonl, line 2, is not JSON",
        "word.txt": r"the only document is a single word",
        "pdf.pdf": r"pdf.pdf is of no known kind",
        "none": r"none has no text file; expected one of .txt, .raw, .* it holds: nothing",
        "cut.parquet": r"cut.parquet is not a complete parquet file",
        "numbers.parquet": r"column 'text' of .* must hold text, but holds int64",
        "two.parquet": r"which column of .* is the text\? give --text-column; it has: title, body",
        "null.parquet": r"row 1 of .* has no text in column 'text'",
        "missing.txt": r"the data file .*missing.txt does not exist",
    }.items():
        with pytest.raises(UserError, match=sentence):
            prepared(tmp_path / name, tiny_llama)
    with pytest.raises(UserError, match=r"the task lm needs text; give a .txt, .jsonl or .parquet file"):
        prepared(None, tiny_llama)
    with pytest.raises(UserError, match=r"short.txt has no document of two tokens or more"):
        find("lm").prepare(Request(model=str(tiny_llama)).for_evaluation(tiny_llama, tmp_path / "short.txt"))


def test_lengths_and_tokenizers_that_do_not_fit(texts: Path, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_length 65 is more than the 64 tokens that the model can take"):
        prepared(texts, tiny_llama, max_length=65)
    with pytest.raises(UserError, match="stride must be at most max_length, 32"):
        prepared(texts, tiny_llama, max_length=32, stride=33)
    folder = tmp_path / "endless"
    LlamaForCausalLM.from_pretrained(tiny_llama).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"the tokenizer of .*endless' has no end token, so a document cannot be ended"):
        prepared(texts, folder)


# --- runs -------------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {"task": "lm", "steps": 6, "batch": 4, "eval_every": 2, "checkpoint_every": 2, "keep": 0.5}
TINY |= {
    "eval_rows": 6,
    "warmup": 1.0,
    "cooldown": 3.0,
    "every": 1,
    "learning_rate": 1e-2,
    "max_length": 32,
    "fast": False,
}


def resolved(texts: Path, model: Path, **flags: Any) -> ResolvedSettings:
    return resolve(flags=TINY | {"data": str(texts), "model": str(model)} | flags)


def test_the_best_model_has_the_lowest_perplexity(texts: Path, tiny_llama: Path, tmp_path: Path) -> None:
    test = tmp_path / "other.txt"
    test.write_text("the cat sat on the mat. " * 5)
    record = prune(resolved(texts, tiny_llama, test=str(test), stride=16, accumulate=2), tmp_path / "run")
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    measured = {
        line["step"]: line["eval_validation_perplexity"] for line in history if "eval_validation_perplexity" in line
    }
    last = {step: value for step, value in measured.items() if step >= 3}
    assert record["best"]["value"] == min(last.values())
    assert record["results"]["validation"]["perplexity"] == min(last.values()) < measured[2]
    assert record["lower_is_better"] == ["perplexity"]
    assert record["data"]["context_length"] == 32
    assert record["data"]["stride"] == 16
    assert set(record["results"]) == {"validation", "test"}
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"| test | perplexity (lower is better) | {record['results']['test']['perplexity']:,.2f} |" in card
    assert "AutoModelForCausalLM" in card
    _, again = evaluate_run(tmp_path / "run")
    assert again["test"]["perplexity"] == pytest.approx(record["results"]["test"]["perplexity"], rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert platon.weights(model).count == record["parameters"]["prunable"]


def test_killed_and_resumed_with_a_teacher_to_the_same_bits(
    texts: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"teacher": "dense", "distil_weight": 0.5, "hidden_weight": 0.1, "gradient_checkpointing": True}
    flags |= {"precision": "bf16"}
    straight = prune(resolved(texts, tiny_llama, **flags), tmp_path / "straight")
    assemble = lab.assemble

    def stopping(*arguments: Any, **keywords: Any) -> Training:
        training = assemble(*arguments, **keywords)

        class Stop(StopCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if state.global_step == 4:
                    training.stop.signal = 15
                    control.should_training_stop = control.should_save = True

        training.trainer.add_callback(Stop())
        return training

    with monkeypatch.context() as patch:
        patch.setattr(lab, "assemble", stopping)
        with pytest.raises(Interrupted):
            prune(resolved(texts, tiny_llama, **flags), tmp_path / "killed")
    again = prune(resolved(texts, tiny_llama, **flags), tmp_path / "killed", resume=True)
    assert again["results"] == straight["results"]
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "killed"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("method", ["wanda", "magnitude", "dense"])
def test_no_steps_prune_at_once(method: str, texts: Path, tiny_llama: Path, tmp_path: Path) -> None:
    flags = {"steps": 0, "method": method, "scope": "2:4" if method == "wanda" else "row"}
    record = prune(resolved(texts, tiny_llama, **flags), tmp_path / "run")
    before = LlamaForCausalLM.from_pretrained(tiny_llama)
    after = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "model")
    left = {name: matrix != 0 for name, matrix in platon.weights(after).matrices.items()}
    for name, kept in left.items():
        assert torch.equal(after.get_parameter(name), before.get_parameter(name) * kept)
        if method == "wanda":
            assert (kept.view(-1, 4).sum(1) == 2).all()
        else:
            assert (kept.sum(1) == kept.shape[1] * record["kept"]).all()
    assert record["kept"] == (1.0 if method == "dense" else 0.5)
    assert record["plan"]["total"] == 0
    assert read_record(tmp_path / "run")["results"]["validation"]["perplexity"] > 1


def test_methods_and_shares_that_do_not_go_together(texts: Path, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"platon learns from gradients, so it cannot prune in 0 steps; choose one of"):
        prune(resolved(texts, tiny_llama, steps=0, method="platon"), tmp_path / "run")
    with pytest.raises(UserError, match=r"scope 2:4 keeps 0.5 of the weights, but keep is 0.1; write keep 0.5"):
        prune(resolved(texts, tiny_llama, method="magnitude", scope="2:4", keep=0.1), tmp_path / "run")
    with pytest.raises(UserError, match=r"Wanda with scope 'row' ranks single weights; prune weights, not groups"):
        prune(resolved(texts, tiny_llama, method="wanda", units="neurons"), tmp_path / "run")
    with pytest.raises(UserError, match=r"scope must be 'global', 'matrix', 'row', or a pattern such as '2:4'"):
        resolved(texts, tiny_llama, scope="rows")
    assert not (tmp_path / "run").exists()
