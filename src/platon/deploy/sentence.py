"""Folders of a `SentenceTransformer`: the model inside as `platon.save` writes it, the rest as their package does."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from platon.deploy.manifest import MANIFEST

MODULES = "modules.json"  # the file by which sentence-transformers knows a folder of its own
_OWN = "sentence_transformers."  # classes of others would be code that comes with the folder


def is_one(model: nn.Module) -> bool:
    """Whether this is a `SentenceTransformer`; the package is imported only if something else has imported it."""
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(model).__mro__}
    return "sentence_transformers.SentenceTransformer" in kinds


def inner_models(model: nn.Module) -> list[PreTrainedModel]:
    """The models of transformers in a module, without those that are parts of another; the module itself, if it is."""
    if isinstance(model, PreTrainedModel):
        return [model]
    held = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    parts = {id(part) for one in held for part in one.modules() if part is not one}
    return [one for one in held if id(one) not in parts]


def save(model: Any, folder: Path, write: Callable[[PreTrainedModel, Path], None]) -> None:
    """Write it to a new folder; `write` writes a model of transformers to a folder."""
    inner = inner_models(model)
    if len(inner) != 1:
        raise ValueError(f"the SentenceTransformer holds {len(inner)} models of transformers, one can be saved")
    own = inner[0].__dict__.get("save_pretrained")
    inner[0].__dict__["save_pretrained"] = lambda place, **options: write(inner[0], Path(place))
    try:
        with _quiet():
            model.save_pretrained(str(folder), create_model_card=False)
    finally:
        del inner[0].__dict__["save_pretrained"]
        if own is not None:
            inner[0].__dict__["save_pretrained"] = own


def load(folder: Path, read: Callable[[Path], PreTrainedModel]) -> Any:
    """What `save` wrote; `read` reads a model of transformers from a folder.

    Raises:
        ValueError: the package is not installed, or the folder is damaged.
    """
    if find_spec("sentence_transformers") is None:
        raise ValueError(f"{str(folder)!r} holds a SentenceTransformer: pip install sentence-transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    class PackedTransformer(Transformer):
        """Reads its model from a folder that `platon.save` wrote, instead of by `from_pretrained`."""

        def _load_model(self, model_name_or_path: str, *args: Any, **options: Any) -> PreTrainedModel:
            return read(Path(model_name_or_path))

    _check_modules(folder)
    reference = f"{Transformer.__module__}.{Transformer.__name__}"
    try:
        with _quiet():
            model: Any = SentenceTransformer._load_with_module_classes(
                str(folder), {reference: PackedTransformer}, device="cpu", local_files_only=True
            )
    except ValueError:
        raise
    except Exception as error:  # a damaged configuration of one of its modules
        raise ValueError(f"cannot read {str(folder)!r}: {' '.join(str(error).split())[:200]}") from error
    for module in model.modules():
        if type(module) is PackedTransformer:
            module.__class__ = Transformer  # so that it is saved under the name of its package
    return model.eval()


def _check_modules(folder: Path) -> None:
    try:
        listed = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        kinds = [(str(one["type"]), str(one["path"])) for one in listed]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{str(folder / MODULES)!r} is damaged: {str(error)[:100]}") from None
    for kind, path in kinds:
        if not kind.startswith(_OWN) or not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{str(folder / MODULES)!r} names {kind!r} in {path!r}, which is not opened")
    if not any((folder / path / MANIFEST).exists() for _, path in kinds):
        raise ValueError(f"{str(folder)!r} holds no saved model: there is no {MANIFEST} in it")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what sentence-transformers says about folders that it did not write itself."""
    logger = logging.getLogger("sentence_transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
