"""Folders that are replaced as a whole: complete, or as they were."""

from __future__ import annotations

import errno
import fnmatch
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from platon.deploy.manifest import MANIFEST

# Files of transformers' Trainer: a folder that holds one of them is not replaced.
_TRAINING = ("training_args.bin", "trainer_state.json", "checkpoint-*")


def place_of(folder: Path) -> Path:
    """Where a folder really is, once it is clear that it may be replaced."""
    try:
        place = folder.resolve()
    except (OSError, RuntimeError) as error:  # links that lead in a circle
        raise ValueError(f"{str(folder)!r} cannot be followed ({error}); choose another folder") from None
    if Path.cwd().is_relative_to(place):
        raise ValueError(f"{str(folder)!r} is the current folder or holds it, so it is not replaced; name a new folder")
    try:
        names = _names(place)
    except FileNotFoundError:
        return place
    except NotADirectoryError:
        raise _foreign(folder) from None
    known = MANIFEST in names or not names
    if not known or any(fnmatch.filter(names, pattern) for pattern in _TRAINING):
        raise _foreign(folder)
    return place


def _foreign(folder: Path) -> ValueError:
    return ValueError(f"{str(folder)!r} holds something else than a saved model; choose another folder")


def _names(place: Path) -> list[str]:
    """What is in a folder that another thread or process may replace meanwhile.

    It then removes the folder that was opened here, and half of its files would look like somebody else's: look again.
    """
    while True:
        before = place.stat()
        names = [path.name for path in place.iterdir()]
        after = place.stat()
        if (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns):
            return names


def swap(new: Path, folder: Path) -> None:
    """Rename the new folder to the name of the old one, which is removed when the new one is in place."""
    while True:
        old = new.with_name(f".{folder.name}.{uuid4().hex}")
        with suppress(FileNotFoundError):
            folder.replace(old)
        try:
            new.replace(folder)
            return
        except OSError as error:
            # Another thread or process has put its folder there between the two renames: replace that one.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                with suppress(OSError):
                    old.replace(folder)
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
