"""Opening saved models, whoever saved them: `platon.save`, `save_pretrained`, or a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers.utils import logging

from platon.deploy import storage
from platon.deploy.sentence import MODULES, inner_models

RUN, MODEL = "record.json", "model"  # a finished run, and the folder of its model


def load(folder: str | Path) -> Any:
    """A saved model, in evaluation mode; it can be trained and pruned like any other.

    Args:
        folder: what `platon.save` or `save_pretrained` wrote, a run's `model/`, `compact/`, `sparse/` or `fast/`, or
            the run folder itself, which stands for its `model/`.

    What `platon.save` wrote comes back bit for bit, also a `SentenceTransformer`. A model that `platon.sparsify` made
    comes back sparse, for inference alone. Nothing in the folder is run: the class is one of transformers', the weights
    are plain tensors.
    """
    folder = Path(folder)
    if (folder / RUN).is_file() and (folder / MODEL).is_dir():
        folder = folder / MODEL
    if (folder / storage.MANIFEST).exists() or _holds_sentence_model(folder):
        return storage.load(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; give the folder of a saved model or of a run")
    if not (folder / storage.CONFIG).is_file():
        raise ValueError(
            f"{str(folder)!r} holds no saved model: there is neither {storage.MANIFEST} nor {storage.CONFIG} in it"
        )
    try:
        with _without_bars():
            config = transformers.AutoConfig.from_pretrained(folder)
            kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
            # Other sizes are refused below, in one sentence.
            settings = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
            model, found = kind.from_pretrained(folder, **settings)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot read the model in {str(folder)!r}: {' '.join(str(error).split())[:200]}") from error
    wrong = sorted(found["missing_keys"]) or sorted(str(one[0]) for one in found["mismatched_keys"])
    if wrong:  # transformers would give them random values
        raise ValueError(
            f"cannot read the model in {str(folder)!r}: its weights do not fit its {storage.CONFIG}: {wrong[0]!r} and "
            f"{len(wrong) - 1} more are not in the file or have another shape"
        )
    if not config.architectures and found["unexpected_keys"]:  # a classifier would be opened without its head
        raise ValueError(
            f"cannot tell which model is in {str(folder)!r}: 'architectures' in {storage.CONFIG} names no class, and "
            f"{type(model).__name__} has no {min(found['unexpected_keys'])!r}; write the class's name there"
        )
    return model.eval()


def opened(folder: str | Path) -> Any:
    """The same, but of a `SentenceTransformer` the model of transformers inside it, which takes a batch of tensors."""
    (model,) = inner_models(load(folder))
    return model


def _holds_sentence_model(folder: Path) -> bool:
    """Whether `platon.save` wrote a `SentenceTransformer`: its model may be in a folder inside."""
    return (folder / MODULES).exists() and any(folder.glob(f"*/{storage.MANIFEST}"))


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide transformers' progress bars."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
