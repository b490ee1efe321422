"""Uploading a model to the Hugging Face hub, with a card of its run's results."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from platon.lab.card import model_card
from platon.lab.errors import UserError
from platon.lab.file import read_json
from platon.lab.record import read_record
from platon.lab.source import Source

CARD = "README.md"


def push(source: Source, name: str, form: str = "model", private: bool = False) -> str:
    """Upload a model in one commit; returns the address of its page.

    Args:
        source: the model; of a run, `form` says which of its folders.
        name: USER/MODEL on the hub; it is made if it is not there.
        form: model, compact, sparse, fast or onnx.
        private: make it visible to its owner only.
    """
    folder = source.folder if source.run is None else source.run.path / form
    if not folder.is_dir():
        raise UserError(f"{source.name!r} has no {form}/; make it with: platon export {source.name} --format {form}")
    if get_token() is None:
        raise UserError("the hub does not know you; log in with `hf auth login`, or set HF_TOKEN")
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    operations = [CommitOperationAdd(inside, path) for inside, path in files.items() if inside != CARD]
    card = _card(source, name, form, folder)
    if card is not None:
        operations.append(CommitOperationAdd(CARD, card.encode()))
    api = HfApi()
    try:
        page = api.create_repo(name, private=private, exist_ok=True)
        api.create_commit(page.repo_id, operations, commit_message=f"{form} of a run of platon", create_pr=False)
    except HFValidationError as error:
        raise UserError(f"{name!r} is no name for the hub; write USER/MODEL ({error})") from error
    except (OfflineModeIsEnabled, ConnectionError) as error:
        raise UserError("the hub cannot be reached; is HF_HUB_OFFLINE set, or is there no network?") from error
    except HfHubHTTPError as error:
        raise UserError(f"the hub refuses {name!r}: {' '.join(str(error).split())[:200]}") from error
    return str(page)


def _card(source: Source, name: str, form: str, folder: Path) -> str | None:
    """The card: a new one with the run's results and speed, unless the user has changed the one in the folder."""
    there = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else None
    if source.run is None:
        return there
    record = read_record(source.run.path)
    if there is not None and there != model_card(record, form):
        return there
    speed = read_json(source.run.speed) if source.run.speed.is_file() else None
    return model_card(record, form, name, speed)
