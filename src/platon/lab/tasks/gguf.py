"""GGUF checkpoints: one file with configuration, tokenizer and weights, as llama.cpp writes it.

transformers reads them where the package `gguf` is installed, and gives whole numbers back as floats; what is trained
and saved from then on is an ordinary model.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from platon.lab.errors import UserError

SUFFIX = ".gguf"


def find_gguf(name: str) -> tuple[str, dict[str, str]]:
    """The folder of a model, and the argument that makes transformers read a GGUF file in it; none for other models.

    `name` is such a file, or a folder that holds one and no config.json.
    """
    path = Path(name)
    if path.suffix.lower() == SUFFIX and path.is_file():
        found = [path]
    elif path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob(f"*{SUFFIX}"))
    else:
        return name, {}
    if not found:
        return name, {}
    if len(found) > 1:
        raise UserError(f"the folder {name!r} has {len(found)} GGUF files; name one of them: {found[0]}")
    if find_spec("gguf") is None:
        raise UserError(f"{found[0]} is a GGUF file, which needs a package to be read: pip install gguf")
    _check_start(found[0])
    return str(found[0].parent), {"gguf_file": found[0].name}


def _check_start(file: Path) -> None:
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file} is not a GGUF file: it does not start with GGUF")


def forget_quantisation(model: Any) -> Any:
    """The model as one that was never quantised: its weights are floats, but `save_pretrained` refuses it otherwise."""
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    for name in ("is_quantized", "quantization_method", "hf_quantizer"):
        if hasattr(model, name):
            delattr(model, name)
    return model
