"""Typical mistakes are answered before torch is imported, which takes seconds; and what help says."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import typer

from platon import cli
from platon.cli.method_names import NAMES, method_names
from platon.engine.methods import METHODS

SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from platon import cli
found = {}
for what, words in json.loads(sys.argv[1]).items():
    said = ""
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            cli.app(words.split(), standalone_mode=False)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    found[what] = [said, sorted({"torch", "transformers", "datasets"} & set(sys.modules))]
print(json.dumps(found))
"""
SAID = {
    "wrong task": "no task is called 'sst3'; nearest: 'sst2'",
    "wrong file": "revews.csv does not exist; nearest: 'reviews.csv'",
    "missing column": "reviews.csv has no column 'stars'; it has: review, sentiment",
    "bad share": "keep must be in (0, 1], got 80",
    "unknown method": "no method is called 'plato'; nearest: 'platon'",
    "run folder exists": "'begun' holds a run already; continue it with --resume",
    "run folder missing": "the model folder 'runs/nothing' does not exist",
    "wrong recipe": "nearest: ",
    "not a model folder": "'empty' is neither a finished run nor a model",
    "misspelt flag": "No such option: --kep",
}


def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "mistakes.py"
    spec = importlib.util.spec_from_file_location("mistakes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ten_mistakes_are_answered_without_torch(tmp_path: Path) -> None:
    mistakes = benchmark()
    mistakes.make_files(tmp_path)
    assert mistakes.MISTAKES.keys() == SAID.keys()
    words = [sys.executable, "-c", SCRIPT, json.dumps(mistakes.MISTAKES)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    for what, (said, imported) in json.loads(done.stdout.splitlines()[-1]).items():
        assert SAID[what] in said, what
        assert imported == [], what


def test_the_names_of_methods() -> None:
    assert tuple(METHODS) == NAMES == method_names()


def test_a_method_of_the_users_own_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", METHODS["platon"])
    assert "mine" in method_names()


# --- help -------------------------------------------------------------------------------------------------------------

COMMANDS = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


HelpOf = Callable[[str, int], str]


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> HelpOf:
    def read(command: str, width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
        cli.app([command, "--help"], standalone_mode=False)
        return capsys.readouterr().out

    return read


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_can_be_read(command: str, width: int, help_of: HelpOf) -> None:
    said = help_of(command, width)
    assert max(len(line) for line in said.splitlines()) <= width
    assert said.count("Example: ") == 1
    assert "<bool>" not in said
    assert not re.search(r"\bt_[if]\b|[α-ωΑ-Ω]", said)


def test_common_options_come_first(help_of: HelpOf) -> None:
    said = help_of("prune", 100)
    panels = re.findall(r"╭─ ([\w ]+) ─", said)
    assert panels[0] == "Common"
    assert panels[-1] == "Recipes and files"
    assert len(panels) == len(set(panels))
    first = said.split("╭─ Data")[0]
    assert all(f"--{name} " in first for name in ("task", "data", "model", "keep", "output", "resume"))
    assert "--no-group-by-length" in said
    assert "--no-augment" not in said  # what changes nothing is not shown, but understood
