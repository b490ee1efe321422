"""docs/paper.md names functions and tests that exist, all equations and decisions, and the hand example's numbers."""

import importlib.util
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")

FUNCTIONS = sorted(set(re.findall(r"`((?:engine|lab|deploy|report)(?:\.\w+)+)`", PAGE)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
FILES = sorted(set(re.findall(r"`([\w/]+\.py)`", PAGE)))


def table(heading: str) -> list[list[str]]:
    """The rows of the table below a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


@cache
def named_in(file: str) -> set[str]:
    return set(re.findall(r"^(?:def|class) (\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_exists(name: str) -> None:
    found = pkgutil.resolve_name(f"platon.{name}")
    assert callable(found) or isinstance(found, property)


@pytest.mark.parametrize(("file", "test"), TESTS)
def test_test_exists(file: str, test: str) -> None:
    assert test.startswith("test_")
    assert test in named_in(file)


@pytest.mark.parametrize("file", FILES)
def test_file_exists(file: str) -> None:
    assert (ROOT / file).is_file()


def test_every_row_of_the_equations_is_whole() -> None:
    for equation, symbol, function, test in table("Equations"):
        assert symbol, equation
        pending = function == test == "not yet"
        assert pending or (re.match(r"`engine\.", function) and re.match(r"`tests/", test)), equation


def test_every_decision_is_there() -> None:
    rows = table("Decisions")
    assert [int(row[0]) for row in rows] == list(range(1, 18))
    for number, decision, where, test in rows:
        assert decision.endswith("."), number
        pending = where == test and where.startswith("with the ")
        assert pending or (where.startswith("`") and test.startswith("`tests/")), number


def test_equations_of_the_paper_are_all_there() -> None:
    named = [row[0].split(",")[0] for row in table("Equations")]
    for label in (
        "sensitivity",
        "sensitivity_taylor",
        "proj_function",
        "ema_sensitivity",
        "uncertainty",
        "ema_uncertainty",
        "importance_score",
        "the log form",
        "pruning_alg",
        "cubic_schedule",
    ):
        assert label in named


def test_hand_example_has_the_numbers_of_its_test() -> None:
    place = Path(__file__).with_name("test_oracle.py")
    spec = importlib.util.spec_from_file_location("platon_tests_hand", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = table("By hand")
    assert [row[0] for row in rows] == [str(t) for t in range(1, len(module.HAND) + 1)]
    for row, (*numbers, kept, weights) in zip(rows, module.HAND, strict=True):
        written = [tuple(float(x) for x in cell.split(",")) for cell in (*row[1:7], row[8])]
        assert written == [*numbers, weights]
        assert row[7].replace(" ", "") == kept
