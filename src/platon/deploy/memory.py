"""Measures the peak memory of running one saved model, in a new process: `python -m platon.deploy.memory`."""

from __future__ import annotations

import resource
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from platon.deploy.loading import load
from platon.deploy.speed import ENGINES


def peak() -> int:
    """The most memory that this process has held, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # of this process alone; getrusage includes the peak of the process that started it
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(engine: str, folder: str, file: str, place: str, threads: str) -> None:
    """Load the model, run it on the batch in the file, and print the peak in bytes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(threads))
    batch = load_file(file)
    with torch.inference_mode():
        ENGINES[engine](partial(load, Path(folder)), batch, Path(place))(batch)
    print(peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
