"""Sweep files: which trials a sweep has. A trial is one run with one combination of settings.

A sweep file is TOML. `[settings]` holds for all trials; each `[[product]]` gives settings a value or a list of values,
and every combination is a trial. `recipe`, `model` and `data` may contain `{task}`, `{method}`, `{seed}` and `{ratio}`,
the share kept in percent.
"""

from __future__ import annotations

import itertools
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from platon.lab.claim import read_started
from platon.lab.errors import UserError, nearest
from platon.lab.folder import RunFolder
from platon.lab.settings import FIELDS, ResolvedSettings, resolve

_NAMED = ("task", "method", "keep", "penalty", "seed", "recipe")  # settings with a place of their own in a trial's name
_TEMPLATES = ("recipe", "model", "data")


@dataclass(frozen=True, eq=False)
class Trial:
    """One run of a sweep.

    Args:
        name: its path below the sweep's folder.
        folder: its run folder.
        recipe: the recipe's name, if any.
        flags: the settings that the sweep file gives it.
    """

    name: str
    folder: Path
    recipe: str | None
    flags: Mapping[str, Any]

    @property
    def resolved(self) -> ResolvedSettings:
        """All of its settings."""
        return resolve(self.recipe, None, self._flags)

    @property
    def _flags(self) -> dict[str, Any]:
        """A sweep compares results: its runs write and measure no fast model unless the file says so."""
        return {"fast": False, **self.flags}

    @property
    def is_finished(self) -> bool:
        return RunFolder(self.folder).is_finished

    def command(self) -> list[str]:
        """The command that starts the run, or resumes it."""
        command = [sys.executable, "-m", "platon", "prune", "--output", str(self.folder)]
        if RunFolder(self.folder).is_started:
            return [*command, "--resume"]
        options = [] if self.recipe is None else ["--recipe", self.recipe]
        for name, value in self._flags.items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                # False is said too: a recipe may say True.
                options.append(f"--{option}" if value else f"--no-{option}")
            else:
                options += [f"--{option}", str(value)]
        return [*command, *options]

    def log(self, folder: Path) -> Path:
        """The file in the sweep's folder that its output goes to."""
        return folder / "logs" / f"{self.name.replace('/', '-')}.log"


def packaged() -> dict[str, Path]:
    """The sweeps that come with the package: the paper's tables."""
    place = Path(str(files("platon.lab.sweep") / "paper"))
    return {path.stem: path for path in sorted(place.glob("*.toml"))}


def title(path: Path) -> str:
    """The title in a sweep file."""
    return str(tomllib.loads(path.read_text(encoding="utf-8")).get("title", ""))


def read(source: str, folder: Path) -> list[Trial]:
    """The trials of a sweep file, or of a packaged sweep, with run folders below `folder`; all settings are checked."""
    path = Path(source)
    if not path.exists():
        found = packaged()
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
    trials: dict[str, Trial] = {}
    for product in products:
        for name in (*shared, *product):
            if name not in FIELDS and name != "recipe":
                raise UserError(f"{str(path)!r} has a setting {name!r} that is not known{nearest(name, FIELDS)}")
        for trial in _trials(shared, product, folder):
            same = trials.setdefault(trial.name, trial)
            if (same.recipe, same.flags) != (trial.recipe, trial.flags):
                raise UserError(
                    f"{str(path)!r} gives two different runs the name {trial.name!r}; put them in two sweeps"
                )
    for trial in trials.values():
        _check(trial)
    # Sorted by seed, so that a sweep that is stopped early has complete tables for the first seeds.
    return sorted(trials.values(), key=lambda trial: int(trial.flags.get("seed", FIELDS["seed"].default)))


def _trials(shared: Mapping[str, Any], product: Mapping[str, Any], folder: Path) -> Iterator[Trial]:
    choices = [value if isinstance(value, list) else [value] for value in product.values()]
    for values in itertools.product(*choices):
        flags = {**shared, **dict(zip(product, values, strict=True))}
        task, method, seed = (flags.get(name, FIELDS[name].default) for name in ("task", "method", "seed"))
        keep = flags.get("keep")
        if method == "dense":  # a dense training does not depend on the share
            flags = {name: value for name, value in flags.items() if name not in ("keep", "penalty")}
        ratio = None if keep is None else f"{100 * keep:g}" if isinstance(keep, int | float) else str(keep)
        words = {"task": task, "method": method, "seed": seed, "ratio": ratio}
        flags |= {name: _filled(name, flags[name], words) for name in _TEMPLATES if name in flags}
        recipe = flags.pop("recipe", None)
        share = f"penalty{flags['penalty']:g}" if flags.get("penalty") is not None else ratio
        others = [f"{name}={flags[name]}" for name in product if name in flags and name not in _NAMED]
        parts = [method, *([] if method == "dense" or share is None else [share]), *others]
        parts.append(f"seed{seed}")
        name = f"{task}/{'-'.join(str(part).replace('/', '_') for part in parts)}"
        yield Trial(name, folder / name, recipe, flags)


def _filled(name: str, template: Any, words: Mapping[str, Any]) -> str:
    try:
        return str(template).format(**words)
    except (KeyError, IndexError, ValueError):
        allowed = " and ".join(", ".join(f"{{{word}}}" for word in words).rsplit(", ", 1))
        raise UserError(f"{name} {template!r} may name {allowed}, and nothing else") from None


def _check(trial: Trial) -> None:
    """Refuse, before any run starts, a trial with bad settings or whose folder holds a run with other settings."""
    try:
        wanted = trial.resolved
    except UserError as error:
        raise UserError(f"run {trial.name!r}: {error}") from None
    if RunFolder(trial.folder).is_started:
        theirs, ours = read_started(trial.folder).plain(), wanted.plain()
        other = next((name for name in ours if theirs[name]["value"] != ours[name]["value"]), None)
        if other is not None:
            raise UserError(
                f"{str(trial.folder)!r} holds a run with {other} {theirs[other]['value']!r}, the sweep says "
                f"{ours[other]['value']!r}; choose another --output"
            )
