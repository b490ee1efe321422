"""What the documentation site needs beyond its theme: called by mkdocs while it builds the site.

The pages in docs/ are plain Markdown whose links also work where the repository is browsed. Here they become pages of
the site: links to files outside docs/ lead to copies of these files, SVG images are put into the page itself, where
they follow light and dark, and names such as `platon.Pruner` lead to the API reference.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from command_line import commands  # mkdocs loads this file by its path, not as part of a package

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "platon"
#: files that are shown as code
LANGUAGES = {".py": "python", ".toml": "toml"}
#: files whose `__all__` users import from
DOORS = ("__init__.py", "lightning.py")

# `mkdocs build --strict` fails on a warning.
log = logging.getLogger("mkdocs.hooks.platon")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files outside docs/."""
    for place in _outside():
        text = (ROOT / place).read_text(encoding="utf-8")
        if (language := LANGUAGES.get(Path(place).suffix)) is not None:
            text = f"# {Path(place).name}\n\n```{language}\n{text}```\n"
        files.append(File.generated(config, _page_of(place), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite what is outside of code blocks."""
    origin = {_page_of(place): place for place in _outside()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):
        part = re.sub(r"!\[([^]]*)\]\(([^)]+\.svg)\)", lambda found: _picture(origin, *found.groups()), parts[index])
        part = re.sub(r"(\]\()(?!\w+:|#)([^)#\s]+)", lambda found: found[1] + _moved(origin, found[2]), part)
        parts[index] = _with_references(part)
    return "".join(parts).replace("<!-- commands -->", commands())


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:
    """Warn of everything that a browser would fetch from elsewhere: the site is read offline."""
    for tag in fetched(output):
        log.warning("%s fetches from elsewhere: %s", page.file.src_uri, tag)


def on_env(env: Any, config: MkDocsConfig, files: Files) -> None:
    """Warn of every public name that the reference leaves out or says too little about."""
    shown = set()
    for page in files.documentation_pages():
        shown |= set(re.findall(r"^::: (\S+)", page.content_string, re.MULTILINE))
    for name in public_names():
        if name not in shown:
            log.warning("%s is public, but no page of docs/api/ has a line '::: %s'", name, name)
    for problem in undocumented():
        log.warning(problem)


# --- files and links --------------------------------------------------------------------------------------------------


def _outside() -> list[str]:
    """The files outside docs/ that the site shows, as paths in the repository."""
    studies = ("studies/*/README.md", "studies/*/*.py", "studies/*/*.toml", "studies/*/report/tables.md")
    patterns = ("examples/*.py", *studies, "CHANGELOG.md", "CONTRIBUTING.md")
    return sorted(file.relative_to(ROOT).as_posix() for pattern in patterns for file in ROOT.glob(pattern))


def _page_of(place: str) -> str:
    """The page of the site that shows a file of the repository."""
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    if place == "README.md":
        return "index.md"
    return f"{place.removesuffix('/README.md').partition('.')[0].lower()}.md"


def _moved(origin: str, link: str) -> str:
    """A link of the file `origin`, as its page on the site has to write it."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return posixpath.relpath(_page_of(target), posixpath.dirname(_page_of(origin)))


def _picture(origin: str, text: str, link: str) -> str:
    """An SVG file as a part of the page; its text is what a screen reader says."""
    svg = (ROOT / posixpath.dirname(origin) / link).read_text(encoding="utf-8").strip()
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{text}" ', re.sub(r"\s*\n\s*", "", svg), count=1)


def _with_references(text: str) -> str:
    """`platon.NAME` and `platon.NAME(...)` as links to the API reference, outside of headings and other links."""
    names = "|".join(name.removeprefix("platon.") for name in public_names() if name.count(".") == 1)
    pattern = re.compile(rf"(?<!\[)`platon\.({names})(\([^`]*\))?`(?!\])")

    def line(one: str) -> str:
        return one if one.startswith("#") else pattern.sub(lambda found: f"[{found[0]}][platon.{found[1]}]", one)

    return "\n".join(map(line, text.split("\n")))


def fetched(page: str) -> list[str]:
    """The tags of a page that load something from another host; links to follow are none."""
    tags = re.findall(r"<(?:script|link|img|iframe|source|video|audio|object|embed)\b[^>]*>", page)
    return [tag for tag in tags if re.search(r"""\b(?:src|href|data)=["']?(?:https?:)?//""", tag)]


# --- public names -----------------------------------------------------------------------------------------------------


def public_names(source: Path = SOURCE) -> list[str]:
    """Every name in the `__all__` of a module that users import, such as platon.Pruner; read, not imported."""
    found = []
    for door in DOORS:
        module = ".".join([source.name, *Path(door).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.parse((source / door).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found += [f"{module}.{name}" for name in ast.literal_eval(node.value) if name != "__version__"]
    return found


def undocumented(source: Path = SOURCE) -> Iterator[str]:
    """A sentence for each public name, method or parameter that no docstring describes."""
    package = griffe.load(source.name, search_paths=[source.parent])
    for name in public_names(source):
        thing = package[name.partition(".")[2]]
        thing = thing.final_target if thing.is_alias else thing
        family = [thing, *thing.mro()] if thing.is_class else [thing]
        text = _docstrings(family)
        if not thing.docstring:
            yield f"{name} has no docstring"
        for parameter in thing.parameters:
            if parameter.name not in ("self", "args", "kwargs") and f"\n    {parameter.name}: " not in text:
                yield f"{name}: no docstring says under Args what {parameter.name} is"
        methods = [one for one in thing.members.values() if one.is_function or "property" in one.labels]
        for method in (one.name for one in methods if not one.name.startswith("_")):
            if not _docstrings([kind.members[method] for kind in family if method in kind.members]):
                yield f"{name}.{method} has no docstring"


def _docstrings(things: list[Any]) -> str:
    """All docstrings of some classes or functions."""
    return "\n".join(one.docstring.value for one in things if one.docstring)
