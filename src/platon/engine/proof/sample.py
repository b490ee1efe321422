"""Small random inputs for a model, built from what its forward pass asks for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.proof.replica import UnfitError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """How large an input is.

    Args:
        rows: in the batch.
        length: tokens.
        masked: the last row ends in padding, and a mask says so.
    """

    rows: int
    length: int
    masked: bool = False


# Modules may branch on any of these: one row, one token, more tokens, a mask. The rows of the first case are odd:
# tables of relative positions have an even number of rows and are told from activations by it.
CASES = (Case(3, 5), Case(3, 8, masked=True), Case(1, 40), Case(2, 1))
_MOST_NUMBERS = 1 << 22
_SIDE = 4  # patches in a row of an image


def sources(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that can be run by themselves, by name: models of transformers, the outermost first, or the model.

    A wrapper around such a model (a sentence encoder, a user's module) has inputs of its own, which nobody knows.
    """
    found = [(name, module) for name, module in model.named_modules() if _is_pretrained(module)]
    yield from found
    if not found:
        yield "", model


def attempts(model: nn.Module, case: Case) -> Iterator[Arguments]:
    """Arguments for the forward pass, one guess after another; they depend on the case alone."""
    if not _is_pretrained(model):
        yield from _guesses(model, case)
        return
    kinds = _Kinds(model, case)
    asked = kinds.asked
    main = getattr(model, "main_input_name", "input_ids")
    few = [main, *(name for name, one in asked.items() if one.default is inspect.Parameter.empty)]
    few += ["decoder_input_ids"] if kinds.number("is_encoder_decoder") else []
    few += ["encoder_hidden_states"] if kinds.number("add_cross_attention") else []
    masked = [*few, "attention_mask"] if case.masked else few
    every = [name for name in asked if name != "inputs_embeds"]
    still: dict[str, Any] = (
        {"use_cache": False} if "use_cache" in asked or kinds.number("use_cache") is not None else {}
    )
    for names in dict.fromkeys((tuple(masked), tuple(few), tuple(every))):
        for settings in (still, {}) if still else ({},):
            made = {name: kinds.build(name) for name in dict.fromkeys(names) if name in asked}
            yield (), {name: value for name, value in made.items() if value is not None} | settings


def _is_pretrained(module: Any) -> bool:
    return hasattr(module, "config") and hasattr(module, "main_input_name") and hasattr(module, "get_input_embeddings")


class _Kinds:
    """Builds arguments of models of transformers by their names."""

    def __init__(self, model: Any, case: Case) -> None:
        self.model, self.length = model, case.length
        self.asked = inspect.signature(model.forward).parameters
        self.random = torch.Generator().manual_seed(case.length)
        config = getattr(model, "config", None)
        inner = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "backbone_config")
        self.configurations = [config, *(getattr(config, name, None) for name in inner)]
        size = self.number("image_size", "img_size", "input_size") or 32
        size = list(size.values()) if isinstance(size, dict) else size
        self.image = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        self.frames = min(2 * (self.number("max_source_positions") or 32), 3000)
        large = {"pixel_values": math.prod(self.image) > 128**2, "input_features": self.frames > 256}
        self.rows = 1 if large.get(getattr(model, "main_input_name", ""), False) else case.rows

    def number(self, *names: str) -> Any:
        """The first of these that the configuration, or one inside it, has."""
        for one in self.configurations:
            for name in names:
                if getattr(one, name, None) is not None:
                    return getattr(one, name)
        return None

    def build(self, name: str) -> Tensor | None:
        """An argument of this name; `None`: it is not known, or the configuration does not say how large it is."""
        try:
            found: Tensor = getattr(self, f"_{name}")()
        except (AttributeError, RuntimeError, TypeError):  # the configuration may hold anything as a size, or nothing
            return None
        return found

    def _floats(self, *shape: int) -> Tensor:
        if math.prod(shape) > _MOST_NUMBERS:
            raise UnfitError(f"its configuration asks for an input of {' × '.join(map(str, shape))} numbers")
        return torch.randn(*shape, generator=self.random, dtype=torch.float64)

    def _tokens(self, length: int) -> Tensor:
        words = self.number("vocab_size")
        with suppress(AttributeError, NotImplementedError, TypeError):
            words = min(words or 1 << 30, self.model.get_input_embeddings().num_embeddings)
        high = min(words, 90) if isinstance(words, int) else 50
        found = torch.randint(min(4, high - 1), high, (self.rows, length), generator=self.random)
        end = self.number("eos_token_id")
        if isinstance(end, int) and 0 <= end < high:
            found[:, -1] = end  # some models pool what is at the end of the text
        return found

    def _input_ids(self) -> Tensor:
        return self._tokens(self.length)

    _qformer_input_ids = _input_ids

    def _decoder_input_ids(self) -> Tensor:
        return self._tokens(self.length - 1 or 1)

    def _attention_mask(self) -> Tensor:
        found = torch.ones(self.rows, self.length, dtype=torch.int64)
        found[-1, self.length - 2 :] = 0
        return found

    def _pixel_values(self) -> Tensor:
        if "grid_thw" in self.asked:
            return self._patches().flatten(0, 1)
        if "spatial_shapes" in self.asked:
            return self._patches()
        frames = [self.number("num_frames", "frames_per_clip")] if self.number("tubelet_size") else []  # a video
        return self._floats(self.rows, *frames, self._channels(), *self.image)

    _pixel_values_videos = _pixel_values

    def _channels(self) -> int:
        return int(self.number("num_channels", "in_channels", "in_chans", "num_image_channels") or 3)

    def _patches(self) -> Tensor:
        """Images that are cut into patches beforehand: of each, a square of `_SIDE` by `_SIDE`."""
        size = self.number("patch_size") ** 2 * (self.number("temporal_patch_size") or 1) * self._channels()
        return self._floats(self.rows, _SIDE**2, size)

    def _grid_thw(self) -> Tensor:
        return torch.tensor([[1, _SIDE, _SIDE]] * self.rows)

    def _spatial_shapes(self) -> Tensor:
        return torch.tensor([[_SIDE, _SIDE]] * self.rows)

    def _pixel_attention_mask(self) -> Tensor:
        return torch.ones(self.rows, _SIDE**2, dtype=torch.int64)

    def _input_features(self) -> Tensor:
        bins = (
            self.number("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim") or 80
        )
        framed = self.number("conv_kernel_sizes", "feature_projection_input_dim")
        if self.number("max_source_positions") and not framed:
            return self._floats(self.rows, bins, self.frames)
        return self._floats(self.rows, 64, bins)

    def _input_values(self) -> Tensor:
        bins = self.number("num_mel_bins")
        return self._floats(self.rows, self.number("max_length") or 64, bins) if bins else self._floats(self.rows, 2000)

    def _bbox(self) -> Tensor:
        corner = torch.randint(0, 20, (self.rows, self.length, 2), generator=self.random)
        return torch.cat([corner, corner + 20], -1)

    def _hidden_states(self) -> Tensor:
        if "grid_thw" in self.asked:
            return self._patches().flatten(0, 1)
        return self._floats(self.rows, self.length, self.number("hidden_size", "d_model"))

    _inputs_embeds = _encoder_hidden_states = _hidden_states


def _guesses(model: nn.Module, case: Case) -> Iterator[Arguments]:
    """For a model that was written by hand: token numbers, vectors or images, by its first layer with weights."""
    for args, length in _first_arguments(model, case):
        if case.masked:
            for mask in _masks(case.rows, length):
                named = {name: mask for name in inspect.signature(model.forward).parameters if "mask" in name}
                yield from [(args, named)] if named else []
        yield args, {}


def _first_arguments(model: nn.Module, case: Case) -> Iterator[tuple[tuple[Tensor, ...], int]]:
    """Positional arguments, and the length of what is attended to."""
    rows, length = case.rows, case.length
    random = torch.Generator().manual_seed(length)
    kinds = (nn.Embedding, nn.Linear, nn.Conv2d, nn.MultiheadAttention)
    first: Any = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if isinstance(first, nn.Embedding):
        words = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        for high in dict.fromkeys((first.num_embeddings, min(words))):
            tokens = torch.randint(0, high, (rows, length), generator=random)
            yield (tokens,), length
            yield (tokens, tokens.flip(1)), length
    elif isinstance(first, nn.Conv2d):
        for size in (32, 64, 224):
            images = torch.randn(1, first.in_channels, size, size, generator=random, dtype=torch.float64)
            yield (images,), 0
    width = first.in_features if isinstance(first, nn.Linear) else getattr(first, "embed_dim", 0)
    if width:
        vectors = torch.randn(rows, length, width, generator=random, dtype=torch.float64)
        yield (vectors,), length
        yield (vectors, vectors.flip(1)), length
        yield (vectors[:, 0],), length


def _masks(rows: int, length: int) -> Iterator[Tensor]:
    """Of padding, or causal; True is seen."""
    padding = torch.ones(rows, length, dtype=torch.bool)
    padding[-1, length - 2 :] = False
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    yield from (padding, padding[:, None, None], causal, causal[None, None])
