"""Reads a run's files for the report: checks them, and fills in what older versions did not write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from platon.lab.record import HISTORY, RunFolder, UserError, read_history, read_record
from platon.report import paper

# What the methods of platon 0.1 read. Their records have no `method_settings`.
_AVERAGES = ("scope", "beta1", "beta2", "window", "timing")
_LEARNED = ("scope", "score_learning_rate", "score_init")
_PENALISED = (*_LEARNED, "penalty", "min_keep_per_matrix")
OLD_METHOD_SETTINGS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "magnitude": ("scope",),
    "movement": _LEARNED,
    "soft-movement": (*_PENALISED, "tau"),
    "l0": _PENALISED,
    "sensitivity": _AVERAGES,
    "uncertainty": _AVERAGES,
    "ratio": _AVERAGES,
    "platon": (*_AVERAGES, "exponent"),
}
_EVERY_SETTING = tuple(dict.fromkeys(name for names in OLD_METHOD_SETTINGS.values() for name in names))


def load_record(folder: Path) -> dict[str, Any]:
    """The record of a finished run, with every entry that the report reads; a `UserError` if one is missing."""
    record = read_record(folder)
    wrong = _wrong_entry(record)
    if wrong is not None:
        path = str(RunFolder(folder).record)
        raise UserError(f"{path!r} is half a record: {wrong} is missing or damaged; run it again, or remove it")
    return _completed(record)


def _completed(record: dict[str, Any]) -> dict[str, Any]:
    """Adds what older versions of platon did not write."""
    method, settings = record["method"], record["settings"]
    by_penalty = settings.get("penalty", {}).get("value") is not None  # a penalty that was given decides the share
    defaults = {
        "title": paper.titles().get(method, method),
        "method_settings": OLD_METHOD_SETTINGS.get(method, _EVERY_SETTING),
        "decided_by": None if method == "dense" else "penalty" if by_penalty else "keep",
    }
    return defaults | record


def _wrong_entry(record: dict[str, Any]) -> str | None:
    """The first entry that is missing or not of the type that the report relies on."""
    texts = {"task": str, "method": str, "recipe": str | None}
    optional = {"title": str, "method_settings": list | dict, "data": dict, "versions": dict, "seconds": int | float}
    for name, kind in (texts | {name: kind for name, kind in optional.items() if name in record}).items():
        if not isinstance(record.get(name), kind):
            return repr(name)
    settings = record.get("settings")
    if not isinstance(settings, dict) or not all(map(_is_setting, settings.values())):
        return "'settings'"
    if not isinstance(settings.get("seed", {}).get("value"), int):
        return "the setting 'seed'"
    share_needed = record["method"] != "dense" and settings.get("penalty", {}).get("value") is None
    if share_needed and not _is_number(settings.get("keep", {}).get("value")):
        return "the setting 'keep'"
    return _wrong_result(record)


def _wrong_result(record: dict[str, Any]) -> str | None:
    results, metrics = record.get("results"), record.get("metrics")
    if not isinstance(results, dict) or not results or not all(_are_numbers(found) for found in results.values()):
        return "'results'"
    if not isinstance(metrics, list) or not metrics or metrics[0] not in next(iter(results.values())):
        return "'metrics'"
    if "not_converged" not in record or not isinstance(record["not_converged"], str | None):
        return "'not_converged'"
    if not _is_number(record.get("kept")):
        return "'kept'"
    if not isinstance(record.get("layers"), dict) or not all(map(_is_number, record["layers"].values())):
        return "'layers'"
    parameters = record.get("parameters")
    if not isinstance(parameters, dict) or not isinstance(parameters.get("prunable"), int):
        return "'parameters'"
    return None


def _is_setting(value: Any) -> bool:
    return isinstance(value, dict) and "value" in value and isinstance(value.get("source", ""), str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _are_numbers(found: Any) -> bool:
    return isinstance(found, dict) and bool(found) and all(map(_is_number, found.values()))


def read_lines(folder: Path, name: str = HISTORY) -> list[dict[str, Any]]:
    """The lines of a run's history or probe file; none if there is no such file.

    Raises:
        UserError: a line is no JSON object with a step, or one of its values is not a number where figures need one.
    """
    lines = read_history(folder, name)
    for line in lines:
        if not isinstance(line, dict) or not _is_number(line.get("step")):
            raise damaged(folder / name, line)
        if not all(_is_number(line[key]) for key in line if key in ("loss", "kept") or key.startswith("eval_")):
            raise damaged(folder / name, line)
    return lines


def damaged(path: Path, line: Any) -> UserError:
    """The error for a line that platon did not write."""
    shown = str(line)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
    return UserError(f"{str(path)!r} is damaged: its line {shown!r} is not one that platon writes; remove it")
