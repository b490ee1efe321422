"""`sparsify`: a copy of a pruned model whose linear layers skip zeros, where that makes them faster."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn

from platon.deploy import calibration, sparse_kernel
from platon.deploy.activation import followers
from platon.deploy.choice import Candidate, blocks_of, choose
from platon.deploy.dense_layer import DenseLinear
from platon.deploy.layer import CsrLinear, SparseLinear
from platon.deploy.outline import is_hooked
from platon.deploy.replacement import skip_fast_paths
from platon.deploy.sparse_fusion import fuse
from platon.engine.proof.linear import inputs_of, width_in
from platon.engine.topology import is_conv1d


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
    for module, (activation, name) in followers(model, chosen).items():
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
