"""How token states become one embedding: pooling and normalisation, and the files of sentence-transformers for both.

A sentence-transformers folder is a transformers folder with `modules.json`, which lists the steps after the encoder,
and a folder with a `config.json` for each step. The files that are written here are read by every version of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

from platon.lab.errors import UserError

#: name of a mode -> its switch in the files of sentence-transformers before version 5; in the order of concatenation
MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@dataclass(frozen=True)
class Pooling:
    """Token states to embeddings.

    modes: one or several; the vectors of several are concatenated.
    normalised: whether embeddings have length 1.
    """

    modes: tuple[str, ...] = ("mean",)
    normalised: bool = False

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """The embeddings of rows × tokens × width states; `mask` is 0 where a token is padding."""
        found = torch.cat([_pooled(mode, states, mask.to(states.dtype)) for mode in self.modes], dim=-1)
        return torch.nn.functional.normalize(found, dim=-1) if self.normalised else found


def _pooled(mode: str, states: Tensor, mask: Tensor) -> Tensor:
    rows, inside = torch.arange(len(states), device=states.device), mask.unsqueeze(-1)
    match mode:
        case "cls":
            return states[rows, mask.argmax(1)]
        case "lasttoken":
            return states[rows, mask.shape[1] - 1 - mask.flip(1).argmax(1)]
        case "max":
            return states.masked_fill(inside == 0, -torch.inf).amax(1)
        case "weightedmean":
            inside = inside * mask.cumsum(1).unsqueeze(-1)  # a token weighs as much as its position, from 1
    total = (states * inside).sum(1)
    count = inside.sum(1).clamp_min(1e-9)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


@dataclass(frozen=True)
class SentenceFormat:
    """What a sentence-transformers folder says beside the encoder.

    encoder: the folder or hub name with the encoder's own files.
    max_length: the longest text in tokens; `None` where it does not say.
    lower: whether texts are lowered before they are tokenised.
    prompt: what `SentenceTransformer.encode` puts before every text by default.
    other: contents of config_sentence_transformers.json, which are kept as they are.
    """

    encoder: str
    pooling: Pooling = Pooling()
    max_length: int | None = None
    lower: bool = False
    prompt: str = ""
    other: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path, width: int, max_length: int) -> None:
        """Write the files that make `SentenceTransformer(folder)` embed as the encoder was trained to."""
        steps = ["Transformer", "Pooling", *(["Normalize"] if self.pooling.normalised else [])]
        paths = ["", "1_Pooling", "2_Normalize"]
        modules = [
            {"idx": number, "name": str(number), "path": paths[number], "type": f"sentence_transformers.models.{step}"}
            for number, step in enumerate(steps)
        ]
        pooling: dict[str, Any] = {"word_embedding_dimension": width}
        pooling |= {key: mode in self.pooling.modes for mode, key in MODES.items()}
        if list(self.pooling.modes) != [mode for mode in MODES if mode in self.pooling.modes]:
            # The switches cannot say this order; versions that allow it read it so.
            pooling = {"embedding_dimension": width, "pooling_mode": list(self.pooling.modes)}
        files: dict[str, Any] = {
            "1_Pooling/config.json": pooling,
            "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": self.lower},
            "config_sentence_transformers.json": dict(self.other) or None,
            "modules.json": modules,
        }
        for name, content in files.items():
            if content is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_format(name: str) -> SentenceFormat:
    """What the folder or hub repository `name` says; the mean of the tokens where it has no modules.json.

    The mean, not normalised, is what sentence-transformers itself makes of such a folder.
    """
    modules = _read(name, "modules.json")
    if modules is None:
        return SentenceFormat(name)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise UserError(f"modules.json of {name!r} must be a list of modules; copy or download the model again")
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"the model {name!r} is made of {', '.join(kinds)}; platon knows an encoder (Transformer), Pooling and "
            "Normalize, in this order"
        )
    first, second = (str(one.get("path", "")) for one in modules[:2])
    encoder = name if not first else f"{name}/{first}"
    sentence = _read(name, f"{first}/sentence_bert_config.json".lstrip("/")) or {}
    other = _read(name, "config_sentence_transformers.json") or {}
    return SentenceFormat(
        encoder,
        Pooling(_modes(name, _read(name, f"{second}/config.json") or {}), len(kinds) == 3),
        sentence.get("max_seq_length"),
        bool(sentence.get("do_lower_case")),
        (other.get("prompts") or {}).get(other.get("default_prompt_name"), ""),
        other,
    )


def _modes(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    said = config.get("pooling_mode")
    if said is None:
        switches = [key for key, on in config.items() if key.startswith("pooling_mode_") and on]
        unknown = [key for key in switches if key not in MODES.values()]
        modes = unknown or [mode for mode, key in MODES.items() if key in switches] or ["mean"]
    else:
        modes = [said] if isinstance(said, str) else list(said)
    for mode in modes:
        if mode not in MODES:
            raise UserError(
                f"the model {name!r} pools by {mode!r}, which platon does not know; known: {', '.join(MODES)}"
            )
    return tuple(modes)


def _read(name: str, file: str) -> Any:
    """A JSON file of a folder or hub repository; `None` where there is none."""
    try:
        path = cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError:
        return None  # a name that is neither; loading the encoder says so
    except ValueError as error:
        raise UserError(f"{file} of {name!r} is not JSON: {error}") from error
