"""The command line, in processes of their own: what it says, how it ends, and that a kill at any moment costs nothing.

Most processes are forked from a server that has imported everything once (forked.py).
"""

import contextlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

import forked
from forked import PATIENCE, Command
from platon.lab import checkpoint
from platon.lab.record import read_history, read_record

Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command in the test's folder; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*words: Any, limit: int | None = None) -> Command:
            command = forked.start(tmp_path, words, limit)
            stack.callback(command.process.kill)
            return command

        yield start


@pytest.fixture
def run(start: Start) -> Start:
    """Run a command to its end."""

    def run(*words: Any, **options: Any) -> Command:
        command = start(*words, **options)
        command.wait()
        return command

    return run


@dataclass
class Reference:
    """A run that nobody disturbed, and the command that gives it."""

    folder: Path
    words: list[Any]

    def matches(self, folder: Path) -> None:
        for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
            mine = (folder / "model" / name).read_bytes()
            assert mine == (self.folder / "model" / name).read_bytes(), name
        mine_record, record = read_record(folder), read_record(self.folder)
        for key in record.keys() - {"seconds"}:
            assert mine_record[key] == record[key]
        # The mean loss of the line after a resumption is that of the steps since then.
        mine_lines, lines = ([{**line, "loss": 0} for line in read_history(f)] for f in (folder, self.folder))
        assert mine_lines == lines
        assert not list(folder.glob("best-*"))


@pytest.fixture(scope="module")
def reference(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """BERT with dropout on SST-2 with texts of many lengths, in batches of like length."""
    place = tmp_path_factory.mktemp("reference")
    for split, count in {"train": 56, "validation": 16}.items():
        texts = [f"film {n} is " + ("good " if n % 2 else "bad ") * (1 + n % 9) for n in range(count)]
        (place / "glue" / "sst2").mkdir(parents=True, exist_ok=True)
        table = pa.table({"sentence": texts, "label": [n % 2 for n in range(count)]})
        pq.write_table(table, place / "glue" / "sst2" / f"{split}.parquet")
    words = ["prune", "--task", "sst2", "--data", place, "--model", tiny_bert, "--keep", 0.2, "--batch", 8]
    words += ["--steps", 30, "--warmup", 3, "--cooldown", 12, "--every", 2, "--learning-rate", 0.01]
    words += ["--eval-every", 5, "--log-every", 1, "--checkpoint-every", 3, "--keep-checkpoints", "--no-fast"]
    command = forked.start(place, (*words, "--output", place / "run"))
    assert command.wait() == 0, command.err
    return Reference(place / "run", words)


# --- stop and resume --------------------------------------------------------------------------------------------------


def test_undisturbed_run_says_what_it_did(reference: Reference) -> None:
    said = (reference.folder.parent / "0.out").read_text()
    assert "prunable weights kept" in said
    assert str(reference.folder / "record.json") in said
    assert f"platon predict {reference.folder}" in said
    assert (reference.folder.parent / "0.err").read_text() == ""
    assert {path.name for path in (reference.folder / "figures").iterdir()} == {"training.png", "layers.png"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_says_how_to_go_on_and_exits_by_convention(
    number: int, code: int, reference: Reference, start: Start, run: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = start(*reference.words, "--output", folder)
    command.kill_when(lambda: (folder / "checkpoints" / "checkpoint-3" / checkpoint.MARKER).exists(), number)
    assert command.wait() == code
    assert command.err == (
        f"stopped by {signal.Signals(number).name}; a checkpoint is saved. "
        f"Go on with: platon prune --output {folder} --resume\n"
    )
    last, problems = checkpoint.last_complete(folder / "checkpoints")
    assert last is not None
    assert not problems
    words = command.err.partition("Go on with: platon ")[2].split()
    again = run(*words)
    assert again.process.exitcode == 0, again.err
    assert f"resuming at step {last.name.removeprefix('checkpoint-')} of 30" in again.out
    reference.matches(folder)


def marker(step: int) -> Callable[[Path], bool]:
    return lambda folder: (folder / "checkpoints" / f"checkpoint-{step}" / checkpoint.MARKER).exists()


def appears(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: any(folder.glob(pattern))


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "claimed": appears(".lock"),
    "settings": appears("run.json"),
    "first checkpoint begun": appears("checkpoints/checkpoint-3"),
    "first checkpoint's optimizer": appears("checkpoints/checkpoint-3/optimizer.pt"),
    "first checkpoint's marker": marker(3),
    "checkpoint begun": appears("checkpoints/checkpoint-9"),
    "checkpoint's last own file": appears("checkpoints/checkpoint-9/trainer_state.json"),
    "pruner's tensors": appears("checkpoints/checkpoint-9/pruner.safetensors"),
    "pruner's numbers": appears("checkpoints/checkpoint-9/pruner.json"),
    "marker": marker(9),
    "rotation": lambda folder: marker(9)(folder) and not marker(3)(folder),
    "best model begun": appears(".best-20"),
    "best model": appears("best-20"),
    "last checkpoint": marker(30),
    "model begun": appears(".model"),
    "model": appears("model"),
    "card": appears("model/README.md"),
    "record": appears("record.json"),
    "figures": appears("figures"),
}
QUICK = ("settings", "first checkpoint begun", "checkpoint's last own file", "marker", "best model", "last checkpoint")


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MOMENTS]
)
def test_killed_at_any_moment_it_resumes_to_the_same_bits(
    moment: str, reference: Reference, start: Start, run: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = start(*reference.words, "--output", folder)
    command.kill_when(lambda: MOMENTS[moment](folder))
    assert command.wait() in (-signal.SIGKILL, 0)  # a moment near the end may have passed
    # Before there are settings to read, there is nothing to resume.
    resume = ["--resume"] if (folder / "run.json").exists() else []
    again = run(*reference.words, "--output", folder, *resume)
    assert again.process.exitcode == 0, again.err
    reference.matches(folder)


@pytest.mark.slow
def test_killed_again_and_again(reference: Reference, start: Start, run: Start, tmp_path: Path) -> None:
    """Each process gets two checkpoints further, and dies."""
    folder = tmp_path / "run"
    for step in (6, 12, 18):
        command = start(*reference.words, "--output", folder, *(["--resume"] if folder.exists() else []))
        command.kill_when(lambda step=step: marker(step)(folder))  # type: ignore[misc]
        assert command.wait() == -signal.SIGKILL
    assert run("prune", "--output", folder, "--resume").process.exitcode == 0
    reference.matches(folder)


def test_digits_by_their_real_name(run: Start, tmp_path: Path) -> None:
    """`python -m platon`, dense first: stopped while the twin trains, resumed by what it said."""
    words = [sys.executable, "-m", "platon", "prune", "--train-rows", "128", "--eval-rows", "40", "--steps", "24"]
    words += ["--checkpoint-every", "2", "--no-fast", "--output", str(tmp_path / "run")]
    first = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + PATIENCE
    while not marker(2)(tmp_path / "run" / "dense") and first.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=PATIENCE)
    assert first.returncode == 143
    assert said.rstrip().endswith(f"platon prune --output {tmp_path / 'run'} --resume")
    done = run("prune", "--output", tmp_path / "run", "--resume")
    assert (done.process.exitcode, done.err) == (0, "")
    assert re.search(r"resuming at step \d+ of 24", done.out)
    assert re.search(r"accuracy .*%.*%", done.out)
    assert read_record(tmp_path / "run")["dense"] == {
        name: read_record(tmp_path / "run" / "dense")[name] for name in ("results", "parameters", "bytes", "seconds")
    }


def test_two_processes_do_not_share_a_folder(reference: Reference, start: Start, run: Start, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*reference.words, "--output", folder, "--steps", 5000]
    first = start(*words)
    first.kill_when(lambda: marker(500)(folder) or marker(3)(folder), 0)  # it is at work
    second = run(*words, "--resume")
    assert_error(second, f"another process works on '{folder}'; wait for it or choose another --output")
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.wait() == 143


def test_finished_run_is_not_trained_again(reference: Reference, run: Start) -> None:
    before = (reference.folder / "record.json").stat().st_mtime_ns
    done = run("prune", "--output", reference.folder, "--resume")
    assert done.process.exitcode == 0
    assert f"{reference.folder} is finished" in done.out
    assert (reference.folder / "record.json").stat().st_mtime_ns == before


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_no_room_for_a_file(name: str, reference: Reference, run: Start, tmp_path: Path) -> None:
    """Safetensors and torch have errors of their own for it."""
    [*_, last] = checkpoint.steps(reference.folder / "checkpoints").values()
    assert (last / "model.safetensors").stat().st_size < (last / "optimizer.pt").stat().st_size
    folder = tmp_path / "run"
    done = run(*reference.words, "--output", folder, limit=(last / name).stat().st_size - 1)
    assert_error(done, f"cannot write to '{folder}': ", "make room, then go on with --resume")
    assert not (folder / "record.json").exists()
    assert run("prune", "--output", folder, "--resume").process.exitcode == 0
    reference.matches(folder)


def test_no_room_at_all(run: Start, tmp_path: Path) -> None:
    assert_error(run("prune", "--output", "run", limit=1000), "cannot write to 'run': File too large")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_full_disk_loses_nothing_that_was_complete(reference: Reference, run: Start, small_disk: Path) -> None:
    folder = small_disk / "run"
    done = run(*reference.words, "--output", folder)
    assert_error(done, f"cannot write to '{folder}': ", "make room, then go on with --resume")
    last, _ = checkpoint.last_complete(folder / "checkpoints")
    assert last is not None
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    again = run("prune", "--output", folder, "--resume")
    assert again.process.exitcode == 0, again.err
    assert f"resuming at step {last.name.removeprefix('checkpoint-')} of 30" in again.out
    reference.matches(folder)


# --- what it says -----------------------------------------------------------------------------------------------------


def assert_error(command: Command, *parts: str) -> None:
    """One sentence on stderr, exit code 2, no traceback."""
    assert command.process.exitcode == 2, command.err
    assert command.err.startswith("error: ")
    assert command.err.count("\n") == 1
    for part in parts:
        assert part in command.err
    assert "Traceback" not in command.out + command.err


CSV = "text,label\ngood film,1\nbad film,0\ngood cat,1\nbad cat,0\n"
WRONG: dict[str, tuple[str, list[str]]] = {
    "task": ("prune --task sst-2", ["no task is called 'sst-2'; nearest: 'sst2'"]),
    "method": ("prune --method magnitud", ["no method is called 'magnitud'; nearest: 'magnitude'"]),
    "keep": ("prune --keep 80", ["keep must be in (0, 1], got 80", "write 0.8 for 80 %"]),
    "recipe": ("prune --recipe paper/bert-base/rte-11", ["no recipe 'paper/bert-base/rte-11'; nearest: "]),
    "share and penalty": ("prune --method l0 --keep 0.1 --penalty 3", ["keep and penalty are both given"]),
    "config": ("prune --config bad.toml", ["'bad.toml' has a setting 'kep' that is not known; nearest: 'keep'"]),
    "no config": ("prune --config none.toml", ["no config file 'none.toml'"]),
    "data": ("prune --task sst2 --data nowhere", ["data folder nowhere does not exist"]),
    "columns": (
        "prune --task text --data mine.csv --label-column stars --model MODEL",
        ["'stars'", "text, label"],
    ),
    "label": ("prune --task sst2 --data wrong --model MODEL", ["sentence", "text"]),
    "model": (
        "prune --task text --data mine.csv --model ./berd",
        ["the model folder './berd' does not exist; nearest"],
    ),
    "steps": ("prune --steps 10 --warmup 9 --cooldown 9", ["warmup + cooldown must not exceed the 10 steps"]),
    "output": ("prune --output RUN", ["'RUN' holds a run already; continue it with --resume"]),
    "resume": ("prune --output RUN --resume --config keep.toml", ["'RUN' holds another run: its "]),
    "other files": ("prune --output .", ["'.' is not empty and holds no run; choose another --output"]),
    "nothing to resume": ("prune --output none --resume", ["'none' holds no run; start one without --resume"]),
    "eval": ("eval nowhere", ["'nowhere' is no local folder, and the hub cannot be reached; give the path"]),
    "inspect": ("inspect .", ["'.' is neither a finished run nor a model: there is no record.json and no"]),
    "damaged": ("inspect broken", ["record.json' is damaged: "]),
    "list": ("list recipes paper/bert-base/rte-11", ["no recipe 'paper/bert-base/rte-11'; nearest: "]),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_sentence_and_exit_code_2(
    case: str, run: Start, reference: Reference, tiny_bert: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text("kep = 0.1\n")
    (tmp_path / "keep.toml").write_text("keep = 0.3\n")
    (tmp_path / "mine.csv").write_text(CSV)
    (tmp_path / "bert").symlink_to(tiny_bert)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text('{"format": 1, ')
    (tmp_path / "wrong" / "sst2").mkdir(parents=True)
    for split in ("train", "validation"):
        pq.write_table(pa.table({"text": ["a"], "label": [0]}), tmp_path / "wrong" / "sst2" / f"{split}.parquet")
    before = set(tmp_path.rglob("*"))
    line, sentences = WRONG[case]
    names = {"RUN": str(reference.folder), "MODEL": "bert"}
    command = run(*(names.get(word, word) for word in line.split()))
    assert_error(command, *(sentence.replace("RUN", names["RUN"]) for sentence in sentences))
    made = {path for path in set(tmp_path.rglob("*")) - before if path.suffix not in (".out", ".err")}
    assert made <= {tmp_path / "runs"}  # no half-made run is in the way of the corrected command


def test_debug_shows_the_traceback(run: Start) -> None:
    for words in (["--debug", "prune", "--task", "sst-2"], ["prune", "--task", "sst-2", "--debug"]):
        command = run(*words)
        assert command.process.exitcode == 1
        assert "Traceback (most recent call last)" in command.err
        assert "UserError: no task is called 'sst-2'" in command.err


def test_help_is_instant_and_whole() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "platon", "--help"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1  # what a free machine takes
    for name in ("prune", "eval", "inspect", "list"):
        assert name in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["prune", "--help"], ["list", "tasks"], ["list", "recipes"]])
def test_help_and_lists_import_nothing_heavy(words: list[str]) -> None:
    code = "import sys, atexit\n"
    code += (
        "atexit.register(lambda: print({'torch', 'transformers', 'datasets', 'numpy', 'matplotlib'} & {*sys.modules}))"
    )
    code += f"\nsys.argv = ['platon', *{words}]\nfrom platon.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("set()")


def test_help_shows_every_setting(run: Start) -> None:
    from platon.lab.settings import FIELDS

    command = run("prune", "--help")
    assert command.process.exitcode == 0
    shown = re.sub(r"\s+", " ", command.out)
    for name, field in FIELDS.items():  # of a yes/no setting, the flag that changes something
        assert f"--{'no-' if field.default is True else ''}{name.replace('_', '-')}" in shown


def test_every_yes_or_no_setting_has_two_flags() -> None:
    """And a recipe's yes can be overridden by no, on the way through a command line too."""
    import typer

    from platon.cli import app
    from platon.lab.settings import FIELDS, type_of

    command = typer.main.get_command(app).commands["prune"]  # type: ignore[attr-defined]
    flags = {name for name in FIELDS if type_of(name) is bool}
    assert {"freeze_embeddings", "augment", "group_by_length", "trust_remote_code"} <= flags
    for parameter in command.params:
        if parameter.name in flags:
            word = parameter.name.replace("_", "-")
            assert (parameter.opts, parameter.secondary_opts) == ([f"--{word}"], [f"--no-{word}"])


def test_flags_reach_the_settings(run: Start, tmp_path: Path) -> None:
    """A flag of each kind, and the file under it; nothing is trained."""
    (tmp_path / "run.toml").write_text('task = "text"\nkeep = 0.3\ngroup_by_length = true\nbatch = 4\n')
    flags = ["--no-group-by-length", "--augment", "--batch", 2, "--learning-rate", "1e-3", "--data", "nowhere.csv"]
    command = run("prune", "--config", "run.toml", *flags, "--output", "out")
    assert_error(command, "nowhere.csv does not exist")
    (tmp_path / "out").mkdir()
    settings = {"batch": 2, "keep": 0.3, "group_by_length": False, "augment": True, "learning_rate": 1e-3}
    from platon.lab.settings import resolve

    given: dict[str, Any] = {**settings, "task": "text", "data": "nowhere.csv"}
    plain = resolve(flags=given).plain()
    (tmp_path / "out" / "run.json").write_text(json.dumps({"format": 1, "recipe": None, "settings": plain}))
    # With --resume a run's settings are compared, so this passes only if each of them arrived.
    assert_error(
        run("prune", "--config", "run.toml", *flags, "--output", "out", "--resume"), "nowhere.csv does not exist"
    )
    command = run("prune", "--config", "run.toml", *flags, "--output", "out", "--resume", "--seed", 5)
    assert_error(command, "'out' holds another run: its seed is 0, not 5")


def test_lists(run: Start) -> None:
    tasks = run("list", "tasks")
    assert tasks.process.exitcode == 0
    assert re.search(r"^mnli +accuracy +GLUE MNLI", tasks.out, re.M)
    assert re.search(r"^squad +f1, exact_match ", tasks.out, re.M)
    methods = run("list", "methods")
    assert re.search(r"^platon .*\n?.*Zhang et al", methods.out, re.M)
    assert {"magnitude", "dense"} <= {line.split(" ")[0] for line in methods.out.splitlines()}
    recipes = run("list", "recipes")
    assert re.search(r"^paper/bert-base/rte-10 +google-bert/bert-base-uncased +rte +platon +0.1", recipes.out, re.M)
    one = run("list", "recipes", "paper/bert-base/rte-10")
    assert re.search(r"^cooldown +1200 +paper", one.out, re.M)
    assert re.search(r"^clip +1.0 +code", one.out, re.M)
    assert re.search(r"^reference_steps +3120 +ours", one.out, re.M)


def test_eval_gives_the_record_again(reference: Reference, run: Start) -> None:
    command = run("eval", reference.folder)
    assert command.process.exitcode == 0, command.err
    value = f"{100 * read_record(reference.folder)['results']['validation']['accuracy']:.2f} %"
    assert re.search(rf"validation .*accuracy .*{value}.*{value}", command.out)
    assert command.err == ""


def test_inspect_weights_matrices_by_their_size(reference: Reference, run: Start) -> None:
    record = read_record(reference.folder)
    shares = record["layers"]
    with safe_open(reference.folder / "model" / "model.safetensors", framework="numpy") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in shares}
    assert len(set(sizes.values())) > 1
    mean = sum(shares[name] * size for name, size in sizes.items()) / sum(sizes.values())
    assert mean == pytest.approx(record["kept"], abs=1e-6)  # the model has one layer
    plain = sum(shares.values()) / len(shares)
    assert f"{100 * mean:.1f}" != f"{100 * plain:.1f}"
    [row] = [line for line in run("inspect", reference.folder).out.splitlines() if line.strip("│ ").startswith("0 ")]
    assert re.search(rf"· {100 * mean:.1f}\b", row)


def test_eval_of_other_data_counts_every_row(run: Start, tiny_bert: Path, tmp_path: Path) -> None:
    """With the model's own classes, and the number of rows; `export` takes the tokenizer along."""
    (tmp_path / "mine.csv").write_text(CSV + "good dog,1\nbad dog,0\n" * 8)
    words = ["--task", "text", "--data", "mine.csv", "--model", tiny_bert, "--steps", 2, "--batch", 4]
    done = run("prune", *words, "--warmup", 0, "--cooldown", 1, "--output", "run")
    assert done.process.exitcode == 0, done.err
    (tmp_path / "new.csv").write_text("text,label\n" + "good film,1\n" * 7)
    new = run("eval", "run", "--data", "new.csv")
    assert new.process.exitcode == 0, new.err
    assert re.search(r"validation[ │]+7[ │]+accuracy[ │]+(0|100)\.00 %", new.out)
    (tmp_path / "new.csv").write_text("text,label\ngood film,1\nodd film,2\n")
    wrong = run("eval", "run", "--data", "new.csv")
    assert_error(wrong, "row 1 of new.csv has the label 2, which the model does not know: '0', '1'")
    assert run("export", "run", "--format", "sparse").process.exitcode == 0
    tokenizer = (tmp_path / "run" / "model" / "tokenizer.json").read_bytes()
    assert (tmp_path / "run" / "sparse" / "tokenizer.json").read_bytes() == tokenizer


def test_resume_names_the_flag_that_was_changed(reference: Reference, run: Start) -> None:
    """And not a setting that the command does not mention."""
    changed = run("prune", "--output", reference.folder, "--resume", "--seed", 5)
    assert_error(changed, f"'{reference.folder}' holds another run: its seed is 0, not 5")
    same = run("prune", "--output", reference.folder, "--resume", "--keep", 0.2)
    assert same.process.exitcode == 0, same.err


def test_inspect_shows_each_layer_as_a_table_and_a_bar(reference: Reference, run: Start) -> None:
    command = run("inspect", reference.folder)
    assert command.process.exitcode == 0, command.err
    record = read_record(reference.folder)
    assert f"{100 * record['kept']:.2f} % of {record['parameters']['prunable']:,} weights kept" in command.out
    assert "attention.query" in command.out
    [row] = [line for line in command.out.splitlines() if line.strip("│ ").startswith("0 ")]
    for share in record["layers"].values():
        assert f"{100 * share:.1f}" in row
    assert "█" in row


def test_version(run: Start) -> None:
    assert run("--version").out == "platon 0.1.0\n"
