"""Every model type of the installed transformers that a tiny configuration can build: is it cut exactly?

    python benchmarks/architectures.py                       all types, a process each; about an hour on one core
    python benchmarks/architectures.py bert t5 gemma3        these alone
    python benchmarks/architectures.py --results survey.jsonl --table       the table for docs/architectures.md

For each type a model is built with random weights, biases and norms included. Half of the heads and neurons that platon
proves are zeroed, the model is compacted, and its outputs are compared with those of the zeroed model on inputs that
the proof has not seen; models that generate have to give the same tokens, and what is saved has to come back with the
same outputs.

- exact: groups were found, every output agrees to 1e-5 of the largest, at least 95 % of the zeroed weights are gone.
- refused: no head and no neuron is proved, with the first reason.
- wrong: anything else that came out of `platon.compact`.
- not built: the tiny configuration does not make a model that runs.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import platon
from platon.engine.call import mapped, tensors_in
from platon.engine.discovery import heads, neurons, refusals
from platon.engine.sample import Case, attempts

SECONDS, GIGABYTES = 90, 6  # of processor time and memory, for one type
AT_LEAST = 60

# Small numbers for the usual names of sizes; what is not named keeps its default.
_SIZES: tuple[tuple[int, str], ...] = (
    (32, "hidden_size d_model n_embd dim embed_dim encoder_embed_dim decoder_embed_dim emb_dim model_dim"),
    (
        32,
        "decoder_hidden_size encoder_hidden_size embedding_size d_embed projection_dim out_hidden_size text_embed_dim",
    ),
    (32, "fusion_hidden_size hidden_dim_size vision_embed_dim word_embed_proj_dim encoder_hidden_dim code_dim"),
    (32, "cross_attention_hidden_size bottleneck_size true_hidden_size intra_bottleneck_size image_size img_size"),
    (4, "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads attention_heads"),
    (4, "num_local_experts n_routed_experts num_experts encoder_num_attention_heads decoder_num_attention_heads nhead"),
    (4, "encoder_num_heads decoder_num_heads num_cross_attention_heads num_query_heads heads n_group moe_num_experts"),
    (2, "num_key_value_heads num_hidden_layers n_layer n_layers encoder_layers decoder_layers num_layers depth layers"),
    (
        2,
        "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_encoder_layers num_blocks",
    ),
    (
        2,
        "num_experts_per_tok",
    ),
    (
        2,
        "num_kv_heads multi_query_group_num topk_group n_shared_experts encoder_num_key_value_heads top_k",
    ),
    (2, "decoder_num_key_value_heads encoder_depth decoder_depth moe_topk moe_k num_feedforward_networks"),
    (44, "intermediate_size n_inner ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim moe_intermediate_size"),
    (44, "encoder_intermediate_size decoder_intermediate_size ffn_hidden_size mlp_dim dim_feedforward ff_dim d_inner"),
    (44, "shared_expert_intermediate_size intermediate_dim feed_forward_size encoder_feedforward_dim"),
    (8, "head_dim d_kv d_head kv_channels attention_head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim"),
    (8, "patch_size kv_lora_rank swa_head_dim"),
    (12, "q_lora_rank"),
    (120, "vocab_size vocab_size_or_config_json_file text_vocab_size decoder_vocab_size encoder_vocab_size"),
    (64, "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len seq_length max_length"),
    (64, "max_target_positions max_source_positions sliding_window max_seq_length position_embedding_size"),
    (3, "num_channels"),
    (1, "bos_token_id eos_token_id decoder_start_token_id cls_token_id sep_token_id mask_token_id unk_token_id"),
    (0, "pad_token_id first_k_dense_replace"),
    (16, "num_mel_bins num_conv_pos_embeddings num_buckets entity_emb_size"),
)
SIZES = {name: size for size, names in _SIZES for name in names.split()}
SIZES |= {
    "image_size": 32,
    "img_size": 32,
    "num_conv_pos_embedding_groups": 4,
    "depths": [1, 2],
    "depth_multiplier": 1.0,
    "window_size": 2,
}
SIZES |= {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}


_AUTO = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL",
)


def tiny(kind: Any) -> Any:
    """A configuration of this class with small sizes."""
    with contextlib.suppress(Exception):
        return kind(**_small(kind))
    return kind(**{name: value for name, value in _small(kind).items() if not isinstance(value, list)})


def _small(kind: Any) -> dict[str, Any]:
    inner = {name: tiny(one) for name, one in (getattr(kind, "sub_configs", None) or {}).items() if one is not _auto()}
    try:
        default = kind().to_dict()
    except Exception:
        default = {}
    found: dict[str, Any] = dict(inner)
    for name, value in default.items():
        if name in inner or name in ("layer_types", "transformers_version", "model_type"):
            continue
        if name in SIZES and (type(value) is type(SIZES[name]) or value is None):
            if value is not None or name in (
                "num_key_value_heads",
                "head_dim",
                "n_inner",
                "vocab_size",
                "pad_token_id",
                "mask_token_id",
            ):
                found[name] = SIZES[name]
        elif name in SIZES and isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
            found[name] = [SIZES[name]] * len(value) if not isinstance(SIZES[name], list) else SIZES[name]
        elif name.endswith("token_id") and isinstance(value, int) and value >= SIZES["vocab_size"]:
            found[name] = 100 + len(found) % 15
    return found


def _auto() -> Any:
    return transformers.AutoConfig


def build(name: str) -> nn.Module:
    """A small model of this type, as its most complete class, with random numbers everywhere."""
    kind = CONFIG_MAPPING[name]
    config = tiny(kind)
    for mapping in _AUTO:
        classes = getattr(modeling_auto, f"{mapping}_MAPPING")
        if kind in classes and _fits(classes[kind], config):
            cls = classes[kind]
            break
    else:
        cls = _in_its_module(kind)
    torch.manual_seed(0)
    model: nn.Module = (cls[0] if isinstance(cls, tuple) else cls)(config).eval().float()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.normal_(0.0 if path.endswith("bias") else 1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def _in_its_module(kind: Any) -> Any:
    """A model class for a configuration that no Auto class lists: a part of a larger model, such as CLIP's towers."""
    module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    for cls in vars(module).values():
        is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
        if is_model and cls.config_class is kind and cls.forward is not nn.Module.forward:
            return cls
    raise ValueError("no model class takes this configuration alone")


def _fits(cls: Any, config: Any) -> bool:
    cls = cls[0] if isinstance(cls, tuple) else cls
    return getattr(cls, "config_class", None) is None or isinstance(config, cls.config_class)


def outputs(model: nn.Module, length: int = 11) -> tuple[list[Tensor], Any]:
    """The float outputs for inputs of this length, and the inputs."""
    said: Exception | None = None
    for args, kwargs in attempts(model, Case(3, length)):
        args, kwargs = mapped((args, kwargs), lambda t: t.float() if t.is_floating_point() else t)
        try:
            with torch.no_grad():
                found = model(*args, **kwargs)
        except Exception as error:
            said = said or error
            continue
        return [t for t in tensors_in(found) if t.is_floating_point()], (args, kwargs)
    raise ValueError(f"does not run: {type(said).__name__}: {' '.join(str(said).split())[:150]}")


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, as a share of the largest output."""
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape:
            if a.ndim == b.ndim == 4:  # a map of attention or a cache: fewer heads
                continue
            return float("inf")
        if a.numel():
            a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
            largest = max(largest, float((a - b).abs().max() / a.abs().max().clamp(min=1.0)))
    return largest


def survey(name: str) -> dict[str, Any]:
    """What becomes of one model type."""
    start = time.perf_counter()
    found: dict[str, Any] = {"type": name}
    try:
        model = build(name)
        outputs(model)
    except Exception as error:
        return found | {"outcome": "not built", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    found["class"] = type(model).__name__
    prunable = _prunable(model)
    if not all(bool(t.isfinite().any()) for t in outputs(model)[0] if t.numel()):
        return found | {"outcome": "not built", "why": "its outputs are not finite with random weights"}
    found["blocks"] = len(platon.engine.topology.blocks(model))
    groups: list[Any] = []
    reasons = []
    for kind, find in {"heads": heads, "neurons": neurons}.items():
        try:
            mine = find(model)
        except ValueError as error:
            mine = []
            reasons.append(str(error))
        found[kind] = len(mine)
        groups += mine
    found["covered"] = round(sum(int(g.sizes.sum()) for g in groups) / prunable, 3) if prunable else 0.0
    try:
        found["left"] = dict(list(refusals(model).items())[:6])
    except ValueError as error:
        found["left"] = {"": str(error)}
    if not groups:
        return found | {"outcome": "refused", "why": reasons[0], "seconds": round(time.perf_counter() - start, 1)}
    return found | _cut(model, groups) | {"seconds": round(time.perf_counter() - start, 1)}


def _prunable(model: nn.Module) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(m.numel() for m in platon.engine.topology.matrices(model).values())


def _cut(model: nn.Module, groups: list[Any]) -> dict[str, Any]:
    random = torch.Generator().manual_seed(7)
    zeroed = 0
    with torch.no_grad():
        for group in groups:
            kept = torch.rand(group.count, generator=random) < 0.5
            kept[int(torch.randint(group.count, (1,), generator=random))] = True
            zeroed += int(group.sizes[~kept].sum())
            for part in group.slices:
                part.parameter.mul_(part.expand(kept.float()))
    before = sum(p.numel() for p in model.parameters())
    expected, (args, kwargs) = outputs(model)
    try:
        small = platon.compact(model)
    except ValueError as error:
        return {"outcome": "refused", "why": str(error)}
    except Exception as error:
        return {"outcome": "wrong", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    result: dict[str, Any] = {"gone": round((before - sum(p.numel() for p in small.parameters())) / max(1, zeroed), 4)}
    try:
        with torch.no_grad():
            given = [t for t in tensors_in(small(*args, **kwargs)) if t.is_floating_point()]
        result["difference"] = apart(expected, given)
        result["generates"] = _generates(model, small)
        result["stored"] = _stored(small, args, kwargs)
    except Exception as error:
        return result | {"outcome": "wrong", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    fine = result["difference"] <= 1e-5 and result["gone"] >= 0.95 and result["generates"] is not False
    return result | {"outcome": "exact" if fine and result["stored"] is not False else "wrong"}


def _generates(model: Any, small: Any) -> bool | None:
    """Whether both give the same tokens; `None`: the model does not generate from tokens."""
    if not getattr(model, "can_generate", lambda: False)() or model.main_input_name != "input_ids":
        return None
    start = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(5))
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(start)}
    settings |= {"eos_token_id": None, "pad_token_id": 0}
    settings |= {"decoder_start_token_id": 0} if model.config.is_encoder_decoder else {}
    try:
        expected = model.generate(start, **settings)
    except Exception:
        return None
    return bool(torch.equal(expected, small.generate(start, **settings)))


def _stored(small: Any, args: Any, kwargs: Any) -> bool | str:
    """Whether it is the same after saving and loading, or why it cannot be saved."""
    with tempfile.TemporaryDirectory() as place:
        try:
            platon.save(small, Path(place) / "model")
        except ValueError as error:
            return str(error)[:200]
        back = platon.load(Path(place) / "model")
    with torch.no_grad():
        one, other = ([t for t in tensors_in(m(*args, **kwargs)) if t.is_floating_point()] for m in (small, back))
    return apart(one, other) == 0.0


def all_types() -> list[str]:
    """Every model type, those that an Auto class with a head loads first: others are often parts of larger models."""
    known = {name for mapping in _AUTO[:-1] for name in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")}
    return sorted(CONFIG_MAPPING_NAMES, key=lambda name: (name not in known, name))


def in_child(name: str) -> dict[str, Any]:
    """`survey` in a process of its own, with limits of time and memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        signal.alarm(10 * SECONDS)  # one that waits for something
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
        try:
            found = survey(name)
        except BaseException as error:  # a child says everything in one line, whatever happens
            found = {
                "type": name,
                "outcome": "failed",
                "why": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            }
        os.write(writing, json.dumps(found).encode()[:60000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if not said:
        why = (
            f"more than {SECONDS} s"
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL)
            else f"ended with {status}"
        )
        return {"type": name, "outcome": "not built", "why": why}
    return dict(json.loads(said))


def table(found: list[dict[str, Any]]) -> str:
    """The survey as the table of docs/architectures.md, and how many there are of each outcome."""
    counts = Counter(one["outcome"] for one in found)
    lines = [
        ", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items())),
        "",
        "| type | heads | neurons | covered | difference | tokens | left out, and why |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for one in sorted(found, key=lambda one: (one["outcome"] != "exact", str(one["type"]))):
        if one["outcome"] in ("not built", "failed"):
            continue
        difference = f"{one['difference']:.0e}" if one.get("difference") else "0"
        tokens = {True: "the same", False: "others"}.get(one.get("generates"), "")
        if one["outcome"] != "exact":
            difference, tokens = f"**{one['outcome']}**", ""
        why = one.get("why") or "; ".join(dict.fromkeys(one["left"].values()))
        cells = (one["type"], one["heads"], one["neurons"], f"{one['covered']:.0%}", difference, tokens, _brief(why))
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def _brief(why: str) -> str:
    """The reason alone, without the names of modules."""
    why = why.partition("could be proved (")[2].partition(": ")[2] or why
    why = re.sub(r" that '[^']*' reads", "", why.partition(" (")[0])
    return why.partition("; ")[0].removesuffix(")").replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument(
        "--results", type=Path, help="append a JSON line for each type to this file, and skip those in it"
    )
    parser.add_argument("--table", action="store_true", help="print the table of what is in --results, try nothing")
    parser.add_argument("--here", action="store_true", help="run in this process, to see errors")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known: list[dict[str, Any]] = []
    if options.results and options.results.exists():
        known = [json.loads(line) for line in options.results.read_text().splitlines()]
    if options.table:
        print(table(known))
        return
    done = {one["type"] for one in known}
    for name in options.types or all_types():
        if name in done:
            continue
        found = survey(name) if options.here else in_child(name)
        known.append(found)
        print(json.dumps(found), flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    counts = Counter(one["outcome"] for one in known)
    print(", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items())))
    if counts["wrong"] or (not options.types and counts["exact"] < AT_LEAST):
        sys.exit(f"the bar: no type wrong, and of all types at least {AT_LEAST} exact")


if __name__ == "__main__":
    main()
