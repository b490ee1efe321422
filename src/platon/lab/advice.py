"""Advice on settings: before a training that cannot work, and after one that did not."""

from __future__ import annotations

from math import ceil
from typing import Any

from platon.engine.methods import METHODS
from platon.engine.schedule import Cubic
from platon.lab.measure import Measure
from platon.lab.percent import percent
from platon.lab.settings import Settings
from platon.lab.step_count import StepCounts

# Below these a descent is too steep. With 18 steps and two masks BERT-like models predict one class for every row; the
# studies' shortest trainings that keep their accuracy have descents of 140 steps and more.
FEWEST_STEPS, FEWEST_MASKS, ENOUGH_STEPS = 50, 5, 150
FEWEST_ROWS = 30  # to validate on


def schedule_of(settings: Settings, steps: StepCounts) -> Cubic | None:
    """When which share is kept; `None` for a run without pruning or training, or with a fixed penalty."""
    if METHODS[settings.method].score is None or settings.penalty is not None or not steps.total:
        return None
    return Cubic(settings.keep, steps.total, steps.warmup, steps.cooldown, settings.every)


def before_training(settings: Settings, steps: StepCounts, validation_rows: int | None) -> list[str]:
    """What in the settings cannot work, one sentence each; `None` rows: the metric is not a share of the rows."""
    found = []
    schedule = schedule_of(settings, steps)
    if schedule is not None and schedule.final < 1:
        found += _about_descent(schedule, settings)
    if validation_rows is not None and validation_rows < FEWEST_ROWS:
        found.append(
            f"{validation_rows} rows to validate on: one of them is {100 / validation_rows:.0f} points; "
            "hold out more (--holdout) or give a validation file"
        )
    return found


def _about_descent(schedule: Cubic, settings: Settings) -> list[str]:
    length, found = schedule.end - schedule.start, []
    falls = f"the share falls from {percent(schedule.initial, 0)} to {percent(schedule.final, 0)}"
    masks = [step for step in range(max(schedule.start, 1), schedule.end) if schedule(step) is not None]
    shares = [schedule.share(step) for step in (*masks, schedule.end)]
    shares = [share for share in shares if share < schedule.initial]
    if len(shares) < min(FEWEST_MASKS, max(length, 1)):
        jumps = ", ".join(percent(share, 0) for share in shares)
        found.append(
            f"{falls} in {len(shares)} {'jump' if len(shares) == 1 else 'jumps'} (to {jumps}): masks come every "
            f"{settings.every} steps; give --every 1, or train for longer"
        )
    if length < FEWEST_STEPS:
        times = ENOUGH_STEPS / max(length, 1)
        longer = f"--steps {ceil(times * schedule.total)}"
        if settings.steps is None:
            longer = f"--epochs {ceil(times * settings.epochs)}"
        found.append(f"{falls} within {length} steps, too few to recover; train for longer, for example {longer}")
    return found


def after_training(record: dict[str, Any]) -> list[str]:
    """What to change after a run that did not converge, the likeliest first; nothing after one that did."""
    reason = record["not_converged"]
    if not reason:
        return []
    value = {name: one["value"] for name, one in record["settings"].items()}
    rate = f"--learning-rate {value['learning_rate'] / 3:.1g} (it was {value['learning_rate']:g})"
    if "finite" in reason:
        half = value.get("precision") == "fp16"
        return [f"learn more slowly: {rate}", *(["--precision bf16 or float32 instead of fp16"] if half else [])]
    longer = f"--steps {3 * value['steps']}" if value["steps"] else f"--epochs {3 * value['epochs']:g}"
    if record.get("decided_by") is None:  # nothing was pruned
        return [f"train for longer: {longer}", f"another learning rate, for example {rate}", "check the labels"]
    advice = [f"train for longer: {longer}"]
    if value["keep"] < 0.5 and record.get("decided_by") == "keep":
        advice.append(f"keep more: --keep {min(0.5, 2 * value['keep']):g} (it was {value['keep']:g})")
    if record["dense"] is None:
        advice.append("see whether it learns without pruning: --dense first trains that, and starts from it")
    elif _is_no_better(record["dense"]["results"], record):
        return [f"the dense twin learned nothing either: {advice[0]}", "check the labels and the learning rate"]
    return advice


def _is_no_better(results: dict[str, dict[str, float]], record: dict[str, Any]) -> bool:
    """Whether these results are no better than the best constant answer."""
    split, metric = next(iter(record["results"])), record["metrics"][0]
    return not Measure(metric).is_better(results[split][metric], record["chance"][split][metric])
