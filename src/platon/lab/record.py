"""What a run leaves on disk, for those who read it: the record, and the lines of its history and its probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from platon.lab.errors import UserError
from platon.lab.file import append_line, file_sha256, read_json, read_lines, sha256, write_json, write_text
from platon.lab.folder import HISTORY, PROBE, RECORD, RunFolder
from platon.lab.measure import Measure

__all__ = [
    "FORMAT",
    "HISTORY",
    "PROBE",
    "RECORD",
    "Measure",
    "RunFolder",
    "UserError",
    "append_history",
    "file_sha256",
    "read_history",
    "read_json",
    "read_record",
    "rewind_history",
    "sha256",
    "write_json",
    "write_text",
]

FORMAT = 1
Share = Annotated[float, Field(ge=0, le=1)]


class _Setting(BaseModel, strict=True):
    value: str | int | float | bool | None


class _Parameters(BaseModel, strict=True):
    all: int
    prunable: int
    left: int


class _Record(BaseModel, strict=True, extra="allow"):
    """The fields that every record has had since format 1; later ones are optional."""

    task: str
    method: str
    settings: dict[str, _Setting]
    metrics: list[str]
    results: Annotated[dict[str, Annotated[dict[str, FiniteFloat], Field(min_length=1)]], Field(min_length=1)]
    kept: Share
    parameters: _Parameters
    layers: dict[str, Share]
    seconds: FiniteFloat
    dense: dict[str, Any] | None = None  # of the twin, where there is one
    fast: dict[str, Any] | None = None  # of the model as it is deployed


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a finished run, checked: what every reader relies on is there and of the right type."""
    path = RunFolder(folder).record
    if not path.exists():
        raise UserError(f"{str(folder)!r} holds no finished run: there is no {RECORD} in it")
    record: dict[str, Any] = read_json(path)
    if not isinstance(record, dict):
        raise UserError(f"{str(path)!r} is damaged: it is no record")
    if record.get("format") != FORMAT:
        raise UserError(f"{str(path)!r} has format {record.get('format')}, this version of platon reads {FORMAT}")
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{str(path)!r} is half a record: {first['loc'][0]!r} is missing or damaged ({place}: "
            f"{first['msg'].lower()}); run it again, or remove it"
        ) from None
    return record


def append_history(folder: Path, line: dict[str, Any], name: str = HISTORY) -> None:
    """Add a line to the history of a run, or to its other file of lines, `PROBE`."""
    append_line(folder / name, line)


def read_history(folder: Path, name: str = HISTORY) -> list[dict[str, Any]]:
    """The lines of the history, or of `PROBE`."""
    return read_lines(folder / name)


def rewind_history(folder: Path, step: int, name: str = HISTORY) -> None:
    """Drop the lines after `step`: a run that resumes there writes them again."""
    kept = [line for line in read_history(folder, name) if line["step"] <= step]
    write_text(folder / name, "".join(json.dumps(line) + "\n" for line in kept))
