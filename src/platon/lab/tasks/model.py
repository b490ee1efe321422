"""Models, tokenizers and image processors: whatever the Auto classes load, from the hub or from a folder."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import SafetensorError
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from platon.lab.errors import UserError, nearest
from platon.lab.tasks.source import first_line, silent_hub
from platon.lab.tasks.task import Request, Task

PAPER_MODELS = (
    "google-bert/bert-base-uncased",
    "microsoft/deberta-v3-base",
    "google/vit-base-patch16-224-in21k",
    "google/vit-base-patch16-224",
    "google/vit-base-patch16-384",
)

#: kind of task -> (the class that loads a model for it, the configurations that it takes)
KINDS: dict[str, tuple[Any, Mapping[Any, Any]]] = {
    "text-classification": (
        transformers.AutoModelForSequenceClassification,
        transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    ),
    "question-answering": (
        transformers.AutoModelForQuestionAnswering,
        transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    ),
    "image-classification": (
        transformers.AutoModelForImageClassification,
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    ),
}


class Pretrained:
    """The model that the user names, or the task's own choice."""

    def __init__(self, task: Task, request: Request, **config: Any) -> None:
        """Read the configuration, with these fields set, so that a wrong name is found before any work is done."""
        name = request.model or task.model
        if name is None:
            raise UserError(f"{task.name} needs a model; give a hub name or a folder with --model")
        self.name = _located(name)
        self.trust = request.trust_remote_code
        self.auto, known = KINDS[task.kind]
        with self._loading("config"):
            self.config = AutoConfig.from_pretrained(self.name, trust_remote_code=self.trust, **config)
        if type(self.config) not in known and not self.trust:
            kind = self.config.model_type
            loader = self.auto.__name__
            raise UserError(f"the model {name!r} is of type {kind!r}, which {loader} cannot load for {task.name}")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The fast tokenizer; one without a padding token pads with its end token."""
        with self._loading("tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(self.name, trust_remote_code=self.trust)
        if not tokenizer.is_fast:
            raise UserError(f"the tokenizer of {self.name!r} has no fast version; choose a model with a tokenizer.json")
        # Without any file, transformers makes a tokenizer that knows no word and calls every text unknown.
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise UserError(f"the model {self.name!r} has no tokenizer; save one beside it (tokenizer.json)")
        known = getattr(self.config, "vocab_size", None)
        if known is not None and len(tokenizer) > known:
            raise UserError(
                f"the tokenizer of {self.name!r} has {len(tokenizer)} tokens, but its model knows {known} only"
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
            self.config.pad_token_id = tokenizer.pad_token_id
        return tokenizer

    def processor(self, **changes: Any) -> Any:
        """The PIL version of the image processor, which needs no torchvision."""
        with self._loading("image processor"):
            return AutoImageProcessor.from_pretrained(self.name, backend="pil", trust_remote_code=self.trust, **changes)

    def build(self) -> PreTrainedModel:
        """The weights, with a new head where there is none of the right size.

        In float32 whatever the file holds (DeBERTaV3 comes in half precision): mixed precision is the trainer's choice.
        """
        with self._loading("weights"):
            model: PreTrainedModel = self.auto.from_pretrained(
                self.name,
                config=copy.deepcopy(self.config),
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                trust_remote_code=self.trust,
            )
        return model

    @contextmanager
    def _loading(self, what: str) -> Iterator[None]:
        try:
            with quiet():
                yield
        except (OSError, ValueError, SafetensorError, HfHubHTTPError, ImportError) as error:
            raise UserError(self._sentence(what, error)) from error

    def _sentence(self, what: str, error: Exception) -> str:
        causes = _causes(error)
        if any("trust_remote_code" in str(cause) for cause in causes):
            return f"the model {self.name!r} runs its own code; allow that with --trust-remote-code if you trust it"
        if what == "tokenizer" and any("sentencepiece" in str(c) or "tiktoken" in str(c) for c in causes):
            return f"the tokenizer of {self.name!r} cannot be read; it may need: pip install sentencepiece protobuf"
        if Path(self.name).is_dir():
            missing = what == "config" and not (Path(self.name) / "config.json").is_file()
            said = "there is no config.json" if missing else first_line(error)
            return f"cannot load the {what} of the model in the folder {self.name!r}: {said}"
        close = nearest(self.name, PAPER_MODELS) or nearest(self.name, (m.split("/")[1] for m in PAPER_MODELS))
        if _any(causes, GatedRepoError):
            return f"the model {self.name!r} is gated; accept its terms on the hub and run `hf auth login`"
        if _any(causes, RepositoryNotFoundError, HFValidationError):
            return f"{self.name!r} is neither a local folder nor a model on the hub{close}"
        if _any(causes, LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError):
            return (
                f"{self.name!r} is no local folder, and the hub cannot be reached; give a folder with --model DIR, "
                f"or fetch it where there is a network: `hf download {self.name} --local-dir DIR`{close}"
            )
        return f"cannot load the {what} of {self.name!r} from the hub: {first_line(error)}{close}"


def name_labels(names: tuple[str, ...] | None) -> dict[str, Any]:
    """The fields of a configuration that make a saved model say these labels; None is regression."""
    if names is None:
        return {"num_labels": 1, "problem_type": "regression", "id2label": {0: "score"}, "label2id": {"score": 0}}
    return {
        "num_labels": len(names),
        "problem_type": "single_label_classification",
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }


def _located(name: str) -> str:
    """The name, once it is clear that it is a folder that exists or can be a name on the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or path.is_file()
    if looks_like_path or (path.parent != Path() and path.parent.is_dir()):
        if path.is_file():
            raise UserError(f"the model {name!r} is a file; give the folder that holds config.json and the weights")
        known = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise UserError(f"the model folder {name!r} does not exist{nearest(path.name, known)}")
    return name


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _any(causes: list[BaseException], *kinds: type[BaseException]) -> bool:
    return any(isinstance(cause, kinds) for cause in causes)


@contextmanager
def quiet() -> Iterator[None]:
    """Only errors from transformers: that a head is new is expected.

    Its progress bars go too. It switches those of the hub's client with its own; downloads keep theirs.
    """
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    if bars:
        transformers_logging.disable_progress_bar()
        enable_progress_bars()
    try:
        with silent_hub():
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
