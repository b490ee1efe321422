"""Folders that are replaced as a whole: complete, or as they were."""

from __future__ import annotations

import errno
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
    if not place.exists():
        return place
    known = place.is_dir() and ((place / MANIFEST).exists() or not any(place.iterdir()))
    if not known or any(next(place.glob(pattern), None) for pattern in _TRAINING):
        raise ValueError(f"{str(folder)!r} holds something else than a saved model; choose another folder")
    return place


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
