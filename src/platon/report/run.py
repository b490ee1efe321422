"""One finished run, as the report sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from platon.report.metric import Metric
from platon.report.probe import Probe, read_probe
from platon.report.record import read_lines

# Runs that differ only in these settings are the same run: they name it, or say where files are and how often to write.
_NOT_RELEVANT = {"task", "method", "keep", "seed", "data", "eval_batch", "log_every", "checkpoint_every", "checkpoints"}
_NOT_RELEVANT |= {"fast", "gradient_checkpointing", "keep_checkpoints", "report_to", "trust_remote_code"}
# Settings of pruning in general, which a dense run does not read.
_PRUNING = {"units", "dense", "warmup", "cooldown", "every", "block_rows", "block_columns", "reference_steps"}
# Settings that only a run with a teacher reads; records of earlier versions do not have them.
_TEACHER = {"teacher", "distil_weight", "temperature", "hidden_weight"}


@dataclass(frozen=True)
class Run:
    """One finished run.

    Args:
        folder: its run folder.
        name: the run folder's path inside the folder that is reported.
        record: its record, complete (see `load_record`).
        unread: settings that methods of other runs read, and that this run's method does not.
        ratio: the share kept that it counts for in tables; 1 for a dense model.
        row: method and variant, as tables name them.
        twin: whether it is the dense twin inside another run's folder.
    """

    folder: Path
    name: str
    record: dict[str, Any] = field(repr=False)
    unread: frozenset[str] = field(default=frozenset(), repr=False)
    ratio: float = 1.0
    row: str = ""
    twin: bool = False

    @property
    def task(self) -> str:
        return str(self.record["task"])

    @property
    def method(self) -> str:
        return str(self.record["method"])

    @property
    def title(self) -> str:
        """The method's name in tables; "+ KD" (knowledge distillation) if a teacher helped."""
        return f"{self.record['title']} + KD" if self.has_teacher else str(self.record["title"])

    @property
    def is_dense(self) -> bool:
        return self.method == "dense"

    @property
    def has_teacher(self) -> bool:
        return self.setting("teacher") not in (None, "none")

    @property
    def has_share(self) -> bool:
        """Whether the share kept was asked for; a penalty's share is a result, and a dense run has none."""
        return not self.is_dense and self.record["decided_by"] != "penalty"

    @property
    def seed(self) -> int:
        return int(self.setting("seed"))

    @property
    def converged(self) -> bool:
        """By the rule that is described in docs/report.md; the run itself applied it."""
        return self.record["not_converged"] is None

    @cached_property
    def results(self) -> dict[Metric, float]:
        """Every metric on every split, as tables print it."""
        metrics = ((Metric(split, name), value) for split, found in self._splits() for name, value in found.items())
        return {metric: metric.scaled(value) for metric, value in metrics}

    def _splits(self) -> list[tuple[str, dict[str, float]]]:
        return list(self.record["results"].items())

    @property
    def headline(self) -> Metric:
        """The metric that chose the best model."""
        return Metric(self._splits()[0][0], self.record["metrics"][0])

    def setting(self, name: str) -> Any:
        """A setting's value; `None` if the run was made before the setting existed."""
        return self.record["settings"].get(name, {}).get("value")

    def relevant(self) -> dict[str, Any]:
        """The settings that decide this run's result, beside task, method, share and seed."""
        ignored = _NOT_RELEVANT | self.unread
        if not self.has_teacher:
            ignored |= _TEACHER
        if self.is_dense:
            ignored |= _PRUNING
        elif self.setting("units") != "blocks":
            ignored |= {"block_rows", "block_columns"}
        return {name: said["value"] for name, said in self.record["settings"].items() if name not in ignored}

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The lines that the training logged."""
        return read_lines(self.folder)

    @cached_property
    def probe(self) -> Probe:
        """What the probe wrote; empty if the run has no probe file."""
        return read_probe(self.folder)
