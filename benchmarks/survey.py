"""Tries something with every model type of transformers, each in a process of its own; goes on where it was stopped."""

import argparse
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from platon.engine.proof.call import short

SECONDS, GIGABYTES = 120, 6  # of processor time and memory, for one type

Work = Callable[[str], dict[str, Any]]  # of a type: "type", "outcome", and what else there is to say


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what all surveys are asked."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument(
        "--results", type=Path, help="append a JSON line for each type to this file, and skip those in it"
    )
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of processor time for one type (%(default)s)")
    parser.add_argument("--here", action="store_true", help="run in this process, to see errors")
    return parser


def recorded(results: Path | None) -> list[dict[str, Any]]:
    """What a file of results holds; the last line of a type counts."""
    rows = map(json.loads, results.read_text().splitlines() if results and results.exists() else [])
    return list({row["type"]: row for row in rows}.values())


def each(work: Work, names: Iterable[str], results: Path | None, seconds: int, *, here: bool) -> list[dict[str, Any]]:
    """What comes of each type, with what was recorded before; printed, and recorded, as it comes."""
    known = recorded(results)
    done = {one["type"] for one in known}
    if not here:
        work("bert")  # so that the children need not import everything
    for name in names:
        if name in done:
            continue
        found = work(name) if here else _in_child(work, name, seconds)
        known.append(found)
        print(json.dumps(found), flush=True)
        if results:
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return known


def _in_child(work: Work, name: str, seconds: int) -> dict[str, Any]:
    """A function of one type in a process of its own, with limits of time and memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        signal.alarm(20 * seconds)  # one that waits for something
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
        try:
            found = work(name)
        except BaseException as error:  # a child says everything in one line, whatever happens
            found = {"type": name, "outcome": "failed", "why": short(error)}
        os.write(writing, json.dumps(found).encode()[:60000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if not said:
        late = os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL)
        return {"type": name, "outcome": "failed", "why": f"more than {seconds} s" if late else f"ended with {status}"}
    return dict(json.loads(said))
