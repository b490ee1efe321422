"""The folder of a run: whose it is, what a failed start leaves of it, and what to say when it cannot be written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from platon.lab import job
from platon.lab.errors import UserError
from platon.lab.record import FORMAT, HISTORY, read_json, write_json
from platon.lab.settings import FIELDS, Settings, Sourced

STARTED, LOCK = "run.json", ".lock"


def read_started(folder: Path) -> Sourced:
    """The settings that a run was started with."""
    if not (folder / STARTED).exists():
        raise UserError(f"{str(folder)!r} holds no run; start one without --resume")
    started = read_json(folder / STARTED)
    try:
        said: dict[str, Any] = started["settings"]
        settings = Settings(**{name: one["value"] for name, one in said.items()})
        # A setting that came later than the run had its default then.
        sources = dict.fromkeys(FIELDS, "ours") | {name: one["source"] for name, one in said.items()}
        return Sourced(settings, sources, started["recipe"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{str(folder / STARTED)!r} is not what this version of platon writes") from None


@contextlib.contextmanager
def claimed(folder: Path, sourced: Sourced, resume: bool) -> Iterator[None]:
    """The folder is ours for this run: no other run is in it, and no other job works on it."""
    with contextlib.ExitStack() as claim:
        with job.first_alone() as first:
            if first:
                claim.enter_context(_locked(folder, sourced, resume))
        yield


@contextlib.contextmanager
def _locked(folder: Path, sourced: Sourced, resume: bool) -> Iterator[None]:
    started = folder / STARTED
    new = not folder.exists()
    _check(folder, sourced, resume)
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another process works on {str(folder)!r}; wait for it or choose another --output"
            ) from None
        _check(folder, sourced, resume)  # what another process did before we had the lock
        first = not started.exists()
        try:
            if first:
                with _writable(folder):
                    write_json(started, {"format": FORMAT, "recipe": sourced.recipe, "settings": sourced.plain()})
            yield
        except BaseException:
            if first:
                _release(folder, new)
            raise


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {str(folder)!r}: {error.strerror}") from None


def _check(folder: Path, sourced: Sourced, resume: bool) -> None:
    """Refuse a folder that holds anything but this run; what a start that was killed at once left behind is nothing."""
    if (folder / STARTED).exists():
        if not resume:
            raise UserError(
                f"{str(folder)!r} holds a run already; continue it with --resume, or choose another --output"
            )
        theirs = read_started(folder).plain()
        for name, said in sourced.plain().items():
            if theirs[name]["value"] != said["value"]:
                old = theirs[name]["value"]
                raise UserError(f"{str(folder)!r} holds another run: its {name} is {old!r}, not {said['value']!r}")
    elif folder.exists():
        if not folder.is_dir():
            raise UserError(f"{str(folder)!r} is a file; choose another --output")
        names = {path.name for path in folder.iterdir()} - {"dense", LOCK}
        if any(not name.startswith(f".{STARTED}.") for name in names):
            raise UserError(f"{str(folder)!r} is not empty and holds no run; choose another --output")


def _release(folder: Path, new: bool) -> None:
    """Leave nothing of a run that failed before it did anything, so that the corrected command can take its place."""
    history = folder / HISTORY
    made = {path.name for path in folder.iterdir()} - {STARTED, LOCK, HISTORY}
    if made or (history.exists() and history.stat().st_size):
        return
    for path in (history, folder / STARTED, folder / LOCK):
        path.unlink(missing_ok=True)
    if new:
        folder.rmdir()


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A full disk is one sentence, whoever meets it: safetensors and torch have errors of their own for it."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = _write_failure(error)
        if reason is None:
            raise
        raise UserError(
            f"cannot write to {str(folder)!r}: {reason}; nothing that was complete is lost: make room, then go on "
            "with --resume"
        ) from error


def _write_failure(error: Exception) -> str | None:
    if isinstance(error, OSError):
        full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
        return error.strerror if error.errno in full else None
    text = str(error)
    if isinstance(error, SafetensorError):
        return text.partition("I/O error: ")[2] or None
    torch_says = ("inline_container", "PytorchStreamWriter", "iostream error")
    return "the disk may be full" if any(words in text for words in torch_says) else None
