"""Records: what a run leaves. Plain JSON, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from platon.lab.errors import UserError

FORMAT = 1
RECORD, HISTORY, PROBE = "record.json", "history.jsonl", "probe.jsonl"


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: nobody ever sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """A JSON file that a person can read."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The file's value, or one sentence on what is wrong with it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no {path.name} in {str(path.parent)!r}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} is damaged: {error}") from None


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a finished run."""
    if not (folder / RECORD).exists():
        raise UserError(f"{str(folder)!r} holds no finished run: there is no {RECORD} in it")
    record: dict[str, Any] = read_json(folder / RECORD)
    if not isinstance(record, dict):
        raise UserError(f"{str(folder / RECORD)!r} is damaged: it is no record")
    if record.get("format") != FORMAT:
        raise UserError(
            f"{str(folder / RECORD)!r} has format {record.get('format')}, this version of platon reads {FORMAT}"
        )
    return record


def append_history(folder: Path, line: dict[str, Any], name: str = HISTORY) -> None:
    """One more line of the history, or of another file of lines."""
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def read_history(folder: Path, name: str = HISTORY) -> list[dict[str, Any]]:
    """The history's lines; a last line cut short by a kill does not count."""
    path = folder / name
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def rewind_history(folder: Path, step: int, name: str = HISTORY) -> None:
    """Drop what came after `step`: a resumed run writes it again."""
    kept = [line for line in read_history(folder, name) if line["step"] <= step]
    write_text(folder / name, "".join(json.dumps(line) + "\n" for line in kept))


def sha256(chunks: Iterable[Any]) -> str:
    """The digest of bytes-like pieces."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """The digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
