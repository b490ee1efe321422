"""The rooms of the house and what each may touch, read from the syntax tree of every file."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import platon
from platon.engine.methods import METHODS
from platon.engine.score import Score

SOURCE = Path(platon.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = ("engine", "deploy", "lab", "report")


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str | None:
    """The room that a module of platon is in; `None`: the hallway."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def imported(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it; a name taken from a package of ours counts as its module."""
    package = module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = SOURCE.parent.joinpath(*origin.split("."), alias.name)
                yield f"{origin}.{alias.name}" if inner.is_dir() or inner.with_suffix(".py").is_file() else origin


def foreign(file: Path) -> set[str]:
    """The outside packages that a file imports, the standard library left out."""
    tops = {name.partition(".")[0] for name in imported(file)}
    return tops - set(sys.stdlib_module_names) - {"platon"}


def ours(file: Path) -> set[str]:
    return {name for name in imported(file) if name.partition(".")[0] == "platon"}


def in_room(*names: str) -> list[Path]:
    return [file for file in FILES if room(module_name(file)) in names]


def test_the_walk_sees_imports() -> None:
    """Of all forms: otherwise every other test here would pass on nothing."""
    pruner = set(imported(SOURCE / "engine" / "pruner.py"))
    assert {"dataclasses", "torch", "torch.optim", "platon.engine.ranking.ranking", "platon.engine.score"} <= pruner
    assert len(in_room("engine")) > 8


@pytest.mark.parametrize("file", in_room("engine"), ids=module_name)
def test_engine_imports_torch_and_itself(file: Path) -> None:
    assert foreign(file) <= {"torch"}
    assert all(name.startswith("platon.engine") for name in ours(file))


@pytest.mark.parametrize("file", in_room("lab", "deploy"), ids=module_name)
def test_lab_and_deploy_stay_out_of_each_other(file: Path) -> None:
    """Each may use the engine, and of the other what its package shows at the door."""
    here = room(module_name(file))
    other = "deploy" if here == "lab" else "lab"
    for name in ours(file):
        assert not name.startswith(f"platon.{other}."), f"{name} is inside {other}"
        assert room(name) in (here, other, "engine"), f"{name} is neither here nor in the engine"


@pytest.mark.parametrize("file", in_room("report"), ids=module_name)
def test_report_reads_records_and_nothing_else(file: Path) -> None:
    for name in ours(file):
        assert name.startswith("platon.report") or name in ("platon.lab.record", "platon.lab.percent"), name
    assert not {"torch", "transformers"} & foreign(file), "it never trains"


def test_nothing_imports_the_hallway() -> None:
    for file in in_room(*ROOMS):
        assert not {"platon", "platon.cli", "platon.__main__"} & ours(file), module_name(file)


def test_names_resolve() -> None:
    for name in platon.__all__:
        assert getattr(platon, name) is not None
    assert dir(platon) == list(platon.__all__)
    assert sorted(platon.__all__) == list(platon.__all__)
    with pytest.raises(AttributeError, match="module 'platon' has no attribute 'Prunner'"):
        _ = platon.Prunner
    for home, names in platon._HOMES.items():
        module = importlib.import_module(home)
        assert all(getattr(module, name) is getattr(platon, name) for name in names)


def test_importing_platon_imports_nothing_heavy() -> None:
    """So that help is instant; and the public names are the ones that a type checker sees."""
    script = (
        "import json, sys, time\n"
        "start = time.process_time()\n"
        "import platon\n"
        "seconds = time.process_time() - start\n"
        "dir(platon), platon.__version__\n"
        "print(json.dumps([seconds, sorted({name.partition('.')[0] for name in sys.modules})]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    assert not {"torch", "transformers", "numpy", "typer", "rich", "matplotlib"} & set(modules)
    assert seconds < 0.1
    checked = {
        alias.name
        for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text()))
        if isinstance(node, ast.If)
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert checked == set(platon.__all__) - {"__version__"}


ONLY_TORCH = """
import importlib.metadata, re, sys
from importlib.machinery import PathFinder

def closure(name, found):  # a distribution and all that it requires
    if name not in found:
        found.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return found
        for line in required:
            if "extra ==" not in line:
                closure(re.match(r"[\\w.-]+", line)[0].lower().replace("_", "-"), found)
    return found

class Hidden:  # as if nothing but torch were installed
    owners = importlib.metadata.packages_distributions()
    shown = closure("torch", {"platon"})

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        owners = {owner.lower().replace("_", "-") for owner in self.owners.get(top, [])}
        return PathFinder.find_spec(name, path, target) if owners & self.shown or not owners else None

sys.meta_path[sys.meta_path.index(PathFinder)] = Hidden()
"""


def test_engine_runs_without_the_rest() -> None:
    """In a process where only torch is there to import, every module of the engine opens, and a step prunes."""
    modules = [module_name(file) for file in in_room("engine")]
    script = ONLY_TORCH + (
        "import importlib, warnings\n"
        "warnings.filterwarnings('ignore', message='Failed to initialize NumPy')\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "import torch, platon\n"
        "layer = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)\n"
        "pruner = platon.Pruner(layer, optimizer, schedule=platon.Constant(0.5),\n"
        "                       units=platon.Units({'weight': layer.weight}))\n"
        "layer(torch.ones(1, 4)).sum().backward()\n"
        "optimizer.step()\n"
        "assert int(layer.weight.count_nonzero()) == 8, layer.weight\n"
        "try:\n"
        "    platon.PruningCallback\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name)\n"  # so it is hidden, and the rest of this test says something
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("tqdm", "transformers")


# --- a method answers for itself --------------------------------------------------------------------------------------

SCORE_FILES = {"score.py", "smoothed.py", "learned.py"}  # where the methods are


def method_classes() -> set[str]:
    """The classes of all methods and of what they share, but for `Score` itself."""
    found = {Score}
    while more := {child for known in found for child in known.__subclasses__() if room(child.__module__)} - found:
        found |= more
    return {known.__name__ for known in found} - {"Score"}


def branches_on_methods(source: str) -> list[str]:
    """Expressions that ask which method a score is: by class, by a method's name, by an attribute it may have."""
    classes, words = method_classes(), set(METHODS) - {"dense"}

    def names(node: ast.AST) -> set[str]:
        return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} | {
            part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
        }

    def strings(node: ast.AST) -> set[str]:
        return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks_class = node.func.id in ("isinstance", "issubclass") and names(node.args[1]) & classes
            asks_attribute = node.func.id in ("getattr", "hasattr") and "score" in names(node.args[0])
            is_branch = asks_class or asks_attribute
        elif isinstance(node, ast.Compare):
            is_branch = any(
                names(side) & classes or ("method" in names(node) and strings(side) & words)
                for side in [node.left, *node.comparators]
            )
        else:
            is_branch = isinstance(node, ast.MatchClass) and names(node.cls) & classes
        if is_branch:
            found.append(ast.unparse(node))
    return found


def test_the_walk_sees_branches() -> None:
    assert {"Platon", "Smoothed", "Learned", "Gated", "HardConcrete"} <= method_classes()
    for branch in (
        "isinstance(score, Movement)",
        "isinstance(self.score, (learned.Gated, Magnitude))",
        "type(score) is Platon",
        "type(score) in (Ratio, Sensitivity)",
        "settings.method == 'l0'",
        "method in ('movement', 'l0')",
        "getattr(pruner.score, 'penalty', None)",
        "hasattr(score, 'gate')",
    ):
        assert branches_on_methods(f"x = 1 if {branch} else 2") == [branch]
    assert branches_on_methods("match score:\n    case Movement():\n        pass") == ["Movement()"]
    for other in ("Platon() if score is None else score", "isinstance(score, Score)", "method == 'dense'"):
        assert branches_on_methods(other) == []


@pytest.mark.parametrize("file", in_room("engine", "lab", "deploy"), ids=module_name)
def test_only_methods_know_which_method_they_are(file: Path) -> None:
    """What depends on the method is a question that `Score` has an answer to, so that a new one is one file."""
    if file.name not in SCORE_FILES:
        assert branches_on_methods(file.read_text()) == []


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_a_file_has_one_purpose(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 300
