"""Several processes: sums over ranks, and this rank's rows of a sharded parameter.

`fully_shard` cuts a parameter by its first dimension and gives each rank some rows, perhaps none. So a rank's weights
are a contiguous range of the parameter's flat positions, and the engine treats that range as it treats a whole matrix:
the state covers the same range, ties are decided by global positions, and only counts, a sample and candidates for the
cut are exchanged between ranks.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Ranks:
    """The processes that parameters are sharded over: a process group, or this process alone."""

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self.group = group

    @property
    def count(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def any(self, flags: Tensor) -> Tensor:
        """The flags that are set on at least one rank."""
        return flags if self.group is None else self.sum(flags.int()) > 0

    def gather(self, tensor: Tensor) -> Tensor:
        """The one-dimensional tensors of all ranks, of any lengths, concatenated."""
        if self.group is None:
            return tensor
        sizes = torch.zeros(self.count, dtype=torch.int64, device=tensor.device)
        sizes[dist.get_rank(self.group)] = tensor.numel()
        counts: list[int] = self.sum(sizes).tolist()
        parts = [tensor.new_empty(max(counts)) for _ in counts]
        padded = torch.nn.functional.pad(tensor, (0, max(counts) - tensor.numel()))
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


ALONE = Ranks()


def everyone() -> Ranks:
    """All processes of this training."""
    return Ranks(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else ALONE


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; by an attribute, because importing the class takes a second."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without gradients; a view."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def rows_of(parameter: Tensor) -> tuple[int, int]:
    """The first row that this rank has, and the one after its last."""
    count = parameter.shape[0] if parameter.dim() else 1
    if not is_sharded(parameter):
        return 0, count
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    each = -(-count // mesh.size())
    first = min(mesh.get_local_rank() * each, count)
    last = min(first + each, count)
    assert local(parameter).shape[0] == last - first, "torch cuts a dimension as `torch.chunk` does"
    return first, last


def laid_out_as(parameter: Tensor, mine: Tensor) -> Tensor:
    """This rank's numbers for a parameter as a tensor of the parameter's shape, sharded where it is; a view."""
    mine = mine.view(local(parameter).shape)
    if not is_sharded(parameter):
        return mine
    from torch.distributed.tensor import DTensor

    sharded: Any = parameter
    layout = {"device_mesh": sharded.device_mesh, "placements": sharded.placements, "run_check": False}
    return DTensor.from_local(mine.contiguous(), **layout, shape=parameter.shape, stride=parameter.detach().stride())


def own_rows(parameter: Tensor, given: Tensor) -> Tensor:
    """This rank's part of numbers for a whole parameter, which come in its shape, flat, or sharded as it is; flat."""
    if is_sharded(given):
        return local(given).reshape(-1) if given.shape == parameter.shape else given
    if given.numel() != parameter.numel() or given.dim() not in (1, parameter.dim()):
        return given  # for the caller to refuse
    first, last = rows_of(parameter)
    width = parameter.shape[1:].numel()
    return given.reshape(-1)[first * width : last * width]


def ranks_of(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Ranks:
    """The ranks that the parameters are sharded over; other ways to shard than by rows are refused."""
    _refuse_other_ways(model, parameters)
    sharded = [name for name, parameter in parameters.items() if is_sharded(parameter)]
    if not sharded:
        return ALONE
    mesh = parameters[sharded[0]].device_mesh  # type: ignore[attr-defined]
    for name, parameter in parameters.items():
        own: Any = parameter
        if name not in sharded:
            reason = f"is whole on each rank and {sharded[0]!r} is sharded"
            advice = "give all prunable matrices to fully_shard, or leave that one out with exclude"
        elif own.device_mesh.ndim != 1:
            reason = f"lies on a mesh of {own.device_mesh.ndim} dimensions"
            advice = "platon follows one: give fully_shard a one-dimensional mesh"
        elif own.device_mesh != mesh:
            reason, advice = "lies on a mesh of its own", "give fully_shard the same mesh for every module"
        elif not own.placements[0].is_shard(0):
            reason = f"is placed as {own.placements[0]}"
            advice = "platon follows Shard(0): leave shard_placement_fn out of fully_shard"
        else:
            continue
        raise ValueError(f"{name!r} {reason}; {advice}")
    return Ranks(mesh.get_group())


def _refuse_other_ways(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    first_version = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if first_version is not None and any(isinstance(module, first_version) for module in model.modules()):
        reason = "is wrapped in FullyShardedDataParallel, which flattens its matrices"
    elif any(hasattr(parameter, "ds_id") for parameter in parameters.values()):
        reason = "belongs to a DeepSpeed ZeRO-3 engine, which keeps the weights where platon cannot see them"
    else:
        return
    raise ValueError(f"the model {reason}; use torch.distributed.fsdp.fully_shard")


def reshard(model: nn.Module) -> None:
    """Reshard FSDP modules that an evaluation left unsharded; otherwise they keep using the old weights."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_forward"):
            module.reshard()  # type: ignore[operator]
