"""Checkpoints of a pruner: its tensors, for one process or for any number of ranks, and checks of what is read."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from platon.engine.matrix import Matrix
from platon.engine.ranking.bits import pack, unpack
from platon.engine.ranking.ranking import Ranking
from platon.engine.schedule import checked_count, checked_keep
from platon.engine.shard import laid_out_as, own_rows
from platon.engine.store import Store

FORMAT = 2


def local_tensors(ranking: Ranking, store: Store) -> dict[str, Tensor]:
    """What a checkpoint must hold, as it is in this process; nothing is copied."""
    held = {f"{p.name}:{key}": tensor for p in ranking.pools for key, tensor in {**p.state, "mask": p.bits}.items()}
    return held | store.tensors()


def full_tensors(ranking: Ranking, store: Store) -> dict[str, Tensor]:
    """The same for any number of ranks: in a parameter's shape and sharded as it is, masks as bools."""
    matrices = _by_weight(ranking)
    kept = {f"{pool.name}:mask": pool.kept() for pool in ranking.pools}
    return {
        name: laid_out_as(matrices[name].parameter, kept.get(name, tensor)) if name in matrices else tensor
        for name, tensor in local_tensors(ranking, store).items()
    }


def own_tensors(ranking: Ranking, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What belongs to this process, of tensors in either of the two forms."""
    found = dict(given)
    for name, matrix in _by_weight(ranking).items():
        tensor = found.get(name)
        if tensor is None or not _is_dense(tensor) or not tensor.dim():
            continue
        if name.endswith(":mask") and tensor.dtype == torch.uint8:
            if matrix.size == matrix.total or 8 * tensor.numel() < matrix.total:
                continue
            tensor = unpack(tensor, matrix.total)
        own = own_rows(matrix.parameter, tensor)
        found[name] = pack(own.reshape(-1).clone()) if own.dtype == torch.bool else own
    return found


def _by_weight(ranking: Ranking) -> dict[str, Matrix]:
    """The names of tensors with one number a weight, and the matrix of these weights."""
    places = [(pool, pool.matrix) for pool in ranking.pools if pool.matrix is not None]
    found = {f"{pool.name}:mask": matrix for pool, matrix in places}
    found |= {f"{pool.name}:{key}": matrix for pool, matrix in places for key in pool.state if pool.state[key].dim()}
    return found | {f"{matrix.name}:full": matrix for matrix in ranking.matrices}


def checked(given: Mapping[str, Any], mine: Mapping[str, Any], ranking: Ranking) -> Mapping[str, Any]:
    """`given` with the tensors that belong to this process; a ValueError says why it does not fit."""
    try:
        if not isinstance(given, Mapping):
            raise ValueError(f"it is of type {type(given).__name__}, not the mapping that state_dict() gives")
        if isinstance(given.get("tensors"), Mapping):
            given = {**given, "tensors": own_tensors(ranking, given["tensors"])}
        _check_fit(given, mine)
        _check_numbers(given, mine["steering"], ranking.total)
        bits = [given["tensors"][f"{pool.name}:mask"].to(pool.bits.device) for pool in ranking.pools]
        kept = ranking.count([unpack(own, pool.count) for own, pool in zip(bits, ranking.pools, strict=True)])
        if kept != given["kept_count"]:
            raise ValueError(f"its masks keep {kept:,} weights, but kept_count is {given['kept_count']:,}")
    except ValueError as error:
        raise ValueError(f"this state does not fit the pruner: {error}") from None
    return given


def _check_fit(given: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise an error that names the first thing that keeps a pruner from loading `given`."""
    if given.get("format", FORMAT) != FORMAT:
        raise ValueError(f"its format is {given['format']!r}, this version of platon reads {FORMAT}")
    missing = next((key for key in mine if key not in given), None)
    if missing:
        raise ValueError(f"it has no {missing!r}, so it is not a whole pruner state")
    for key in ("settings", "shapes", "tensors", "steering"):
        if not isinstance(given[key], Mapping):
            raise ValueError(f"{key} must be a mapping of names, got {given[key]!r}")
    for key in ("method", "units"):
        if given[key] != mine[key]:
            raise ValueError(f"{key} is {given[key]!r} in the state and {mine[key]!r} in the pruner")
    for key, what in (("settings", "setting"), ("shapes", "parameter")):
        ours, theirs = mine[key], given[key]
        for name in {**ours, **theirs}:
            if name not in theirs or name not in ours:
                raise ValueError(f"{what} {name!r} is only in the {'pruner' if name in ours else 'state'}")
            if ours[name] != theirs[name]:
                raise ValueError(f"{what} {name!r} is {theirs[name]!r} in the state and {ours[name]!r} in the pruner")
    for name, tensor in mine["tensors"].items():
        own = given["tensors"].get(name)
        if not isinstance(own, Tensor) or own.shape != tensor.shape or own.dtype != tensor.dtype:
            found = f"{own.dtype} {tuple(own.shape)}" if isinstance(own, Tensor) else "missing"
            raise ValueError(
                f"tensor {name!r} is {found} in the state and {tensor.dtype} {tuple(tensor.shape)} in the pruner"
            )
        if not _is_dense(own):
            raise ValueError(f"tensor {name!r} is not a dense tensor with numbers in memory")
        if own.is_floating_point() and not bool(own.isfinite().all()):
            raise ValueError(f"tensor {name!r} holds a number that is NaN or infinite")


def _is_dense(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta


def _check_numbers(given: Mapping[str, Any], steering: Mapping[str, float], total: int) -> None:
    """Raise an error that names the first single number that is not what it must be."""
    checked_count(given["step_count"], "step_count")
    checked_count(given["skipped_count"], "skipped_count")
    checked_count(given["kept_count"], "kept_count", most=total)
    checked_keep(given["keep"])
    if sorted(given["steering"]) != sorted(steering):
        raise ValueError(f"steering must hold the numbers {', '.join(steering)}, got {given['steering']!r}")
    numbers = {f"steering {name}": given["steering"][name] for name in steering}
    if given["cut"] is not None:
        numbers["cut"] = given["cut"]
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ValueError(f"{name} must be a number, got {value!r}")
