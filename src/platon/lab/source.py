"""What a command works on: a finished run, or any model, as a folder or by its name on the hub.

Nothing here imports torch, so that a wrong name is answered at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from platon.lab.errors import UserError
from platon.lab.folder import RunFolder
from platon.lab.record import read_record
from platon.lab.tasks.path import locate_model

CONFIG = "config.json"
_FORMS = ("model", "compact", "sparse", "fast")
# What a model on the hub consists of, without its copies for other frameworks and without pickles.
_FILES = ("*.json", "*.txt", "*.model", "*.safetensors")


@dataclass(frozen=True)
class Source:
    """A model that a user named.

    Args:
        name: as it was given.
        folder: where the model is; of a run, its `model/`, unless one of its other folders was named.
        run: the finished run that it belongs to, if any.
    """

    name: str
    folder: Path
    run: RunFolder | None = None

    @property
    def record(self) -> dict[str, Any] | None:
        """The record of its run."""
        return None if self.run is None else read_record(self.run.path)

    @property
    def whole_run(self) -> RunFolder | None:
        """The run, if it was named itself and not one of its folders."""
        return self.run if self.run is not None and self.run.path == Path(self.name).expanduser() else None

    def form(self, *names: str) -> Path:
        """The first of these folders that the run has; the model as it was named otherwise."""
        places = [] if self.whole_run is None else [self.whole_run.path / name for name in names]
        return next((place for place in places if place.exists()), self.folder)

    def beside(self, name: str) -> Path:
        """Where something that is made of it goes: into the run, or beside the folder; for the hub's, here."""
        if self.run is not None:
            return self.run.path / name
        given = Path(self.name).expanduser()
        return given.with_name(f"{given.name}-{name}") if given.is_dir() else Path(f"{given.name}-{name}")


def find_source(name: str) -> Source:
    """The model that a user names; a `UserError` if there is none of that name."""
    folder = Path(name).expanduser()
    run = RunFolder(folder)
    if run.is_finished:
        read_record(folder)  # a damaged one is refused here
        return Source(name, run.model, run)
    if run.is_started:
        raise UserError(f"{name!r} holds a run that is not finished; go on with: platon prune --output {name} --resume")
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise UserError(
                f"{name!r} is neither a finished run nor a model: there is no record.json and no {CONFIG} in it"
            )
        above = RunFolder(folder.parent)
        if folder.name in _FORMS and above.is_finished:
            read_record(above.path)
            return Source(name, folder, above)
        return Source(name, folder)
    return Source(name, _from_hub(locate_model(name)))


def check_name(name: str) -> None:
    """Raise unless there is a model of this name, as a folder or on the hub, without importing torch."""
    if not Path(name).expanduser().exists():
        from huggingface_hub import hf_hub_download

        _asked(name, partial(hf_hub_download, locate_model(name), CONFIG))


def _from_hub(name: str) -> Path:
    """The folder of a model of the hub, which is fetched if it is not on this machine yet."""
    from huggingface_hub import snapshot_download

    fetched = partial(snapshot_download, name, allow_patterns=list(_FILES), ignore_patterns=["*/*.safetensors"])
    try:
        return Path(_asked(name, fetched))
    except UserError as error:
        raise UserError(str(error).replace("give a folder with --model DIR", "give the path of a folder")) from error


def _asked(name: str, ask: Callable[[], str]) -> str:
    """The hub's answer; a `UserError` that says why there is none."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return ask()
    except (OSError, ValueError, HfHubHTTPError) as error:
        from platon.lab.tasks.model_error import sentence

        raise UserError(sentence(name, "config", error)) from error
