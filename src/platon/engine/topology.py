"""The transformer blocks of a model, and the matrices in them that may be pruned.

Blocks are found by structure, never by name: a block is an element of a container whose class repeats there, and which
holds enough matrices to be attention and a feed-forward.
Embeddings, patch merging, poolers and heads lie outside every block, so no list of names is needed to leave them out.
"""

import warnings
from collections import Counter
from collections.abc import Iterable

from torch import nn

# The smallest block in use has packed query-key-value, attention output and two feed-forward matrices (GPT-2). What
# else repeats in real models stays below: an expert or a gated feed-forward has three, a patch merger two.
_SMALLEST_BLOCK = 4

_PACKED_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated transformer blocks, by dotted name, in model order; one used several times (ALBERT) appears once."""
    found = {id(block) for block in _innermost_blocks(model)}
    return {name: module for name, module in model.named_modules() if id(module) in found}


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The prunable matrices, by name as in `model.named_parameters()`, in that order.

    These are the linear weights inside the blocks; in a model without blocks, all linear weights but the last, with a
    warning. Shared matrices appear once, under their first name; frozen ones do not appear.
    """
    found = blocks(model)
    if found:
        return _trainable(model, [module for block in found.values() for module in block.modules()])
    # The last linear is most likely the head, whose few rows are the classes.
    linears = [module for module in model.modules() if weights_of(module)]
    chosen = _trainable(model, linears[:-1])
    warnings.warn(
        f"{type(model).__name__} has no transformer blocks, so its prunable matrices are all linear weights "
        f"but the last: {len(chosen)} of them.",
        stacklevel=2,
    )
    return chosen


def _trainable(model: nn.Module, inside: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The trainable matrices that the modules `inside` hold and no other module does."""
    held = {id(module): weights_of(module) for module in inside}
    wanted = {id(weight) for weights in held.values() for weight in weights}
    # A matrix tied to an embedding or a head is theirs too, and pruning it would prune them. No bare model in
    # transformers ties so; a hand-written one may. The same module under a second name is no other module.
    others = [module for module in model.modules() if not held.get(id(module))]
    ours = wanted - {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    # Names come from the model itself, so wrappers' prefixes (`module.`, `_orig_mod.`) are in them.
    return {name: p for name, p in model.named_parameters() if id(p) in ours and p.requires_grad}


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """The matrices that the module itself multiplies its input by; its children answer for themselves."""
    # A mixture's fused experts (three dimensions) are left out, and so are its routers where they are a class of their
    # own, as in transformers. A gate that is a plain linear stays in: nothing but a name tells it from another
    # projection, it is a vanishing share of the weights, and its scores decide as they do for the rest.
    if isinstance(module, nn.Linear) or is_conv1d(module):
        names: tuple[str, ...] = ("weight",)
    elif isinstance(module, nn.MultiheadAttention):
        names = _PACKED_ATTENTION
    else:
        return []
    own = dict(module.named_parameters(recurse=False))
    return [own[name] for name in names if name in own and own[name].ndim == 2]


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear, which stores the transpose; by its looks: the engine imports no transformers."""
    # The ancestors count because FSDP puts a class of its own in front.
    return hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def inputs_first(model: nn.Module) -> set[int]:
    """The ids of the matrices that are stored with inputs as rows."""
    return {id(module.weight) for module in model.modules() if is_conv1d(module)}


def _is_norm(module: nn.Module) -> bool:
    """A layer, batch, group or RMS norm, whatever its class: a leaf with vectors for parameters, and nothing else."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        return True  # without affine parameters, too
    own = list(module.parameters())
    return bool(own) and not list(module.children()) and all(parameter.ndim == 1 for parameter in own)


def _innermost_blocks(module: nn.Module) -> list[nn.Module]:
    """The innermost blocks under the module: stages repeat as blocks do, and hold patch merging besides (Swin)."""
    inside = {child: _innermost_blocks(child) for child in module.children()}
    repeated = _repeated_blocks(inside) if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) else set()
    return [block for child, inner in inside.items() for block in inner or ([child] if type(child) in repeated else [])]


def _repeated_blocks(inside: dict[nn.Module, list[nn.Module]]) -> set[type]:
    """The classes of block among a container's elements, which come with the blocks found inside each."""
    # One element that looks like a block speaks for its class, since hybrids give some layers less (Nemotron-H). The
    # class must repeat, so an attention and a feed-forward that make up one T5 block are no blocks, and a head in one
    # Sequential with the blocks is none either; or all elements are layers, one of them the odd one (Mllama).
    count = Counter(type(element) for element in inside)
    alike = {type(element) for element, inner in inside.items() if not inner and _looks_like_block(element)}
    repeated = {cls for cls in alike if count[cls] > 1}
    only_layers = len(alike) == len(count) and (len(count) == 1 or repeated)
    return alike if only_layers else repeated


def _looks_like_block(module: nn.Module) -> bool:
    """Whether there are enough matrices, beside a norm or in two modules with two matrices each."""
    parts = list(module.modules())
    count = len({id(weight) for part in parts for weight in weights_of(part)})
    # Either tells a block from a bare attention. The norm alone would miss the models that normalise with a function
    # (nanochat) or without parameters (OLMo); the two modules alone, those with all matrices in one (Mamba).
    groups = sum(1 for part in parts if sum(1 for child in part.children() if weights_of(child)) > 1)
    return count >= _SMALLEST_BLOCK and (groups > 1 or any(_is_norm(part) for part in parts))
