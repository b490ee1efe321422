"""The documentation site: what its build checks. `make docs` builds it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import platon

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("platon_site_hooks", ROOT / "website" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference(hooks: ModuleType) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)", text, re.MULTILINE)
    names = hooks.public_names()
    assert {f"platon.{name}" for name in platon.__all__ if name != "__version__"} < set(names)
    assert "platon.lightning.PruningCallback" in names
    assert [name for name in names if name not in shown] == []


def test_every_public_name_is_described(hooks: ModuleType) -> None:
    assert list(hooks.undocumented()) == []


def test_what_is_not_described_is_named(hooks: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "shop"
    source.mkdir()
    (source / "lightning.py").write_text("")
    (source / "__init__.py").write_text(
        '__all__ = ["sell", "Till", "buy"]\n\n\n'
        'def sell(price, count):\n    """Sell.\n\n    Args:\n        price: of one.\n    """\n\n\n'
        'class Till:\n    """Holds money."""\n\n    def open(self): ...\n\n'
        '    def close(self):\n        """Close it."""\n\n    def _count(self): ...\n\n\n'
        "def buy(): ...\n"
    )
    assert list(hooks.undocumented(source)) == [
        "shop.sell: no docstring says under Args what count is",
        "shop.Till.open has no docstring",
        "shop.buy has no docstring",
    ]


@pytest.mark.parametrize(
    ("origin", "link", "found"),
    [
        ("docs/index.md", "methods.md", "methods.md"),
        ("docs/api/methods.md", "../methods.md", "../methods.md"),
        ("docs/index.md", "../studies/glue/README.md", "studies/glue.md"),
        ("docs/examples.md", "../examples/trainer.py", "examples/trainer.md"),
        ("studies/glue/README.md", "report/tables.md", "glue/report/tables.md"),
        ("studies/glue/README.md", "../../docs/log.md", "../log.md"),
        ("studies/glue/README.md", "tasks.toml", "glue/tasks.md"),
        ("CONTRIBUTING.md", "docs/log.md", "log.md"),
    ],
)
def test_links_lead_to_pages_of_the_site(hooks: ModuleType, origin: str, link: str, found: str) -> None:
    assert hooks._moved(origin, link) == found


def test_names_become_links_to_the_reference(hooks: ModuleType) -> None:
    text = "# `platon.load`\n`platon.load`, [`platon.save`](x.md), `platon.Cubic(final=0.1)`, `platon.lab`"
    assert hooks._with_references(text) == (
        "# `platon.load`\n[`platon.load`][platon.load], [`platon.save`](x.md), "
        "[`platon.Cubic(final=0.1)`][platon.Cubic], `platon.lab`"
    )


def test_what_a_browser_would_fetch_is_noticed(hooks: ModuleType) -> None:
    local = (
        '<script src="assets/a.js"></script><a href="https://arxiv.org">paper</a><img src="data:image/png;base64,//8=">'
    )
    assert hooks.fetched(local) == []
    foreign = ('<script src="https://cdn/x.js">', '<link rel="x" href="//fonts/a.css">', "<img src=http://a/b.png>")
    assert hooks.fetched(local + "".join(foreign)) == list(foreign)


def test_the_page_of_the_command_line_has_every_command(hooks: ModuleType) -> None:
    page = hooks.commands()
    for command in ("prune", "predict", "eval", "export", "speed", "inspect", "report", "push", "sweep", "list"):
        assert f"## platon {command}\n" in page
    assert "| `--keep` | share of the prunable weights" in page
    assert "[dim]" not in page
