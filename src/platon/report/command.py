"""The command that repeats a run."""

from __future__ import annotations

import shlex

from platon.report.run import Run


def command(run: Run) -> str:
    """`platon prune` with the run's recipe, the settings that the user gave, and task, method, share and seed."""
    words = ["platon", "prune"]
    if run.record.get("recipe"):
        words += ["--recipe", run.record["recipe"]]
    by_penalty = run.record["decided_by"] == "penalty"
    for name, said in run.record["settings"].items():
        value = said["value"]
        needed = name in ("task", "method", "seed") or (name == "keep" and run.has_share)
        given = needed or said.get("source") == "user"
        if value is None or not given or (name == "keep" and by_penalty):
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            short = isinstance(value, float) and float(f"{value:g}") == value
            words += [f"--{option}", f"{value:g}" if short else str(value)]
    return shlex.join(words)
