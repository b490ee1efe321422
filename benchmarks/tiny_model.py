"""A small model of any model type of the installed transformers, with random numbers everywhere.

Nobody knows what sizes a configuration needs to fit together, so several ways to make it small are tried, one after
another, until a model comes out that runs:

- the usual names of sizes get the same small numbers everywhere;
- every width is divided by the same number, which keeps most relations between widths, and layers become few.
"""

import contextlib
import importlib
import pkgutil
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from platon.engine.proof.call import mapped, tensors_in
from platon.engine.proof.sample import Case, attempts

_SIZES = {
    32: """hidden_size d_model n_embd dim embed_dim encoder_embed_dim decoder_embed_dim emb_dim model_dim
        decoder_hidden_size encoder_hidden_size embedding_size d_embed projection_dim out_hidden_size text_embed_dim
        fusion_hidden_size hidden_dim_size vision_embed_dim word_embed_proj_dim encoder_hidden_dim code_dim
        cross_attention_hidden_size bottleneck_size true_hidden_size intra_bottleneck_size image_size img_size""",
    4: """num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads attention_heads
        num_local_experts n_routed_experts num_experts encoder_num_attention_heads decoder_num_attention_heads nhead
        encoder_num_heads decoder_num_heads num_cross_attention_heads num_query_heads heads n_group moe_num_experts
        num_conv_pos_embedding_groups coordinate_size num_frames frames_per_clip""",
    2: """num_key_value_heads num_hidden_layers n_layer n_layers encoder_layers decoder_layers num_layers depth layers
        num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_encoder_layers num_blocks
        num_experts_per_tok num_kv_heads multi_query_group_num topk_group n_shared_experts top_k encoder_depth
        encoder_num_key_value_heads decoder_num_key_value_heads decoder_depth moe_topk moe_k window_size
        num_feedforward_networks num_feat_extract_layers""",
    44: """intermediate_size n_inner ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim moe_intermediate_size
        encoder_intermediate_size decoder_intermediate_size ffn_hidden_size mlp_dim dim_feedforward ff_dim d_inner
        shared_expert_intermediate_size intermediate_dim feed_forward_size encoder_feedforward_dim""",
    8: """head_dim d_kv d_head kv_channels attention_head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim
        patch_size kv_lora_rank swa_head_dim shape_size""",
    12: "q_lora_rank",
    120: """vocab_size vocab_size_or_config_json_file text_vocab_size decoder_vocab_size encoder_vocab_size
        vocab_size_per_layer_input""",
    64: """max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len seq_length max_length
        max_target_positions max_source_positions sliding_window max_seq_length position_embedding_size""",
    3: "num_channels",
    1: "bos_token_id eos_token_id decoder_start_token_id cls_token_id sep_token_id mask_token_id unk_token_id",
    0: "pad_token_id first_k_dense_replace num_kv_shared_layers",
    16: "num_mel_bins num_conv_pos_embeddings num_buckets entity_emb_size chunk_size mamba_chunk_size block_size",
}
SIZES: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
SIZES |= {"depths": [1, 2], "depth_multiplier": 1.0}
SIZES |= {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
# Numbers that stand for something else where they are missing: `None` is no size.
_FROM_NONE = [
    "num_key_value_heads",
    "head_dim",
    "n_inner",
    "vocab_size",
    "pad_token_id",
    "mask_token_id",
    "num_experts_per_tok",
]
_WORDS = 120

_WIDTH = re.compile(r"hidden|embed|dim|d_model|width|channels|d_ff|d_kv|ffn|intermediate|inner|rank|d_head|units|stem")
_NO_WIDTH = re.compile(r"^num_|^n_|kernel|patch_size|image|vocab|ratio|window|_id$|token|^mask_|max_|_act|layer|depth")
_LAYERS = re.compile(r"(^|_)(layers?|depth|blocks)$")

_AUTO = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL",
)
_LARGEST, _MOST_CLASSES = 20_000_000, 4  # parameters, and model classes to try

# Every model type; those that an Auto class with a head loads come first, others are often parts of larger models.
TYPES = sorted(
    CONFIG_MAPPING_NAMES,
    key=lambda name: not any(name in getattr(modeling_auto, f"{one}_MAPPING_NAMES") for one in _AUTO[:-1]),
)


def build(name: str) -> nn.Module:
    """A small model of this type, as its most complete class.

    Raises:
        ValueError: no configuration that was tried makes a model that runs; the first reason.
    """
    kind = CONFIG_MAPPING[name]
    said: Exception | None = None
    for configure in (
        _named,
        _Divided(16, layers=2),
        _Divided(32, layers=2),
        _Divided(8, layers=6),
        _Divided(4, layers=2),
    ):
        try:
            config = configure(kind)
        except Exception as error:  # whatever a configuration says to sizes that do not fit together
            said = said or error
            continue
        for cls in islice(_classes(kind), _MOST_CLASSES):
            try:
                if _parameters(cls, config) > _LARGEST:
                    raise ValueError("the model would not be small")
                model = _random(cls(config))
                outputs(model)
            except Exception as error:
                said = said or error
            else:
                return model
    if said is None:
        raise ValueError("no model class takes this configuration alone")
    raise ValueError(f"{type(said).__name__}: {' '.join(str(said).split())[:150]}")


def _named(kind: Any) -> Any:
    """The configuration with small numbers for the usual names of sizes; what is not named keeps its default."""
    small = _small(kind)
    with contextlib.suppress(Exception):
        return _sectioned(kind(**small))
    return _sectioned(kind(**{name: value for name, value in small.items() if not isinstance(value, list)}))


def _sectioned(config: Any) -> Any:
    """Divide half of a head among the axes of rotary positions in several dimensions; others ignore the sections."""
    rope = getattr(config, "rope_parameters", None)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(rope, dict) and "rope_type" in rope and type(heads) is int:
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        half = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return config


def _small(kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    values = _values(_default(kind))
    sizes = dict(SIZES)
    if "kv_lora_rank" in values:  # keys from a latent vector: every head has its own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if values.get("window_size") in (112, 256):  # of pixels or tokens, not of patches
        sizes["window_size"] = 32
    for name, value in values.items():
        size = sizes.get(name)
        if isinstance(value, transformers.PretrainedConfig):
            found[name] = _named(type(value))
        elif size is not None and (type(value) is type(size) or (value is None and name in _FROM_NONE)):
            found[name] = size
        elif size is not None and isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
            found[name] = size if isinstance(size, list) else [size] * len(value)
        elif _is_token(name, value):
            found[name] = 100 + len(found) % 15
    return found


class _Divided:
    """The configuration with all widths divided by a number, and few layers and experts; heads stay as many."""

    def __init__(self, by: int, layers: int) -> None:
        self.by, self.layers = by, layers

    def __call__(self, kind: Any) -> Any:
        found: dict[str, Any] = {}
        default = _default(kind)
        layers = getattr(default, "num_hidden_layers", None)
        for name, value in _values(default).items():
            if isinstance(value, transformers.PretrainedConfig):
                found[name] = self(type(value))
            elif isinstance(value, list) and len(value) == layers:
                found[name] = self._divided(name, value[: self.layers])
            elif "vocab_size" in name and type(value) is int:
                found[name] = min(value, _WORDS)
            elif "experts_per_tok" in name:  # some have no default
                found[name] = 2
            elif "experts" in name and type(value) is int:
                found[name] = min(value, 16)
            elif _is_token(name, value):
                found[name] = 100 + len(found) % 15
            elif type(value) is int and _LAYERS.search(name):
                found[name] = min(value, self.layers)
            elif type(value) is int and name.endswith("chunk_size"):
                found[name] = min(value, 16)
            elif (made := self._divided(name, value)) != value:
                found[name] = made
        return _sectioned(kind(**found))

    def _divided(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._divided(key, one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._divided(name, one) for one in value)
        if type(value) is not int or value % self.by or not _WIDTH.search(name):
            return value
        return value if _NO_WIDTH.search(name) else value // self.by


def _default(kind: Any) -> Any:
    try:
        return kind()
    except Exception:  # it has to be given something
        return None


def _values(config: Any) -> dict[str, Any]:
    """The settings of a configuration; those for each layer follow from the number of layers."""
    found = dict(vars(config)) if config is not None else {}
    per_layer = ("layer_types", "transformers_version", "model_type")
    return {k: v for k, v in found.items() if not k.startswith("_") and k not in per_layer}


def _is_token(name: str, value: Any) -> bool:
    return name.endswith(("token_id", "token_index")) and type(value) is int and value >= _WORDS


def _classes(kind: Any) -> Iterator[Any]:
    """The model classes for a configuration, the most complete first; then those that only its own modules name."""
    seen = []
    for mapping in _AUTO:
        classes = getattr(modeling_auto, f"{mapping}_MAPPING")
        if kind in classes:
            found = classes[kind]
            seen += [cls for cls in (found if isinstance(found, tuple) else (found,)) if cls not in seen]
    yield from (cls for cls in seen if getattr(cls, "config_class", None) in (None, kind))
    package = kind.__module__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.name.startswith("modeling_"):
            for cls in vars(importlib.import_module(f"{package}.{module.name}")).values():
                is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
                if is_model and cls not in seen and getattr(cls, "config_class", None) is kind and _runs(cls):
                    seen.append(cls)
                    yield cls


def _runs(cls: Any) -> bool:
    """Whether a class has a forward pass of its own; the parent of all models of an architecture has none."""
    return cls.forward is not nn.Module.forward and not cls.__name__.endswith("PreTrainedModel")


def _parameters(cls: Any, config: Any) -> int:
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in cls(config).parameters())
    except (RuntimeError, NotImplementedError):  # it computes with its weights when it is built
        return 0


def _random(model: Any) -> nn.Module:
    torch.manual_seed(0)
    model = model.eval().float()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.normal_(0.0 if path.endswith("bias") else 1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.15)
    found: nn.Module = model
    return found


def outputs(model: nn.Module, length: int = 11) -> tuple[list[Tensor], Any]:
    """The float outputs for inputs of this length, and the inputs."""
    said: Exception | None = None
    for args, kwargs in attempts(model, Case(3, length)):
        args, kwargs = mapped((args, kwargs), lambda t: t.float() if t.is_floating_point() else t)
        try:
            with torch.no_grad():
                found = [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]
        except Exception as error:
            said = said or error
            continue
        if not all(bool(t.isfinite().any()) for t in found if t.numel()):
            raise ValueError("its outputs are not finite with random weights")
        return found, (args, kwargs)
    raise ValueError(f"does not run: {type(said).__name__}: {' '.join(str(said).split())[:150]}")
