"""The model classes that a folder may name, and what has to be true of a model for a folder to describe it.

A manifest names a class of transformers and holds no code. What somebody else programmed, or put in place of one of the
model's modules, would be missing when the folder is loaded, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel


def model_class(name: Any) -> Any:
    """The model class of transformers with this name."""
    found = _exported(name)
    if found is None:
        raise ValueError(f"the manifest names the class {name!r}, which is no model of transformers")
    return found


def check_class(model: PreTrainedModel) -> None:
    """Refuse a model whose class its name does not stand for."""
    kind = type(model)
    if _exported(kind.__name__) is not kind:
        raise ValueError(
            f"{kind.__name__} of {kind.__module__} cannot be saved: `platon.load` builds the classes that transformers "
            "exports and runs no other code; save the model of transformers that is inside"
        )


def check_modules(model: PreTrainedModel, built: nn.Module, described: Collection[str]) -> None:
    """Refuse a model with other modules than the ones that are built from its configuration.

    Args:
        model: that is to be saved.
        built: what its class makes of its configuration.
        described: the names of modules that a manifest describes.
    """
    held = dict(model.named_modules())
    for name, wanted in built.named_modules():
        own, kind = _plain(held.get(name, wanted)), _plain(wanted)
        if own is not kind and name not in described and not _stands_for(own, kind):
            raise ValueError(
                f"{name!r} is a {own.__name__}, where transformers builds a {kind.__name__} from the configuration, so "
                "that `platon.load` would open another model; change the configuration instead"
            )


def _plain(module: nn.Module) -> type:
    """The class of a module, without the one that torch makes for each module with a parametrization."""
    return next(cls for cls in type(module).__mro__ if cls.__module__ != "torch.nn.utils.parametrize")


def _stands_for(own: type, kind: type) -> bool:
    """Whether a module of the first class is as good as one of the second, or becomes one when it runs."""
    # BigBird takes another attention at the first short text, and does so again when it is loaded.
    is_choice = own.__module__ == kind.__module__ and own.__module__.startswith("transformers.models.")
    return is_choice or own.__module__.startswith("platon.")


def _exported(name: Any) -> Any:
    """What transformers exports under a name, if it is a model that can be built."""
    found: Any = None
    if isinstance(name, str) and name.isidentifier():
        try:
            found = getattr(transformers, name, None)
        except Exception:  # transformers imports lazily, and some classes need packages that are not there
            found = None
    is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
    if not is_model or found.config_class is None or found.forward is nn.Module.forward:  # the last two: abstract ones
        return None
    return found
