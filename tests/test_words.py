"""Words that say nothing, or that mean something else here, name nothing in the package."""

import ast
import re
from pathlib import Path

import platon

EMPTY = {"util", "utils", "helper", "helpers", "manager", "managers", "base", "threshold", "thresholds"}


def words(name: str) -> set[str]:
    """'loadBaseModel' and 'load_base_model' are load, base, model."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def test_names_say_what_things_are() -> None:
    assert words("_HTTPBase_util2") == {"http", "base", "util", "2"}
    source = Path(platon.__file__).parent
    named = []
    for file in source.rglob("*.py"):
        place = file.relative_to(source.parent)
        named += [(place, part) for part in place.with_suffix("").parts]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                named.append((place, node.name))
    assert len(named) > 100
    assert [(str(place), name) for place, name in named if words(name) & EMPTY] == []
