"""The processes of one job: what torchrun or `accelerate launch` start to train one model together.

The first of them owns the run folder: it alone claims it, looks through it and writes to it, and tells the others what
it found. What goes wrong there goes wrong for all, in the same sentence, which only the first says aloud.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from platon.lab.errors import UserError


class Told(UserError):  # noqa: N818  # it is the first one's error
    """What the first process of a job has said already."""


class Gone(UserError):  # noqa: N818  # the name says what is wrong
    """Another process of the job has ended, and this one cannot go on by itself."""


def rank() -> int:
    """Which process of its job this is; the first is 0."""
    return dist.get_rank() if size() > 1 else 0


def size() -> int:
    """How many processes the job has, once they have met."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process writes."""
    return rank() == 0


def join() -> None:
    """Meet the other processes of the job, if there are any; training goes on in the same group."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and size() == 1:
        from accelerate import PartialState

        PartialState(cpu=not torch.accelerator.is_available())


def part() -> None:
    """Take leave of the others, once all are done."""
    if size() > 1:
        wait()
        dist.destroy_process_group()


def wait() -> None:
    """Until all processes are here."""
    if size() > 1:
        with _together():
            dist.all_reduce(_number(0))


def most(number: int) -> int:
    """The highest of the processes' numbers."""
    if size() == 1:
        return number
    with _together():
        found = _number(number)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


@contextlib.contextmanager
def first_alone() -> Iterator[bool]:
    """For what one process does for all; gives whether this is the one. The others wait, and stop if it fails."""
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
        heard = _broadcast(sentence)
    if heard and not is_first():
        raise Told(heard)


def _broadcast(text: str) -> str:
    """What the first process says; bytes and no pickle."""
    if size() == 1:
        return text
    with _together():
        said = text.encode()
        length = _number(len(said) if is_first() else 0)
        dist.broadcast(length, 0)
        letters = torch.zeros(int(length), dtype=torch.uint8, device=length.device)
        if is_first():
            letters.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else letters)
        if len(letters):
            dist.broadcast(letters, 0)
    return bytes(letters.cpu().numpy()).decode()


def _number(number: int) -> torch.Tensor:
    # A group that talks through accelerators takes nothing from main memory.
    here = torch.device("cpu") if "gloo" in dist.get_backend() else torch.accelerator.current_accelerator()
    return torch.tensor(number, dtype=torch.int64, device=here)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Gone(f"another process of this job has ended: {str(error).splitlines()[0]}") from error
