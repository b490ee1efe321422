"""A model by its configuration alone: modules and shapes, without memory for the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig

from platon import deploy
from platon.engine.units import weights
from platon.lab.errors import UserError
from platon.lab.tasks.model import quiet
from platon.lab.tasks.model_error import sentence
from platon.lab.tasks.path import locate_model


def outline(name: str) -> nn.Module:
    """The model of a folder or hub name, with its parameters on the meta device; nothing but its config.json is read.

    A folder of `platon.save` is loaded with its weights, because no configuration describes the shapes of a compact
    model.
    """
    where = locate_model(name)
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            if (Path(where) / deploy.MANIFEST).is_file():
                return deploy.load(where)
            config = AutoConfig.from_pretrained(where)
            with init_empty_weights(include_buffers=False):
                return _class(config)(config).eval()
    except (OSError, ValueError, SafetensorError, HfHubHTTPError, ImportError) as error:
        raise UserError(sentence(where, "config", error)) from error


def _class(config: Any) -> Any:
    """The class that the configuration names, or the one without a head."""
    for named in config.architectures or ():
        found = getattr(transformers, named, None)
        if found is not None:
            return found
    return transformers.AutoModel.from_config


def kept_shares(folder: Path, model: nn.Module) -> dict[str, tuple[float, int]]:
    """Prunable matrix -> the share of its weights that are not zero, and how many it has.

    Matrices that the files of the folder do not hold under the names of the model are left out.

    Args:
        folder: of `save_pretrained`; where it is none, the result is empty.
        model: knows which matrices are prunable; `outline` gives it.
    """
    try:
        names = set(weights(model).matrices)
    except ValueError:  # no blocks
        return {}
    found: dict[str, tuple[float, int]] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(names & set(tensors.keys())):
                    tensor = tensors.get_tensor(name)
                    found[name] = int(tensor.count_nonzero()) / max(1, tensor.numel()), tensor.numel()
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read the weights in {str(folder)!r}: {error}") from error
    return found
