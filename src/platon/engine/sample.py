"""Small random inputs for a model, built from what its forward pass asks for, and what its blocks then get."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.replica import Unfit

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

ROWS = 3  # odd: tables of relative positions have an even number of rows and are told from activations by it
LENGTHS = (5, 8)


def sources(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that can be run by themselves, by name: models of transformers, the outermost first, or the model.

    A wrapper around such a model (a sentence encoder, a user's module) has inputs of its own, which nobody knows.
    """
    found = [(name, module) for name, module in model.named_modules() if _is_pretrained(module)]
    yield from found
    if not found:
        yield "", model


def attempts(model: nn.Module, length: int) -> Iterator[Arguments]:
    """Arguments for the forward pass, one guess after another."""
    random = torch.Generator().manual_seed(length)
    if _is_pretrained(model):
        known = _builders(model, length, random)
        asked = inspect.signature(model.forward).parameters
        main = getattr(model, "main_input_name", "input_ids")
        needed = [name for name, one in asked.items() if one.default is inspect.Parameter.empty and name in known]
        few = [main, *needed, *(["decoder_input_ids"] if _config(model, "is_encoder_decoder") else [])]
        few += ["encoder_hidden_states"] if _config(model, "add_cross_attention") else []
        still: dict[str, Any] = {"use_cache": False} if "use_cache" in asked or _config(model, "use_cache") else {}
        masked = ["attention_mask"] if length == LENGTHS[1] else []
        for names in ([*few, *masked], few, [name for name in asked if name in known and name != "inputs_embeds"]):
            chosen = {name: known[name]() for name in dict.fromkeys(names) if name in known and name in asked}
            for settings in ({**still, "return_dict": True}, still, {}):
                yield (), {**chosen, **settings}
        return
    yield from _guesses(model, length, random)


def _is_pretrained(module: Any) -> bool:
    return hasattr(module, "config") and hasattr(module, "main_input_name") and hasattr(module, "get_input_embeddings")


def _config(model: Any, *names: str) -> Any:
    """The first of these that the configuration, or one inside it, has."""
    config = getattr(model, "config", None)
    inner = [getattr(config, name, None) for name in ("text_config", "vision_config", "audio_config", "encoder", "decoder")]
    for one in (config, *inner):
        for name in names:
            if getattr(one, name, None) is not None:
                return getattr(one, name)
    return None


def _builders(model: Any, length: int, random: torch.Generator) -> dict[str, Callable[[], Tensor]]:
    def tokens(size: int = length) -> Tensor:
        words = _config(model, "vocab_size")
        try:
            words = min(words or 1 << 30, model.get_input_embeddings().num_embeddings)
        except (AttributeError, NotImplementedError):
            pass
        high = min(words or 50, 90) if isinstance(words, int) else 50
        found = torch.randint(min(4, high - 1), high, (ROWS, size), generator=random)
        end = _config(model, "eos_token_id")
        if isinstance(end, int) and 0 <= end < high and not _config(model, "is_encoder_decoder"):
            found[:, -1] = end  # some pool at the end of the text
        elif isinstance(end, int) and _config(model, "is_encoder_decoder") and 0 <= end < high:
            found[:, -1] = end
        return found

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def images() -> Tensor:
        size = _config(model, "image_size", "img_size", "input_size") or 32
        height, width = (size, size) if isinstance(size, int) else (list(size.values()) if isinstance(size, dict) else size)[-2:]
        return floats(_rows(height, width), _config(model, "num_channels", "in_channels", "in_chans", "num_image_channels") or 3, height, width)

    def _rows(height: int, width: int) -> int:
        return ROWS if height * width <= 128 * 128 else 1

    def mask() -> Tensor:
        found = torch.ones(ROWS, length, dtype=torch.int64)
        found[-1, length - 2 :] = 0
        return found

    def features() -> Tensor:
        bins = _config(model, "num_mel_bins", "input_feat_per_channel", "feature_size") or 80
        frames = 2 * (_config(model, "max_source_positions") or 32)
        if getattr(model, "main_input_name", "") == "input_features" and _config(model, "model_type") in (None,):
            frames = 64
        return floats(1, bins, min(frames, 3000)) if _config(model, "max_source_positions") else floats(ROWS, 64, bins)

    def boxes() -> Tensor:
        corner = torch.randint(0, 20, (ROWS, length, 2), generator=random)
        return torch.cat([corner, corner + 20], -1)

    return {
        "input_ids": tokens,
        "decoder_input_ids": lambda: tokens(max(3, length - 1)),
        "attention_mask": mask,
        "pixel_values": images,
        "input_features": features,
        "input_values": lambda: floats(ROWS, 2000) if not _config(model, "num_mel_bins") else floats(ROWS, _config(model, "max_length") or 64, _config(model, "num_mel_bins")),
        "bbox": boxes,
        "inputs_embeds": lambda: floats(ROWS, length, _config(model, "hidden_size", "d_model")),
        "hidden_states": lambda: floats(ROWS, length, _config(model, "hidden_size", "d_model")),
        "encoder_hidden_states": lambda: floats(ROWS, length, _config(model, "hidden_size", "d_model")),
    }


def _guesses(model: nn.Module, length: int, random: torch.Generator) -> Iterator[Arguments]:
    """For a model that was written by hand: token numbers, vectors or images, by its first layer with weights."""
    first = next((m for m in model.modules() if isinstance(m, nn.Embedding | nn.Linear | nn.Conv2d | nn.MultiheadAttention)), None)
    if isinstance(first, nn.Embedding):
        sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        tokens = torch.randint(0, min(90, *sizes) if len(sizes) > 1 and min(sizes) > length else first.num_embeddings, (ROWS, length), generator=random)
        yield (tokens,), {}
        yield (tokens, tokens.flip(0)), {}
    elif isinstance(first, nn.Conv2d):
        for size in (32, 64, 224):
            yield (torch.randn(1, first.in_channels, size, size, generator=random, dtype=torch.float64),), {}
    width = first.in_features if isinstance(first, nn.Linear) else getattr(first, "embed_dim", 0)
    if width:
        vectors = torch.randn(ROWS, length, width, generator=random, dtype=torch.float64)
        yield (vectors,), {}
        yield (vectors, vectors.flip(0)), {}
        yield (vectors[:, 0],), {}


def run(model: nn.Module, length: int, record: Callable[[], None] = lambda: None) -> Any:
    """A forward pass on the first arguments that the model takes; `record` is called before each attempt."""
    said = "its forward pass asks for inputs of an unknown kind"
    for args, kwargs in attempts(model, length):
        record()
        try:
            return model(*args, **kwargs)
        except Exception as error:  # whatever a model says to inputs that it does not take
            said = f"its forward pass failed on small random inputs ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    raise Unfit(said)


@dataclass
class Call:
    """One call of a block in a pass through its model.

    Args:
        arguments: clones, without gradients.
        passed: which of the tensors that it gives another block gets; the first of them is the hidden state.
    """

    arguments: Arguments
    passed: set[int] = field(default_factory=set)


def record_blocks(model: nn.Module, blocks: dict[str, nn.Module], length: int) -> dict[str, list[Call]]:
    """The calls of each block in one forward pass of the model."""
    seen: dict[str, list[Call]] = {}
    given: dict[int, tuple[Tensor, Call, int]] = {}

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for tensor in tensors_in((args, kwargs)):
                if id(tensor) in given:
                    _, call, place = given[id(tensor)]
                    call.passed.add(place)
            seen.setdefault(name, []).append(Call((cloned(args), cloned(kwargs))))

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for place, tensor in enumerate(tensors_in(output)):
                given.setdefault(id(tensor), (tensor, seen[name][-1], place))

        return hook

    handles = [block.register_forward_pre_hook(enter(name), with_kwargs=True) for name, block in blocks.items()]
    handles += [block.register_forward_hook(leave(name)) for name, block in blocks.items()]
    try:
        run(model, length, seen.clear)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def cloned(value: Any) -> Any:
    """The same structure with copies of its tensors."""
    return mapped(value, lambda tensor: tensor.detach().clone())


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure with changed tensors; what is no tuple, list or dict of tensors is shared."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(one, change) for one in value)
    if type(value) is dict:
        return {key: mapped(one, change) for key, one in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists, dicts and model outputs, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
