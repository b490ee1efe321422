"""Every file and function that docs/architecture.md names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "platon"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:[\w]+/)*\w+\.py)(?:::([\w.]+))?`", PAGE)))


def names_in(file: Path) -> set[str]:
    """Functions, classes, and methods as Class.method."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_the_page_names_files_and_functions() -> None:
    assert len(NAMED) > 25
    assert sum(bool(name) for _, name in NAMED) > 15


@pytest.mark.parametrize(("file", "name"), NAMED, ids="::".join)
def test_it_exists(file: str, name: str) -> None:
    place = ROOT / file if file.startswith("tests/") else SOURCE / file
    assert place.is_file(), file
    assert not name or name in names_in(place), f"{file} has no {name}"
