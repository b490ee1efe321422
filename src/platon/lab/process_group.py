"""The processes that torchrun or `accelerate launch` start to train one model together.

The first process (rank 0) owns the run folder: it alone claims it, reads it and writes to it, and sends the others what
they need to know. An error there ends all processes; only the first prints it.

torch is imported where there is a group: commands that check a run folder need not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from platon.lab.errors import UserError

if TYPE_CHECKING:
    import torch


class ReportedByFirst(UserError):  # noqa: N818  # the name says who prints it
    """An error of the first process, which prints it; the others only end."""


class ProcessLost(UserError):  # noqa: N818  # the name says what is wrong
    """Another process of the training has ended, so this one cannot go on."""


def rank() -> int:
    """The number of this process; the first is 0."""
    if count() == 1:
        return 0
    import torch.distributed as dist

    return dist.get_rank()


def count() -> int:
    """How many processes train together; 1 before `join`."""
    dist = sys.modules.get("torch.distributed")
    return dist.get_world_size() if dist is not None and dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    return rank() == 0


def join() -> None:
    """Form the process group if a launcher started several processes; Trainer uses the same group later."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and count() == 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.accelerator.is_available())


def leave() -> None:
    """Wait until all processes are done, then dissolve the group."""
    if count() > 1:
        import torch.distributed as dist

        wait_for_all()
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Block until every process has called this."""
    highest(0)


def highest(number: int) -> int:
    """The highest of the numbers that the processes give; all must call it."""
    if count() == 1:
        return number
    import torch.distributed as dist

    with _communicating():
        found = _on_device(number)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


@contextlib.contextmanager
def first_process_only() -> Iterator[bool]:
    """For work that the first process does for all. Gives True in the first process; the body must check it.

    The others wait at the end of the block. If the first process fails, they raise `ReportedByFirst`.
    """
    sentence = ""
    try:
        yield is_first()
    except UserError as error:
        sentence = str(error)
        raise
    except BaseException as error:
        sentence = f"{type(error).__name__}: {error}"
        raise
    finally:
        received = _broadcast(sentence)
    if received and not is_first():
        raise ReportedByFirst(received)


def _broadcast(text: str) -> str:
    """The first process's text, sent as bytes: torch's own way to send objects pickles them."""
    if count() == 1:
        return text
    import torch
    import torch.distributed as dist

    with _communicating():
        encoded = text.encode()
        length = _on_device(len(encoded) if is_first() else 0)
        dist.broadcast(length, 0)
        letters = torch.zeros(int(length), dtype=torch.uint8, device=length.device)
        if is_first():
            letters.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else letters)
        if len(letters):
            dist.broadcast(letters, 0)
    return bytes(letters.cpu().numpy()).decode()


def _on_device(number: int) -> torch.Tensor:
    import torch
    import torch.distributed as dist

    # Back ends other than gloo (NCCL) take tensors on an accelerator only.
    device = torch.device("cpu") if "gloo" in dist.get_backend() else torch.accelerator.current_accelerator()
    return torch.tensor(number, dtype=torch.int64, device=device)


@contextlib.contextmanager
def _communicating() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(f"another process of this training has ended: {str(error).splitlines()[0]}") from error
