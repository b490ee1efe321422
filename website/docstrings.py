"""A Griffe extension: what the reference shows of docstrings."""

from __future__ import annotations

from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """A class is described by its own docstring, which says nothing of `__init__`, and by the Args of its bases."""

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Called once, when all of platon has been read."""
        self._walk(pkg)

    def _walk(self, thing: Any) -> None:
        for member in list(thing.members.values()):
            if not member.is_alias and member.is_module:
                self._walk(member)
            elif not member.is_alias and member.is_class and member.docstring:
                if "__init__" in member.members:
                    member.members["__init__"].docstring = None
                if any("dataclass" in str(one.value) for one in member.decorators):
                    self._complete(member)

    def _complete(self, kind: Any) -> None:
        """Describe the fields that a dataclass inherits."""
        described = _args(kind)
        lines = []
        for base in kind.mro():
            for name, text in _args(base).items():
                if name not in described:
                    described[name] = text
                    lines.append(f"    {name}: {text}")
        if lines:
            head = "" if "\nArgs:\n" in kind.docstring.value else "\nArgs:\n"
            kind.docstring.value = kind.docstring.value.rstrip() + "\n" + head + "\n".join(lines)


def _args(kind: Any) -> dict[str, str]:
    """Parameter -> its description, of one docstring."""
    if not kind.docstring:
        return {}
    sections = griffe.parse_google(kind.docstring, warn_unknown_params=False, warnings=False)
    found = [section for section in sections if section.kind is griffe.DocstringSectionKind.parameters]
    return {one.name: " ".join(one.description.split()) for section in found for one in section.value}
