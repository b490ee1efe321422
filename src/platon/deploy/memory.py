"""Measures what loading and running a saved model adds to the memory of a process: `python -m platon.deploy.memory`.

The packages are imported once; each model then runs in a process of its own, forked before anything else happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_STATUS, _MAPS = Path("/proc/self/status"), Path("/proc/self/maps")
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14


def peak() -> int:
    """The most memory that this process has held, in bytes."""
    if _STATUS.exists():  # of this process alone; getrusage includes the peak of the process that started it
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def held() -> int:
    """The memory that this process holds now, in bytes; without /proc, its peak."""
    return _status("VmRSS") if _STATUS.exists() else peak()


def added(run: Callable[[], object]) -> dict[str, int]:
    """What a function adds to the memory of a new process: at its end, and at the most."""
    before = held()
    _forget_peak()
    kept = run()  # kept: what it returns belongs to what it adds
    found = {"added_bytes": held() - before, "peak_bytes": peak() - before}
    del kept
    return found


def measure(models: Sequence[tuple[str, Path, Path]], batch: Mapping[str, Any], threads: int) -> list[dict[str, Any]]:
    """For each engine and model, the bytes that loading and running it adds, or an error; one new process for all.

    Args:
        models: an engine, the folder of the model, and a folder with the engine's files.
        batch: what is run.
        threads: of torch.
    """
    with TemporaryDirectory() as place:
        file = Path(place) / "batch.safetensors"
        save_file(dict(batch), file)
        words = (str(word) for one in models for word in one)
        command = [sys.executable, "-m", "platon.deploy.memory", str(file), str(threads), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = " ".join(done.stderr.strip().rpartition("\n")[2].split())[:200] or "it ended early"
    return found + [{"error": said}] * (len(models) - len(found))


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def _forget_peak() -> None:
    """Let the peak start from what is held now, where Linux allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _map_libraries() -> None:
    """Bring the pages of all files that are mapped by now into this process.

    A forked process has none of them: code that it runs for the first time would count as memory of the model, and how
    much of a library comes in at once depends on the kernel.
    """
    libc = ctypes.CDLL(None)
    for line in _MAPS.read_text().splitlines() if _MAPS.exists() else []:
        fields = line.split(maxsplit=5)  # addresses, permissions, …, file
        if len(fields) == 6 and fields[5].startswith("/") and fields[1].startswith("r"):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_READ)


def _in_a_child(run: Callable[[], object]) -> dict[str, Any]:
    """What `run` adds to a process that is forked for it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _map_libraries()
        try:
            found: dict[str, Any] = dict(added(run))
        except Exception as error:  # the other models are measured all the same
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else {"error": "the process was killed, perhaps for want of memory"}


def _import_class(folder: Path) -> None:
    """Import the model's class, so that the memory of its code is not counted."""
    import transformers

    with contextlib.suppress(OSError, ValueError, AttributeError, IndexError, TypeError):
        getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])


def main(file: str, threads: str, *models: str) -> None:
    """Print a line of JSON for each engine, folder and place."""
    warnings.simplefilter("ignore")
    from platon.deploy.engine import ENGINES, Subject
    from platon.deploy.loading import opened

    torch.set_num_threads(int(threads))
    batch = load_file(file)
    for folder in models[1::3]:
        _import_class(Path(folder))

    def run(engine: str, folder: Path, place: Path) -> object:
        with torch.inference_mode():
            call = ENGINES[engine](Subject(partial(opened, folder), batch, batch, place)).call
            return call, call(batch)

    for engine, folder, place in zip(models[::3], models[1::3], models[2::3], strict=True):
        one = partial(run, engine, Path(folder), Path(place))
        print(json.dumps(_in_a_child(one) if hasattr(os, "fork") else added(one)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
