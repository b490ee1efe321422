"""`sparsify`: a copy of a pruned model whose linear layers skip zeros, where that makes them faster."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from platon.deploy import calibration, sparse_kernel
from platon.deploy.choice import Candidate, blocks_of, choose
from platon.deploy.dense_layer import DenseLinear
from platon.deploy.layer import CsrLinear, SparseLinear
from platon.deploy.outline import is_hooked
from platon.deploy.replacement import skip_fast_paths
from platon.deploy.sparse_fusion import fuse
from platon.deploy.sparse_operator import ACTIVATE
from platon.engine.proof.linear import inputs_of, width_in
from platon.engine.topology import is_conv1d

_PROBE = torch.linspace(-8, 8, 257)


@torch.no_grad()
def sparsify(model: nn.Module, *, tokens: int = 128, dense_above: float | None = None) -> nn.Module:
    """A copy of the model for inference whose linear layers are sparse where that is faster on this machine.

    The outputs are the model's, within float32 rounding; the model itself is left as it is. A layer becomes sparse if
    its share of non-zeros is at most what `calibration.limit` measured for its shape at `tokens` tokens a call and
    PyTorch's current number of threads, or for a neighbour's (`choice.choose`), or, without measuring, at most
    `dense_above`. Where a GELU or ReLU follows such a layer it becomes part of it.

    Without the compiled kernel the sparse layers are `torch.sparse` CSR, and a warning says so.

    Args:
        model: any module with linear layers (`nn.Linear`, or GPT-2's `Conv1D`), in float32 on the CPU.
        tokens: how many a call has, about: rows times length. 1 for a decoder that generates.
        dense_above: layers with a larger share of non-zeros stay dense; nothing is measured then.

    Returns:
        The copy, in evaluation mode and without gradients. `platon.save` and `platon.load` keep it as it is.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}; it is about how many tokens a call has")
    if dense_above is not None and not 0 <= dense_above <= 1:
        raise ValueError(f"dense_above must be in [0, 1], got {dense_above}; write 0.3 for 30 % non-zeros")
    linears = {name: module for name, module in model.named_modules() if _is_plain_linear(module)}
    sparse_already = any(isinstance(module, SparseLinear | CsrLinear) for module in model.modules())
    if not linears and not sparse_already:
        raise ValueError(f"{type(model).__name__} has no linear layers (nn.Linear, Conv1D), so none can become sparse")
    for name, module in linears.items():
        weight = module.get_parameter("weight")
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(
                f"'{name}.weight' is {weight.dtype} on {weight.device}, the sparse kernel computes in float32 on the "
                "CPU; call model.float().cpu() first"
            )
    found = sparse_kernel.find()
    make = CsrLinear if isinstance(found, str) else SparseLinear
    if isinstance(found, str) and linears:
        warnings.warn(f"no compiled sparse kernel: {found}; torch.sparse takes its place and gains less", stacklevel=2)
    shares = {name: int(_matrix(one).count_nonzero()) / max(1, _matrix(one).numel()) for name, one in linears.items()}
    if dense_above is not None:
        names = {name for name, share in shares.items() if share <= dense_above}
    else:
        shapes = {name: _matrix(module).shape for name, module in linears.items()}
        candidates = {
            name: Candidate(rows * columns, shares[name], calibration.limit(make, rows, columns, tokens))
            for name, (rows, columns) in shapes.items()
        }
        names = choose(candidates, blocks_of(model) if make.computes_together else ())
    chosen = [module for name, module in linears.items() if name in names]
    # deepcopy uses what its memo holds for a module instead of copying it, so the sparse layers take the place of the
    # dense ones wherever these are referred to, and the dense weights are not copied.
    memo: dict[int, object] = {}
    for module, (activation, name) in _followed_by(model, chosen).items():
        memo[id(activation)] = nn.Identity()
        memo[id(module)] = _made(make, module, name)
    for module in chosen:
        if id(module) not in memo:
            memo[id(module)] = _made(make, module, "none")
    fast = copy.deepcopy(model, memo)
    skip_fast_paths(fast.modules())
    fast.eval().requires_grad_(False)
    fuse(fast)
    if hasattr(fast, "save_pretrained"):
        from platon.deploy.storage import save_with_manifest  # imports transformers, which other models do without

        save_with_manifest(fast)
    return fast


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether this is an nn.Linear or a Conv1D that can be replaced: no hooks, and no subclass but `compact`'s own."""
    plain = type(module) in (nn.Linear, DenseLinear) or (type(module).__name__ == "Conv1D" and is_conv1d(module))
    return (plain or _gathers(module)) and not is_hooked(module)


def _gathers(module: nn.Module) -> bool:
    """Whether `compact` made this layer read some of the features that it is given."""
    return type(module).__module__.startswith("platon.") and hasattr(module, "gathers_columns")


def _matrix(module: nn.Module) -> Tensor:
    """The weights as [rows, columns], whichever way they are stored."""
    weight = module.get_parameter("weight")
    return weight if isinstance(module, nn.Linear) else weight.t()


def _whole(module: nn.Module) -> Tensor:
    """The same with a column for every feature that the layer is given: zeros where it does not read it."""
    weight = _matrix(module)
    if not _gathers(module):
        return weight
    return weight.new_zeros(weight.shape[0], width_in(module)).index_copy_(1, inputs_of(module), weight.detach())


def _made(make: type[SparseLinear] | type[CsrLinear], module: nn.Module, activation: str) -> nn.Module:
    bias = module.get_parameter("bias") if getattr(module, "bias", None) is not None else None
    return make(_whole(module), bias, activation)


# --- activations that become part of the layer before them -----------------------------------------------------------


def _followed_by(model: nn.Module, chosen: list[nn.Module]) -> dict[nn.Module, tuple[nn.Module, str]]:
    """The activation that follows a layer and nothing else, for each chosen layer with one that the kernel can compute.

    Candidates are modules that contain one activation and one or two linear layers. A trial on random tokens then has
    to show that the module computes act(first(x)) or second(act(first(x))).
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    wanted = {id(module) for module in chosen}
    found: dict[nn.Module, tuple[nn.Module, str]] = {}
    for module in model.modules():
        children = [child for child in module.children() if not isinstance(child, nn.Dropout | nn.Identity)]
        linears = [child for child in children if _is_plain_linear(child)]
        others = [child for child in children if not _is_plain_linear(child)]
        if len(others) != 1 or len(linears) not in (1, 2) or id(linears[0]) not in wanted:
            continue
        first, activation = linears[0], others[0]
        name = _activation_name(activation)
        if name and uses[id(first)] == uses[id(activation)] == 1 and _computes(module, linears, activation):
            found[first] = (activation, name)
    return found


def _activation_name(module: nn.Module) -> str | None:
    """The name of the activation that a module computes, found by trying it on numbers; `None`: another one."""
    if next(iter(_tensors(module)), None) is not None:
        return None
    try:
        out = module(_PROBE.clone())
    except Exception:  # not an activation: it takes another kind of input
        return None
    if not isinstance(out, Tensor) or out.shape != _PROBE.shape:
        return None
    known = (name for name in ("gelu", "gelu_tanh", "relu") if torch.allclose(out, ACTIVATE[name](_PROBE), 1e-5, 1e-6))
    return next(known, None)


def _computes(module: nn.Module, linears: list[nn.Module], activation: nn.Module) -> bool:
    """Whether the module computes its first linear, the activation, and its second linear if it has one."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in _tensors(module)}
    trial = copy.deepcopy(module, shared).eval()  # a copy, so that the model stays in its mode; the weights are shared
    x = torch.randn(3, width_in(linears[0]), generator=torch.Generator().manual_seed(0))
    try:
        out = trial(x.clone())
        expected = activation(linears[0](x))
        if len(linears) == 2:
            expected = linears[1](expected)
    except Exception:  # it takes other inputs, or its layers do not follow each other
        return False
    return isinstance(out, Tensor) and out.shape == expected.shape and torch.allclose(out, expected, 1e-5, 1e-6)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
