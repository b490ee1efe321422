"""Models, tokenizers and image processors: those that transformers' Auto classes load, and models saved by platon."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import SafetensorError
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from platon import deploy
from platon.lab.errors import UserError, first_line
from platon.lab.tasks.dataset import silent_hub
from platon.lab.tasks.gguf import find_gguf, forget_quantisation
from platon.lab.tasks.model_error import refuse_pickles, sentence
from platon.lab.tasks.path import locate_model
from platon.lab.tasks.task import Request, Task

#: kind of task -> (the class that loads a model for it, configuration class -> model class)
KINDS: dict[str, tuple[Any, Mapping[Any, Any]]] = {
    "text-classification": (
        transformers.AutoModelForSequenceClassification,
        transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    ),
    "token-classification": (
        transformers.AutoModelForTokenClassification,
        transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    ),
    "question-answering": (
        transformers.AutoModelForQuestionAnswering,
        transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    ),
    "image-classification": (
        transformers.AutoModelForImageClassification,
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    ),
    "text-generation": (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    "sentence-similarity": (transformers.AutoModel, transformers.MODEL_MAPPING),
}


class Pretrained:
    """The model that the user names, or the task's default.

    notes: what the user should know of the model that `build` made last.
    """

    def __init__(self, task: Task, request: Request, **config: Any) -> None:
        """Read the configuration, with these fields set, so that a wrong name is found before any work is done."""
        name = request.model or task.model
        if name is None:
            raise UserError(f"{task.name} needs a model; give a hub name or a folder with --model")
        self.name, self.notes = locate_model(name), list[str]()
        self.folder, self.file = find_gguf(self.name)
        self.trust = request.trust_remote_code
        self.auto, self.classes = KINDS[task.kind]
        with self._loading("config"):
            self.config = AutoConfig.from_pretrained(self.folder, trust_remote_code=self.trust, **self.file, **config)
        if type(self.config) not in self.classes and not self.trust:
            kind = self.config.model_type
            loader = self.auto.__name__
            raise UserError(f"the model {name!r} is of type {kind!r}, which {loader} cannot load for {task.name}")

    def labels(self) -> tuple[str, ...] | None:
        """The names of the model's classes in their order; None for regression."""
        # One class alone would have probability 1 always: a single output is a number.
        if getattr(self.config, "problem_type", None) == "regression" or self.config.num_labels == 1:
            return None
        return tuple(self.config.id2label[number] for number in range(self.config.num_labels))

    def tokenizer(self, **changes: Any) -> PreTrainedTokenizerBase:
        """The fast tokenizer, with these settings changed; one without a padding token pads with its end token."""
        with self._loading("tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust, **self.file, **changes)
        if not tokenizer.is_fast:
            raise UserError(f"the tokenizer of {self.name!r} has no fast version; choose a model with a tokenizer.json")
        # Without any file, transformers makes a tokenizer of special tokens only, which maps every word to "unknown".
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
        """The model with its weights, and with a new head where there is none of the right size.

        In float32 whatever the file holds (DeBERTaV3 comes in half precision): the trainer chooses mixed precision.
        """
        self.notes.clear()
        if (Path(self.name) / deploy.MANIFEST).is_file():
            return self._load_saved()
        refuse_pickles(self.name)
        with self._loading("weights"):
            model, found = self.auto.from_pretrained(
                self.folder,
                config=copy.deepcopy(self.config),
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=self.trust,
                **self.file,
            )
        self._check_loaded(model, found)
        return forget_quantisation(model) if self.file else model

    def _check_loaded(self, model: PreTrainedModel, found: Mapping[str, Collection[Any]]) -> None:
        """Only the head may start from random values in silence; it may have another shape, which is noted."""
        body = f"{model.base_model_prefix}."
        wrong = {name: (tuple(theirs), tuple(ours)) for name, theirs, ours in sorted(found["mismatched_keys"])}
        for name, (theirs, ours) in wrong.items():
            if name.startswith(body):
                raise UserError(
                    f"the weights in {self.name!r} do not fit its config.json: {name!r} is {list(theirs)} in the file "
                    f"and {list(ours)} by the configuration"
                )
        if wrong:
            self._note_new_head(wrong)
        missing = sorted(name for name in found["missing_keys"] if name.startswith(body))
        if len(missing) > len([name for name, _ in model.named_parameters() if name.startswith(body)]) / 2:
            raise UserError(
                f"the weights in {self.name!r} are not those of a {type(model).__name__}: {missing[0]!r} and "
                f"{len(missing) - 1} more are not in the file"
            )
        if missing:
            self.notes.append(
                f"not in the weights of {self.name}, so they start from random values: {', '.join(missing)}"
            )

    def _load_saved(self) -> PreTrainedModel:
        """A folder of `platon.save`: sparse, or compact with matrices smaller than the configuration says."""
        with self._loading("weights"):
            model: Any = deploy.load(self.name)
        for parameter in model.parameters():  # not the buffers, in which sparse layers keep their values as saved
            parameter.data = parameter.data.float() if parameter.is_floating_point() else parameter.data
        wanted = self.classes[type(self.config)]
        if not isinstance(model, wanted):
            raise UserError(
                f"the model in the folder {self.name!r} is a {type(model).__name__}, and this task needs a "
                f"{wanted.__name__}; give a folder of save_pretrained (a run's model/) instead"
            )
        names = self._resized_head(model)
        if names:
            self._note_new_head(names)
        for field in ("id2label", "label2id", "problem_type"):
            setattr(model.config, field, copy.deepcopy(getattr(self.config, field)))
        model.num_labels = self.config.num_labels
        return model

    def _resized_head(self, model: Any) -> list[str]:
        """Replace the layers whose size follows the number of labels, where that differs; returns their parameters."""
        if model.config.num_labels == self.config.num_labels:
            return []
        with torch.device("meta"):
            old, new = (type(model)(copy.deepcopy(config)) for config in (model.config, self.config))
        shapes = {name: parameter.shape for name, parameter in old.named_parameters()}
        names = [name for name, parameter in new.named_parameters() if parameter.shape != shapes[name]]
        for path in {name.rpartition(".")[0] for name in names}:
            layer = model.get_submodule(path)
            if not isinstance(layer, torch.nn.Linear):
                raise UserError(f"the head of {self.name!r} is a {type(layer).__name__}, which cannot be resized")
            head = torch.nn.Linear(layer.in_features, self.config.num_labels, layer.bias is not None)
            model._init_weights(head)
            model.set_submodule(path, head)
        return names

    def _note_new_head(self, names: Collection[str]) -> None:
        self.notes.append(
            f"the head of {self.name} has another size than {self.config.num_labels} labels need; a new one starts "
            f"from random values: {', '.join(names)}"
        )

    @contextmanager
    def _loading(self, what: str) -> Iterator[None]:
        try:
            with quiet():
                yield
        except (OSError, ValueError, SafetensorError, HfHubHTTPError, ImportError) as error:
            raise UserError(sentence(self.name, what, error)) from error
        except Exception as error:
            if not self.file:  # whatever is wrong in a GGUF file, its readers raise what they run into
                raise
            raise UserError(f"cannot load the {what} of {self.name!r}: {first_line(error)}") from error


def saved_processor(folder: Path) -> Any:
    """The tokenizer or image processor that was saved with a model, or None."""
    with quiet():
        if (folder / "preprocessor_config.json").is_file():
            return AutoImageProcessor.from_pretrained(folder, backend="pil")
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            return AutoTokenizer.from_pretrained(folder)
    return None


def name_labels(names: tuple[str, ...] | None) -> dict[str, Any]:
    """The fields of a configuration that name a model's classes; None is regression."""
    if names is None:
        return {"num_labels": 1, "problem_type": "regression", "id2label": {0: "score"}, "label2id": {"score": 0}}
    return {
        "num_labels": len(names),
        "problem_type": "single_label_classification",
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Show only errors of transformers, and none of its progress bars except those of downloads.

    transformers switches the bars of the hub's client together with its own, so these are switched on again.
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
