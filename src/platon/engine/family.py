"""The heads and the feed-forward neurons of a model: which rows and columns of which matrices belong together.

Part of what topology.py knows, and here by name: how a block cuts its matrices into heads cannot be seen from their
shapes. The classes below are those of transformers, named and not imported, since the engine imports torch alone; any
other block is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from platon.engine.topology import blocks, is_conv1d, weights_of

COVERED = "BERT, RoBERTa, DistilBERT, ELECTRA, MPNet, DeBERTa-v2/v3, ViT, DeiT, GPT-2, Llama, Qwen2, Qwen3"

# Where the classes inside a block may come from.
_HOMES = ("torch", "transformers", "platon")


@dataclass(frozen=True)
class Member:
    """How a family of groups cuts one matrix."""

    name: str  # as in model.named_parameters()
    parameter: nn.Parameter
    dim: int  # 0: the groups are of rows of the stored tensor, 1: of columns
    group: Tensor  # int64, one for each row (or column): the group it belongs to; -1: none


@dataclass(frozen=True)
class Family:
    """Groups cut across the same matrices: the heads of one attention, the neurons of one feed-forward."""

    name: str  # dotted name of the module
    count: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Writer:
    """A linear that makes a group's features: by rows of its matrix, which may hold several roles, one after another.

    Its bias has one number a row and belongs to the groups too.
    """

    path: str  # from the family's module
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Anatomy:
    """Where the linears of a family are, and what else of the module knows about its groups."""

    writers: tuple[Writer, ...]
    reader: str  # the linear that takes the groups' features in: by columns of its matrix
    size: str | None = None  # the attribute that holds a head's size; None: a group is one feature (a neuron)
    counts: tuple[str, ...] = ()  # attributes that hold the number of heads
    widths: tuple[str, ...] = ()  # attributes that hold the number of heads times their size
    activation: str | None = None  # the module between writers and reader
    bias_by_head: bool = False  # the scores get a bias for each head from outside, which is not cut with the heads


def _apart(prefix: str, query: str, key: str, value: str, *places: str) -> tuple[Writer, ...]:
    """The writers of an attention with a matrix for each role; `places` project relative positions."""
    roles = {query: "query", key: "key", value: "value"} | dict.fromkeys(places, "place")
    return tuple(Writer(f"{prefix}{name}", (role,)) for name, role in roles.items())


_BERT_HEADS = Anatomy(
    _apart("self.", "query", "key", "value"),
    "output.dense",
    "self.attention_head_size",
    ("self.num_attention_heads",),
    ("self.all_head_size",),
)
_DEBERTA_HEADS = Anatomy(
    _apart("self.", "query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj"),
    "output.dense",
    "self.attention_head_size",
    ("self.num_attention_heads",),
    ("self.all_head_size",),
)
_MPNET_HEADS = Anatomy(
    _apart("attn.", "q", "k", "v"),
    "attn.o",
    "attn.attention_head_size",
    ("attn.num_attention_heads",),
    ("attn.all_head_size",),
    bias_by_head=True,
)
_DISTILBERT_HEADS = Anatomy(
    _apart("", "q_lin", "k_lin", "v_lin"), "out_lin", "attention_head_size", ("n_heads",), ("dim",)
)
_VIT_HEADS = Anatomy(_apart("", "q_proj", "k_proj", "v_proj"), "o_proj", "head_dim", ("num_attention_heads",))
_LLAMA_HEADS = Anatomy(_apart("", "q_proj", "k_proj", "v_proj"), "o_proj", "head_dim")
_GPT2_HEADS = Anatomy(
    (Writer("c_attn", ("query", "key", "value")),), "c_proj", "head_dim", ("num_heads",), ("embed_dim", "split_size")
)
_GPT2_CROSS = Anatomy(
    (Writer("q_attn", ("query",)), Writer("c_attn", ("key", "value"))),
    "c_proj",
    "head_dim",
    ("num_heads",),
    ("embed_dim", "split_size"),
)

_HEADS = {
    "bert.BertAttention": _BERT_HEADS,
    "roberta.RobertaAttention": _BERT_HEADS,
    "electra.ElectraAttention": _BERT_HEADS,
    "distilbert.DistilBertSelfAttention": _DISTILBERT_HEADS,
    "mpnet.MPNetAttention": _MPNET_HEADS,
    "deberta_v2.DebertaV2Attention": _DEBERTA_HEADS,
    "vit.ViTAttention": _VIT_HEADS,
    "deit.DeiTAttention": _VIT_HEADS,
    "gpt2.GPT2Attention": _GPT2_HEADS,
    "llama.LlamaAttention": _LLAMA_HEADS,
    "qwen2.Qwen2Attention": _LLAMA_HEADS,
    "qwen3.Qwen3Attention": _LLAMA_HEADS,
}


def _plain(up: str, down: str, activation: str) -> Anatomy:
    return Anatomy((Writer(up, ("up",)),), down, activation=activation)


_BERT_NEURONS = _plain("intermediate.dense", "output.dense", "intermediate.intermediate_act_fn")
_VIT_NEURONS = _plain("fc1", "fc2", "activation_fn")
_LLAMA_NEURONS = Anatomy((Writer("gate_proj", ("gate",)), Writer("up_proj", ("up",))), "down_proj", activation="act_fn")

_NEURONS = {
    "bert.BertLayer": _BERT_NEURONS,
    "roberta.RobertaLayer": _BERT_NEURONS,
    "electra.ElectraLayer": _BERT_NEURONS,
    "distilbert.FFN": _plain("lin1", "lin2", "activation"),
    "mpnet.MPNetLayer": _BERT_NEURONS,
    "deberta_v2.DebertaV2Layer": _BERT_NEURONS,
    "vit.ViTMLP": _VIT_NEURONS,
    "deit.DeiTMLP": _VIT_NEURONS,
    "gpt2.GPT2MLP": _plain("c_fc", "c_proj", "act"),
    "llama.LlamaMLP": _LLAMA_NEURONS,
    "qwen2.Qwen2MLP": _LLAMA_NEURONS,
    "qwen3.Qwen3MLP": _LLAMA_NEURONS,
}


def heads(model: nn.Module) -> list[Family]:
    """The attention heads, a family for each attention: the query, key, value and output slices of one head.

    Where several query heads share a key and a value, they are one group with them. Frozen matrices are here too.
    """
    _check(model)
    return _families(model, _HEADS)


def neurons(model: nn.Module) -> list[Family]:
    """The hidden features of the feed-forwards, a family for each: what writes one and what reads it.

    Frozen matrices are here too.
    """
    _check(model)
    return _families(model, _NEURONS)


def anatomy(module: nn.Module) -> Anatomy:
    """Where the linears of a family are in the module that the family is named after."""
    key = _key(module)
    found = _HEADS.get(key) or _NEURONS[key]
    if found is _GPT2_HEADS and hasattr(module, "q_attn"):
        found = _GPT2_CROSS
    if found is _DEBERTA_HEADS:  # which projections of positions there are is a matter of its configuration
        there = (w for w in found.writers if hasattr(module.self, w.path.removeprefix("self.")))
        found = replace(found, writers=tuple(there))
    return found


def inputs_of(linear: Any) -> Tensor:
    """The features that a linear reads, one a column of its matrix.

    All of them in order, unless compaction left it a list of those that it gathers.
    """
    gathered = getattr(linear, "columns", None)
    if isinstance(gathered, Tensor):
        return gathered.cpu()
    return torch.arange(linear.weight.shape[0 if is_conv1d(linear) else 1])


def width_in(linear: Any) -> int:
    """How many features there are for a linear to read, whether it gathers some of them or reads all."""
    return int(linear.in_features if isinstance(linear, nn.Linear) else linear.nx)


def _families(model: nn.Module, known: dict[str, Anatomy]) -> list[Family]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = {id(module): module for block in blocks(model).values() for module in block.modules()}
    return [
        _family(name, module, names)
        for name, module in model.named_modules()
        if id(module) in inside and _key(module) in known
    ]


def _family(name: str, module: nn.Module, names: dict[int, str]) -> Family:
    plan = anatomy(module)
    size = 1 if plan.size is None else int(attribute(module, plan.size))
    last = next(writer for writer in plan.writers if {"value", "up"} & set(writer.roles))
    count = _outputs(attribute(module, last.path)) // len(last.roles) // size
    members = []
    for writer in plan.writers:
        linear = attribute(module, writer.path)
        rows = _outputs(linear) // len(writer.roles)
        # Query heads that share a key lie side by side, so the rule is the same for them.
        group = torch.arange(_outputs(linear)) % rows * count // rows
        members.append(Member(names[id(linear.weight)], linear.weight, int(is_conv1d(linear)), group))
    linear = attribute(module, plan.reader)
    group = inputs_of(linear) * count // width_in(linear)
    members.append(Member(names[id(linear.weight)], linear.weight, int(not is_conv1d(linear)), group))
    return Family(name, count, tuple(members))


def attribute(module: nn.Module, path: str) -> Any:
    """What a dotted path from the module leads to."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _outputs(linear: Any) -> int:
    return int(linear.weight.shape[int(is_conv1d(linear))])


def _key(module: nn.Module) -> str:
    """The class as the tables have it, such as 'bert.BertAttention'; empty where it is not of transformers."""
    # FSDP puts a class of its own in front; a user's subclass may compute something else, so no other ancestor counts.
    cls = next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.distributed"))
    places = cls.__module__.split(".")
    return f"{places[2]}.{cls.__name__}" if places[:2] == ["transformers", "models"] and len(places) > 2 else ""


def _check(model: nn.Module) -> None:
    """Refuse a model unless every matrix of its blocks is in exactly one family: what is not known is not cut."""
    found = blocks(model)
    name = type(model).__name__
    inside = [module for block in found.values() for module in block.modules()]
    # A class from elsewhere inside a block (an adapter, a user's own attention) may compute anything.
    strange = {type(module).__name__ for module in inside if type(module).__module__.split(".")[0] not in _HOMES}
    plans = [] if strange else [(m, anatomy(m)) for m in inside if _key(m) in _HEADS or _key(m) in _NEURONS]
    known = [
        id(attribute(module, f"{path}.weight"))
        for module, plan in plans
        for path in [*(writer.path for writer in plan.writers), plan.reader]
    ]
    if not known or sorted(known) != sorted(id(weight) for module in inside for weight in weights_of(module)):
        kinds = ", ".join(sorted(strange or {type(block).__name__ for block in found.values()})) or "no blocks"
        raise ValueError(f"the heads and neurons of {name} are not known (it has {kinds}); covered are {COVERED}")
    if len(set(known)) < len(known):
        raise ValueError(f"blocks of {name} share matrices, so no head or neuron of theirs can be cut by itself")
