"""Claiming a run folder: one process at a time, one run a folder, and nothing left behind by a failed start."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from platon.lab import process_group
from platon.lab.errors import UserError
from platon.lab.file import read_json, write_json
from platon.lab.folder import LOCK, STARTED, RunFolder
from platon.lab.record import FORMAT
from platon.lab.settings import ResolvedSettings


def read_started(folder: Path) -> ResolvedSettings:
    """The settings that the run in `folder` was started with, checked as a user's settings are."""
    path = RunFolder(folder).started
    if not path.exists():
        raise UserError(f"{str(folder)!r} holds no run; start one without --resume")
    started = read_json(path)
    if not isinstance(started, dict):
        started = {}
    if started.get("format", FORMAT) != FORMAT:
        raise UserError(f"{str(path)!r} has format {started['format']}, this version of platon reads {FORMAT}")
    return restore_settings(started.get("settings"), path, started.get("recipe"))


def restore_settings(saved: Any, path: Path, recipe: Any = None) -> ResolvedSettings:
    """The settings in the JSON of `path`, a `run.json` or `record.json`; a `UserError` names the file."""
    try:
        return ResolvedSettings.from_plain(saved, recipe)
    except UserError as error:
        raise UserError(f"{str(path)!r} is not what this version of platon writes: {error}") from None


def settings_to_resume(folder: Path, asked: ResolvedSettings) -> ResolvedSettings:
    """The settings of the run in `folder`, for a command that resumes it and gives some settings again.

    Only what the command gives, itself or by a recipe, is compared with the run; the rest is the run's. If `folder`
    holds no run, the settings are those of the command.
    """
    if not RunFolder(folder).is_started:
        return asked
    started = read_started(folder)
    said = {name: one for name, one in asked.plain().items() if one["source"] != "ours"}
    _refuse_other_settings(folder, started, said)
    return started


@contextlib.contextmanager
def claimed(folder: Path, resolved: ResolvedSettings, resume: bool) -> Iterator[None]:
    """Hold the folder for this run: it is new, or holds this run and no other process works on it."""
    with contextlib.ExitStack() as claim:
        with process_group.first_process_only() as first:
            if first:
                claim.enter_context(_locked(RunFolder(folder), resolved, resume))
        yield


@contextlib.contextmanager
def locked(path: Path, message: str) -> Iterator[None]:
    """Hold a lock file; a `UserError` with `message` if another process holds it."""
    with contextlib.ExitStack() as held:
        with _writable(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(FileLock(path, blocking=False))  # opened without following links
            except Timeout:
                raise UserError(message) from None
        yield


@contextlib.contextmanager
def _locked(run: RunFolder, resolved: ResolvedSettings, resume: bool) -> Iterator[None]:
    new = not run.path.exists()
    check_folder(run, resolved, resume)
    busy = f"another process works on {str(run.path)!r}; wait for it or choose another --output"
    with locked(run.lock, busy):
        check_folder(
            run, resolved, resume
        )  # again: another process may have changed the folder before the lock was ours
        first_start = not run.is_started
        try:
            if first_start:
                with _writable(run.path):
                    write_json(run.started, {"format": FORMAT, "recipe": resolved.recipe, "settings": resolved.plain()})
            yield
        except BaseException:
            if first_start:
                _release(run, new)
            raise


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {str(folder)!r}: {error.strerror}") from None


def check_folder(run: RunFolder, resolved: ResolvedSettings, resume: bool) -> None:
    """Refuse a folder that holds anything but this run. A lock or half a run.json from a killed start is nothing."""
    run.refuse_links()
    folder = str(run.path)
    if run.is_started:
        if not resume:
            raise UserError(f"{folder!r} holds a run already; continue it with --resume, or choose another --output")
        _refuse_other_settings(run.path, read_started(run.path), resolved.plain())
    elif run.path.exists():
        if not run.path.is_dir():
            raise UserError(f"{folder!r} is a file; choose another --output")
        names = {path.name for path in run.path.iterdir()} - {run.dense.path.name, LOCK}
        if any(not name.startswith(f".{STARTED}.") for name in names):
            raise UserError(f"{folder!r} is not empty and holds no run; choose another --output")


def _refuse_other_settings(folder: Path, started: ResolvedSettings, asked: Mapping[str, Mapping[str, Any]]) -> None:
    theirs = started.plain()
    # What the user typed is compared first: naming a default that differs only as a consequence would mislead.
    for name in sorted(asked, key=lambda name: asked[name]["source"] != "user"):
        old, new = theirs[name]["value"], asked[name]["value"]
        if old != new:
            raise UserError(f"{str(folder)!r} holds another run: its {name} is {old!r}, not {new!r}")


def _release(run: RunFolder, new: bool) -> None:
    """Remove what a start that failed at once has made, so that the corrected command can use the folder."""
    made = {path.name for path in run.path.iterdir()} - {run.started.name, LOCK, run.history.name}
    if made or (run.history.exists() and run.history.stat().st_size):
        return
    for path in (run.history, run.started, run.lock):
        path.unlink(missing_ok=True)
    if new:
        run.path.rmdir()


@contextlib.contextmanager
def explaining_write_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk into one sentence; safetensors and torch raise errors of their own for it."""
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
    from_torch = ("inline_container", "PytorchStreamWriter", "iostream error")
    return "the disk may be full" if any(words in text for words in from_torch) else None
