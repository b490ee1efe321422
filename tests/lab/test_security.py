"""What is read is data, never code: no pickle, no path out of a folder, no Python that comes with a model."""

import ast
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import platon
from platon import cli
from platon.lab import checkpoint
from platon.lab.claim import read_started
from platon.lab.errors import UserError
from platon.lab.file import append_line, write_text
from platon.lab.run import prune
from platon.lab.settings import ResolvedSettings, resolve
from platon.lab.stop import StopCallback

SOURCE = Path(platon.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
Png = Callable[..., bytes]


def tiny(**flags: Any) -> ResolvedSettings:
    small = {"train_rows": 128, "eval_rows": 40, "batch": 16, "steps": 6, "eval_every": 2, "checkpoint_every": 2}
    return resolve(flags={**small, "every": 1, "warmup": 1.0, "cooldown": 2.0, "dense": "none", **flags})


# --- nothing is unpickled ---------------------------------------------------------------------------------------------


def faults(tree: ast.AST) -> list[str]:
    """What a file does that may run what it reads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.partition(".")[0] in LOADERS]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            loads = name in ("torch.load", "np.load", "numpy.load", "eval", "exec")
            if loads and given.get("weights_only") != "True":
                found.append(name)
            if given.get("weights_only") == "False" or given.get("allow_pickle") == "True":
                found.append(name)
    return found


def test_the_walk_finds_what_it_looks_for() -> None:
    bad = (
        "import pickle",
        "from pickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "read(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "eval(text)",
    )
    assert all(faults(ast.parse(line)) for line in bad)
    assert not faults(ast.parse("torch.load(f, weights_only=True); import picked; model.eval()"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_file_unpickles(file: Path) -> None:
    assert faults(ast.parse(file.read_text(encoding="utf-8"))) == []


class Killed(BaseException):
    """As sudden as a kill."""


@pytest.mark.parametrize("method", ["platon", "l0"])
def test_whole_run_and_its_resumption_unpickle_nothing(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[bool] = []
    real = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        assert kwargs.get("weights_only") is True, "torch.load without weights_only"
        loads.append(True)
        return real(*args, **kwargs)

    def trap(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        raise AssertionError(f"{caller.f_code.co_filename}:{caller.f_lineno} unpickles")

    monkeypatch.setattr(torch, "load", load)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, trap)
    step_end = StopCallback.on_step_end

    def die(self: StopCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise Killed
        step_end(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(StopCallback, "on_step_end", die)
        with pytest.raises(Killed):
            prune(tiny(method=method), tmp_path / "run")
    assert not loads
    prune(read_started(tmp_path / "run"), tmp_path / "run", resume=True)
    assert len(loads) >= 3  # the optimizer's state, the scheduler's and the random one, by transformers


# --- no way out of the folder -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "..", ""])
def test_marker_that_names_files_elsewhere_is_damaged(name: str, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / "checkpoint-4"
    place.mkdir(parents=True)
    (tmp_path / "checkpoints" / "outside").write_text("secret")
    (place / "model.safetensors").write_bytes(b"weights")
    checkpoint.write_state(place, 4, None, {})
    marker = json.loads((place / checkpoint.MARKER).read_text())
    digest = checkpoint.file_sha256(tmp_path / "checkpoints" / "outside")
    (place / checkpoint.MARKER).write_text(json.dumps({**marker, "files": {**marker["files"], name: digest}}))
    assert checkpoint.problem(place) == "checkpoint-4 is damaged: its marker cannot be read"


def test_best_model_of_a_hostile_checkpoint_stays_in_the_folder(tmp_path: Path) -> None:
    for step in ("../../x", "/x", None, 1.5, True):
        with pytest.raises(UserError, match="is damaged"):
            checkpoint.checked_extra(tmp_path, {"best": {"step": step, "value": 0.5, "kept": 0.1}})
    assert checkpoint.checked_extra(tmp_path, {"best": {"step": 4, "value": 0.5, "kept": 0.1}})


LINKS = (".lock", "run.json", "record.json", "history.jsonl", "probe.jsonl", "checkpoints", "model", "best-2", "dense")
LINKS += (
    ".best-2",
    "checkpoints/checkpoint-2",
    "checkpoints/checkpoint-2/complete.json",
    "compact",
    "model/config.json",
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after its second checkpoint; tests copy it."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"

    def die(self: StopCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopCallback, "on_step_end", die)
        with pytest.raises(Killed):
            prune(tiny(), folder)
    return folder


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests copy it."""
    folder = tmp_path_factory.mktemp("runs") / "complete"
    prune(tiny(fast=False), folder)
    return folder


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_or_removed_through_a_link(name: str, stopped: Path, tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(stopped, folder)
    link = folder / name
    if link.exists():
        link.rename(outside)
    elif "." in name.lstrip("."):
        outside.write_text("mine")
    else:
        outside.mkdir()
        (outside / "complete.json").write_text("mine")
        (outside / "config.json").write_text("mine")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    before = {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()}
    with pytest.raises(UserError, match=rf"{name}' is a symbolic link, and nothing in a run folder is written"):
        prune(tiny(), folder, resume=True)
    assert {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()} == before
    assert link.is_symlink()


def test_link_as_a_lock_empties_nothing(tmp_path: Path) -> None:
    """In a folder that holds nothing else, too."""
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(UserError, match=r"\.lock' is a symbolic link"):
        prune(tiny(), tmp_path / "run")
    assert (tmp_path / "thesis").read_text() == "years of work"


@pytest.mark.parametrize(
    ("name", "command"),
    [("sparse", ["export", "--format", "sparse"]), ("onnx", ["export", "--format", "onnx"]), ("speed.json", ["speed"])],
)
def test_exports_and_measurements_are_not_written_through_a_link(
    name: str, command: list[str], complete: Path, tmp_path: Path
) -> None:
    shutil.copytree(complete, tmp_path / "run")
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=rf"{name}' is a symbolic link"):
        cli.app([command[0], str(tmp_path / "run"), *command[1:]], standalone_mode=False)
    assert not list((tmp_path / "outside").iterdir())


def test_link_is_no_checkpoint(stopped: Path, tmp_path: Path) -> None:
    """Neither taken, nor completed, nor removed."""
    shutil.copytree(stopped / "checkpoints" / "checkpoint-2", tmp_path / "outside")
    place = tmp_path / "checkpoints"
    shutil.copytree(stopped / "checkpoints", place)
    (place / "checkpoint-1").symlink_to(tmp_path / "outside")
    (place / "checkpoint-9").symlink_to(tmp_path / "outside")
    before = sorted(path.name for path in (tmp_path / "outside").iterdir())
    assert list(checkpoint.steps(place)) == [2, 4]
    assert checkpoint.last_complete(place) == (place / "checkpoint-4", [])
    assert checkpoint.problem(place / "checkpoint-9") == "checkpoint-9 is a symbolic link"
    with pytest.raises(UserError, match="is a symbolic link"):
        checkpoint.write_state(place / "checkpoint-9", 9, None, {})
    checkpoint.rotate(place, 1)
    checkpoint.discard([place / "checkpoint-1", place / "checkpoint-9"])
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == before


def test_lines_and_files_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    for name in ("history.jsonl", "record.json"):
        (tmp_path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=r"history\.jsonl' is a symbolic link"):
        append_line(tmp_path / "history.jsonl", {"step": 1})
    write_text(tmp_path / "record.json", "new")
    assert (tmp_path / "outside").read_text() == "mine"
    assert (tmp_path / "record.json").read_text() == "new"


# --- a model folder is data -------------------------------------------------------------------------------------------


@pytest.fixture
def pets(make_png: Png, tmp_path: Path) -> Path:
    for split, count in {"train": 8, "validation": 2}.items():
        for n in range(2 * count):
            place = tmp_path / "pets" / split / ("cat" if n % 2 else "dog")
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{n}.png").write_bytes(make_png(n, 12))
    return tmp_path / "pets"


def hostile_run(model: Path, pets: Path, folder: Path) -> None:
    resolved = tiny(task="images", data=str(pets), model=str(model), train_rows=None, eval_rows=None, batch=4, steps=2)
    prune(resolved.with_user(warmup=0.0, cooldown=1.0), folder)


@pytest.mark.parametrize("known", [True, False], ids=["a class that transformers has", "a class of its own"])
def test_code_in_a_model_folder_is_not_run(known: bool, tiny_vit: Path, pets: Path, tmp_path: Path) -> None:
    model, touched = tmp_path / "hostile", tmp_path / "touched"
    shutil.copytree(tiny_vit, model)
    code = f"from pathlib import Path\nPath({str(touched)!r}).write_text('run')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "processing_evil.py", "__init__.py", "conftest.py"):
        (model / name).write_text(code)
    auto = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForImageClassification": "modeling_evil.Evil",
        "AutoImageProcessor": "processing_evil.Evil",
    }
    for name in ("config.json", "preprocessor_config.json"):
        said = json.loads((model / name).read_text())
        said["auto_map"] = auto
        if not known:
            said |= {"model_type": "evil", "architectures": ["Evil"], "image_processor_type": "Evil"}
        (model / name).write_text(json.dumps(said))
    if known:
        hostile_run(model, pets, tmp_path / "run")
    else:
        with pytest.raises(UserError, match=r"trust.remote.code"):
            hostile_run(model, pets, tmp_path / "run")
    assert not touched.exists()


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_pickle_for_weights_is_not_unpickled(tiny_vit: Path, pets: Path, tmp_path: Path) -> None:
    model, touched = tmp_path / "hostile", tmp_path / "touched"
    shutil.copytree(tiny_vit, model)
    (model / "model.safetensors").unlink()
    torch.save({"weight": Evil(touched)}, model / "pytorch_model.bin")
    with pytest.raises((UserError, ValueError, OSError, pickle.UnpicklingError)):
        hostile_run(model, pets, tmp_path / "run")
    assert not touched.exists()
