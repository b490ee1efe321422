"""Every snippet of the how-tos runs, in order, as a reader would run it: a folder and a namespace of its own a page.

A `python` block is executed, the lines of a `sh` block are run, a `toml NAME` or `python NAME` block is written to the
file NAME. What a page takes for granted (the reader's data and model) is put in place under the names that the page
uses.
"""

import json
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
import typer
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)
from transformers.utils import logging

import platon
from forked import Forked, rank_variables
from platon import cli
from platon.deploy import memory
from platon.engine.methods import METHODS
from platon.lab import tasks
from platon.lab.sweep import workers

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
TEXTS = ("architecture", "choose", "concepts", "examples", "log", "methods", "paper", "promises")  # nothing to run
HOW_TOS = [page for page in DOCS if page.stem not in TEXTS]


# --- what the reader is taken to have ---------------------------------------------------------------------------------


def make_bert(folder: Path) -> None:
    """A tokenizer that can spell any ASCII text, and a BERT of two narrow layers."""
    folder.mkdir(parents=True)
    signs = [c for c in string.printable if c.strip() and not c.isupper()]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs, *(f"##{c}" for c in signs)]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    torch.manual_seed(0)
    tokenizer.save_pretrained(folder)
    BertForSequenceClassification(config).save_pretrained(folder)


def make_vit(folder: Path) -> None:
    """A ViT of two narrow layers for images of 16 px, and its image processor."""
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    ViTForImageClassification(config).save_pretrained(folder)


def reviews(count: int = 64) -> pa.Table:
    """Texts with a word for a label."""
    good = [number % 2 == 0 for number in range(count)]
    texts = [f"film {number}, {'good' if is_good else 'bad'} from start to end" for number, is_good in enumerate(good)]
    return pa.table({"review": texts, "sentiment": ["positive" if is_good else "negative" for is_good in good]})


def make_photos(folder: Path) -> None:
    """A folder a class, twice."""
    random = np.random.default_rng(0)
    for split, count in {"train": 12, "validation": 6}.items():
        for shade, name in ((60, "cat"), (190, "dog")):
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(shade - 60, shade + 60, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")


def make_rte(folder: Path) -> None:
    """RTE as the hub lays it out."""
    folder.mkdir(parents=True)
    for split, count in {"train": 16, "validation": 8}.items():
        rows = {
            "sentence1": [f"sentence {number} says this" for number in range(count)],
            "sentence2": [f"it says {'this' if number % 2 else 'that'}" for number in range(count)],
            "label": [(number + 1) % 2 for number in range(count)],
            "idx": list(range(count)),
        }
        pyarrow.parquet.write_table(pa.table(rows), folder / f"{split}.parquet")


def starred(count: int = 64) -> pa.Table:
    """Texts with a number of stars, as a spreadsheet writes it."""
    table = reviews(count)
    stars = [5.0 if word == "positive" else 1.0 for word in table.column("sentiment").to_pylist()]
    return pa.table({"review": table.column("review"), "stars": stars})


def own_model(place: Path) -> None:
    """Texts with classes, with several labels, and with a tag for each word; images; and a model for each."""
    pyarrow.csv.write_csv(starred(), place / "reviews.csv")
    pyarrow.csv.write_csv(starred(10), place / "exam.csv")
    pyarrow.csv.write_csv(starred(10).select(["review"]), place / "new-reviews.csv")
    topics = [[topic for topic, every in (("sport", 2), ("work", 3)) if number % every == 0] for number in range(32)]
    posts = [{"text": f"post {number}", "topics": found} for number, found in enumerate(topics)]
    (place / "posts.jsonl").write_text("".join(json.dumps(post) + "\n" for post in posts))
    names = ("Anna B-PER", "Oslo B-LOC")
    sentences = [f"Here O\nis O\n{names[number % 2]}\n" for number in range(32)]
    (place / "entities.conll").write_text("\n".join(sentences))
    (place / "notes.txt").write_text("Anna lives in Oslo\n")
    make_photos(place / "photos")
    make_bert(place / "my-model")
    make_vit(place / "my-vit")


def own_trainer(place: Path) -> None:
    """Texts and a model."""
    pyarrow.csv.write_csv(reviews(), place / "reviews.csv")
    make_bert(place / "my-model")


def own_encoder(place: Path) -> None:
    """Texts, scored pairs and an encoder."""
    make_bert(place / "my-encoder")
    texts = reviews().column("review").to_pylist()
    (place / "texts.txt").write_text("\n".join(texts) + "\n")
    pairs = {"one": texts[:16], "other": texts[16:32], "score": [number % 6 for number in range(16)]}
    pyarrow.csv.write_csv(pa.table(pairs), place / "pairs.csv")


def paper_row(place: Path) -> None:
    """The hub's files and the hub's model, fetched before."""
    make_rte(place / "data" / "glue" / "rte")
    make_bert(place / "models" / "bert-base-uncased")


def stored_model(place: Path) -> None:
    """A model that was saved as bits and values."""
    make_bert(place / "my-model")
    model = BertForSequenceClassification.from_pretrained(place / "my-model")
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight.view(-1)[::3] = 0.0
    platon.save(model, place / "sparse-model", sparse=True)


def start(place: Path) -> None:
    """Texts, some of them without labels, and a model."""
    table = reviews().rename_columns(["text", "label"])
    pyarrow.csv.write_csv(table, place / "reviews.csv")
    pyarrow.csv.write_csv(table.select(["text"]), place / "new.csv")
    make_bert(place / "my-model")


def loop() -> dict[str, object]:
    """What a training loop has: a model, its optimizer and some batches."""
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertForSequenceClassification(config)
    batches = [{"input_ids": torch.randint(50, (4, 8)), "labels": torch.tensor([0, 1, 0, 1])}] * 20
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "data": batches, "steps": 20}


GIVEN: dict[str, Callable[[], dict[str, object]]] = {"index": loop}


def language_model(place: Path) -> None:
    """Documents, a part of WikiText and a decoder of bytes."""
    texts = [f"Document {number}: the cat sat on {number} mats." for number in range(60)]
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (place / "wiki.test.raw").write_text(" = Cats = \n The cat sat on the mat . \n" * 5)
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(signs)}, merges=[]))
    bytes_only.pre_tokenizer, bytes_only.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=256,
    )
    torch.manual_seed(0)
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=end, pad_token=end).save_pretrained(
        place / "my-model"
    )
    LlamaForCausalLM(config).save_pretrained(place / "my-model")


IN_PLACE: dict[str, Callable[[Path], None]] = {
    "index": start,
    "small-and-fast": lambda place: None,
    "storage": stored_model,
    "prune-your-own-model": own_model,
    "prune-in-your-own-trainer": own_trainer,
    "prune-in-a-plain-loop": lambda place: None,
    "prune-in-lightning": lambda place: None,
    "distil": own_trainer,
    "embeddings": own_encoder,
    "language-models": language_model,
    "architectures": own_trainer,
    "add-a-method": lambda place: None,
    "add-a-task": lambda place: None,
    "add-a-unit-kind": lambda place: None,
    "run-a-sweep": lambda place: None,
    "several-processes": lambda place: None,
    "reproduce-a-row-of-the-paper": paper_row,
    "sparse": lambda place: None,
    "report": lambda place: None,
}


# --- the snippets -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the word after it, its lines, and the page's line before the first of them."""

    language: str
    name: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*) ?(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(found[1], found[2], found[3], text[: found.start(3)].count("\n"))


def commands(block: Block) -> list[str]:
    """The lines of a shell block, those that end in a backslash joined, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


#: what starts several processes; for `platon`, tests/distributed/test_job.py does so, and here one is enough
LAUNCHER = re.compile(r"^torchrun --nproc-per-node (\d+) (?:-m (?=platon ))?")


def run(command: str, place: Path) -> None:
    """In this process if it is ours."""
    launcher = LAUNCHER.match(command)
    words = shlex.split(LAUNCHER.sub("", command), comments=True)
    if words[0] == "platon":
        assert not cli.app(words[1:], standalone_mode=False), command
    elif launcher is not None:
        ranks = [Forked(["python", *words], environment=own) for own in rank_variables(int(launcher[1]))]
        assert all(rank.wait() == 0 for rank in ranks), command
    elif words[0] == "python":
        assert Forked(words).wait() == 0, command
    else:
        # With the programs that belong to this Python, whether or not its environment is active.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(["bash", "-c", command], cwd=place, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture
def own_methods() -> Iterator[None]:
    """Methods that a page registers are gone after it."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.usefixtures("own_methods")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # Trainer's default, where there is no GPU
@pytest.mark.filterwarnings("ignore:no compiled sparse kernel")  # where there is no compiler
@pytest.mark.filterwarnings("ignore:::lightning.*")  # advice about workers and loggers
@pytest.mark.parametrize("page", HOW_TOS, ids=lambda page: page.stem)
def test_every_snippet_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    monkeypatch.syspath_prepend(tmp_path)  # as for a reader's Python, where the page's files can be imported
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    # In place of new processes, which take seconds each.
    monkeypatch.setattr(workers, "start", Forked)
    monkeypatch.setattr(memory, "measure", lambda models, *words: [{"added_bytes": 1, "peak_bytes": 1}] * len(models))
    logging.disable_progress_bar()
    IN_PLACE[page.stem](tmp_path)
    namespace = {"__name__": "__main__", **GIVEN.get(page.stem, dict)()}
    ran = 0
    for block in blocks(page):
        match block.language:
            case "python" if block.name:
                (tmp_path / block.name).write_text(block.text)
            case "python":
                # The empty lines make a traceback point into the page.
                exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
            case "sh":
                for command in commands(block):
                    run(command, tmp_path)
            case "toml":
                (tmp_path / block.name).write_text(block.text)
            case "text":
                continue
            case _:
                raise AssertionError(f"{page.name}, line {block.line}: a block of {block.language!r} is run by nothing")
        ran += 1
    assert ran


def test_a_failing_snippet_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nx = 1\n```\n\n```sh\n# a comment\nplaton list tasks\nls \\\n  nowhere\n```\n")
    python, shell = blocks(page)
    assert (python.text, python.line) == ("x = 1\n", 3)
    assert commands(shell)[0] == "platon list tasks"
    assert shlex.split(commands(shell)[1]) == ["ls", "nowhere"]
    with pytest.raises(AssertionError, match="No such file"):
        run(commands(shell)[1], tmp_path)
    with pytest.raises(Exception, match="No such command"):
        run("platon prumr", tmp_path)


# --- what is said outside the snippets --------------------------------------------------------------------------------


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def options() -> set[str]:
    """Every option of every command."""
    top = typer.main.get_command(cli.app)
    levels = [top, *top.commands.values()]
    parameters = [parameter for level in levels for parameter in level.params]
    return {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("page", [page for page in DOCS if page.stem != "paper"], ids=lambda page: page.stem)
def test_named_options_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", page.read_text(encoding="utf-8")))
    launchers = {"--nproc-per-node", "--multi_gpu", "--num_processes"}  # torchrun's and accelerate's
    launchers |= {"--model_args", "--tasks", "--device"}  # lm-evaluation-harness's
    assert named <= options() | {"--help"} | launchers


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in DOCS if page.name != "index.md" and f"({page.name})" not in index] == []


@pytest.mark.parametrize("page", [page for page in DOCS if page.stem != "paper"], ids=lambda page: page.stem)
def test_named_functions_are_public(page: Path) -> None:
    named = set(re.findall(r"\bplaton\.(\w+)\(", page.read_text(encoding="utf-8")))
    assert named <= set(platon.__all__)
