"""Sweeps: products of settings, each combination a run of its own in a process of its own.

A sweep file is TOML. `[settings]` holds for all runs; each `[[product]]` gives settings a value or a list of values,
and every combination is a run. `recipe`, `model` and `data` may name `{task}`, `{method}`, `{seed}` and `{ratio}`, the
share kept in percent.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from platon.lab.errors import UserError, nearest
from platon.lab.folder import STARTED, read_started
from platon.lab.record import RECORD
from platon.lab.settings import FIELDS, Sourced, resolve

LOCK = ".sweep.lock"
_NAMED = ("task", "method", "keep", "penalty", "seed", "recipe")  # what a run's name says in words of its own
_TEMPLATES = ("recipe", "model", "data")


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a sweep.

    Args:
        name: its place below the sweep's folder.
        folder: that place.
        recipe: the recipe's name, if any.
        flags: the settings that the sweep gives it.
    """

    name: str
    folder: Path
    recipe: str | None
    flags: Mapping[str, Any]

    @property
    def sourced(self) -> Sourced:
        """All of its settings."""
        return resolve(self.recipe, None, self.flags)

    @property
    def finished(self) -> bool:
        """Whether there is a record."""
        return (self.folder / RECORD).exists()

    def words(self) -> list[str]:
        """The command that runs it, or goes on with it."""
        command = [sys.executable, "-m", "platon", "prune", "--output", str(self.folder)]
        if (self.folder / STARTED).exists():
            return [*command, "--resume"]
        said = [] if self.recipe is None else ["--recipe", self.recipe]
        for name, value in self.flags.items():
            option = f"--{name.replace('_', '-')}"
            if value is True:
                said.append(option)
            elif value is False:
                said += [f"--no-{option[2:]}"] if FIELDS[name].default is True else []
            else:
                said += [option, str(value)]
        return [*command, *said]

    def log(self, folder: Path) -> Path:
        """Where its output goes, in the sweep's folder."""
        return folder / "logs" / f"{self.name.replace('/', '-')}.log"


def shipped() -> dict[str, Path]:
    """The sweeps that come with the package: the paper's tables."""
    place = Path(str(files("platon.lab") / "sweeps"))
    return {path.stem: path for path in sorted(place.glob("*.toml"))}


def title(path: Path) -> str:
    """What a sweep file says it is."""
    return str(tomllib.loads(path.read_text(encoding="utf-8")).get("title", ""))


def read(source: str, folder: Path) -> list[Job]:
    """The runs of a sweep file, or of a sweep that comes with the package; all settings are checked here."""
    path = Path(source)
    if not path.exists():
        found = shipped()
        if source not in found:
            raise UserError(
                f"there is no sweep file {source!r}, and none of that name comes with platon{nearest(source, found)}"
            )
        path = found[source]
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read sweep file {str(path)!r}: {error}") from None
    products = text.get("product", [])
    shared = text.get("settings", {})
    known = {"product", "settings", "title"}
    if not isinstance(products, list) or not products or not isinstance(shared, dict) or text.keys() - known:
        raise UserError(f"{str(path)!r} is no sweep: it needs [[product]] tables, and may have [settings] and a title")
    jobs: dict[str, Job] = {}
    for product in products:
        for name in (*shared, *product):
            if name not in FIELDS and name != "recipe":
                raise UserError(f"{str(path)!r} has a setting {name!r} that is not known{nearest(name, FIELDS)}")
        for job in _jobs(shared, product, folder):
            same = jobs.setdefault(job.name, job)
            if (same.recipe, same.flags) != (job.recipe, job.flags):
                raise UserError(f"{str(path)!r} gives two different runs the name {job.name!r}; put them in two sweeps")
    for job in jobs.values():
        _checked(job)
    # Seed by seed: a sweep that is stopped early has whole tables of the first ones.
    return sorted(jobs.values(), key=lambda job: int(job.flags.get("seed", FIELDS["seed"].default)))


def _jobs(shared: Mapping[str, Any], product: Mapping[str, Any], folder: Path) -> Iterator[Job]:
    choices = [value if isinstance(value, list) else [value] for value in product.values()]
    for values in itertools.product(*choices):
        flags = {**shared, **dict(zip(product, values, strict=True))}
        task, method, seed = (flags.get(name, FIELDS[name].default) for name in ("task", "method", "seed"))
        if method == "dense":  # the same whatever the share
            flags = {name: value for name, value in flags.items() if name not in ("keep", "penalty")}
        keep = dict(zip(product, values, strict=True)).get("keep", shared.get("keep"))
        ratio = None if keep is None else f"{100 * keep:g}" if isinstance(keep, int | float) else str(keep)
        words = {"task": task, "method": method, "seed": seed, "ratio": ratio}
        flags |= {name: _filled(name, flags[name], words) for name in _TEMPLATES if name in flags}
        recipe = flags.pop("recipe", None)
        share = f"penalty{flags['penalty']:g}" if flags.get("penalty") is not None else ratio
        rest = [f"{name}={flags[name]}" for name in product if name in flags and name not in _NAMED]
        parts = [method, *([] if method == "dense" or share is None else [share]), *rest]
        parts.append(f"seed{seed}")
        name = f"{task}/{'-'.join(str(part).replace('/', '_') for part in parts)}"
        yield Job(name, folder / name, recipe, flags)


def _filled(name: str, template: Any, words: Mapping[str, Any]) -> str:
    try:
        return str(template).format(**words)
    except (KeyError, IndexError, ValueError):
        allowed = " and ".join(", ".join(f"{{{word}}}" for word in words).rsplit(", ", 1))
        raise UserError(f"{name} {template!r} may name {allowed}, and nothing else") from None


def _checked(job: Job) -> None:
    """Refuse a run that its settings or its folder make impossible, before any run starts."""
    try:
        wanted = job.sourced
    except UserError as error:
        raise UserError(f"run {job.name!r}: {error}") from None
    if (job.folder / STARTED).exists():
        theirs, ours = read_started(job.folder).plain(), wanted.plain()
        other = next((name for name in ours if theirs[name]["value"] != ours[name]["value"]), None)
        if other is not None:
            raise UserError(
                f"{str(job.folder)!r} holds a run with {other} {theirs[other]['value']!r}, the sweep says "
                f"{ours[other]['value']!r}; choose another --output"
            )


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """One sweep at a time in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another sweep works on {str(folder)!r}; wait for it or choose another --output") from None
        yield


def environment(workers: int) -> dict[str, str]:
    """Of a run: the cores are divided among those that run at once, unless the user divided them already."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    return {"OMP_NUM_THREADS": str(threads), **os.environ}
