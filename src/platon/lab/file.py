"""Files of a run: atomic writes, JSON, JSON lines, digests. Nothing is written or removed through a symbolic link."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from platon.lab.errors import UserError


def link_error(path: Path) -> UserError:
    """The error for a symbolic link where platon would write or remove something."""
    return UserError(
        f"{str(path)!r} is a symbolic link, and nothing in a run folder is written or removed through a link; "
        "put what it points to in its place, or choose another --output"
    )


def _open_no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_text(path: Path, text: str) -> None:
    """Write to a temporary file and rename it, so that a reader sees the old file or the new one, never a part.

    A link at `path` is replaced by the file; what it pointed to stays as it is.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", opener=_open_no_follow) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON; NaN and infinity are refused, because JSON has neither."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The parsed file, or a `UserError` that says what is wrong with it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no {path.name} in {str(path.parent)!r}") from None
    except RecursionError:
        raise UserError(f"{str(path)!r} is damaged: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} is damaged: {error}") from None


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append one JSON object as a line."""
    try:
        with open(path, "a", encoding="utf-8", opener=_open_no_follow) as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise link_error(path) from None
        raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, each with a `step`; none if there is no such file.

    A last line without its newline was cut short when the process was killed, and is left out. Any other line that is
    not an object with a step is an error: the file was not written by platon, or was changed since.
    """
    if not path.exists():
        return []
    try:
        texts = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may occur inside a string
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} is damaged: {error}") from None
    lines = []
    for number, text in enumerate(texts[:-1], start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            raise UserError(f"{str(path)!r} is damaged: line {number} is not a JSON object with a step")
        lines.append(line)
    return lines


def remove(path: Path) -> None:
    """Remove a file, a folder or a link if it is there; what a link points to stays."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def sha256(chunks: Iterable[Any]) -> str:
    """The digest of bytes-like chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """The digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
