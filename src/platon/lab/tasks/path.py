"""Paths that a user gives for data and models. Nothing here imports torch, so a wrong path is found at once."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable
from pathlib import Path

from platon.lab.errors import UserError, nearest


def existing_data(data: Path) -> None:
    """Raise unless `data` exists."""
    if not data.exists():
        kind = "file" if data.suffix else "folder"
        raise UserError(f"the data {kind} {data} does not exist{nearest(data.name, _names(data.parent))}")


def existing_folder(data: Path) -> None:
    """Raise unless `data` is a folder."""
    existing_data(data)
    if not data.is_dir():
        raise UserError(f"the data folder {data} is a file, not a folder")


def check_columns(file: Path, wanted: Iterable[str | None], labels: str | None) -> None:
    """Raise unless the header of a CSV or TSV file has these columns; other kinds of files are checked when read."""
    if file.suffix.lower() not in (".csv", ".tsv") or not file.is_file():
        return
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            header = next(csv.reader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else ","), None)
    except (OSError, UnicodeDecodeError, csv.Error):
        return  # the reader of the file says what is wrong with it
    for column in (*wanted, *split_names(labels, header or ())):
        if header and column is not None and column not in header:
            raise UserError(f"{file} has no column {column!r}; it has: {', '.join(header)}")


def split_names(names: str | None, columns: Collection[str]) -> tuple[str, ...]:
    """The columns that a user names: one, or several separated by commas. A column's name may have a comma."""
    if names is None:
        return ()
    return (names,) if names in columns else tuple(name.strip() for name in names.split(","))


def listing(folder: Path) -> str:
    """The names in a folder, at most eight of them."""
    names = sorted(_names(folder))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"


def locate_model(name: str) -> str:
    """The path of an existing folder or GGUF file, or a name that the hub may have; anything else is refused."""
    path = Path(name).expanduser()
    if path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
        return str(path)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or path.is_file()
    if looks_like_path or (path.parent != Path() and path.parent.is_dir()):
        if path.is_file():
            raise UserError(f"the model {name!r} is a file; give the folder that holds config.json and the weights")
        known = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise UserError(f"the model folder {name!r} does not exist{nearest(path.name, known)}")
    return name


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
