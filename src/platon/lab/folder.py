"""The run folder: the name of every file and folder in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from platon.lab.file import link_error

RECORD, HISTORY, PROBE, STARTED, LOCK = "record.json", "history.jsonl", "probe.jsonl", "run.json", ".lock"
_FOLDERS = ("checkpoints", "model", "compact", "fast", "sparse", "onnx", "dense", "figures")
_WITHOUT_RUNS = {"model", "checkpoints", "figures", "report"}  #: folders that hold no run, and may hold many files
_FILES = (RECORD, HISTORY, PROBE, STARTED, LOCK, "speed.json")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run.

        run.json        the settings that the run was started with
        record.json     settings, results and sizes; written last, so a run that has it is finished
        history.jsonl   a line for each log and each evaluation
        probe.jsonl     a line for each observation of the probe
        checkpoints/    checkpoint-N: what the run resumes from; removed when it is finished, unless asked otherwise
        best-N/         the best model so far, saved at step N; removed when the run is finished
        model/          the finished model, for `from_pretrained`
        fast/           the model as it is deployed on a CPU, for `platon.load`
        compact/, sparse/, onnx/   the model in other forms
        speed.json, figures/       what `platon speed` and the report add
        dense/          the run folder of the dense twin
        .lock           held by the process that works on the run

    Args:
        path: the folder itself.
    """

    path: Path

    @property
    def started(self) -> Path:
        return self.path / STARTED

    @property
    def record(self) -> Path:
        return self.path / RECORD

    @property
    def history(self) -> Path:
        return self.path / HISTORY

    @property
    def probe(self) -> Path:
        return self.path / PROBE

    @property
    def lock(self) -> Path:
        return self.path / LOCK

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"checkpoint-{step}"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def compact(self) -> Path:
        return self.path / "compact"

    @property
    def fast(self) -> Path:
        return self.path / "fast"

    @property
    def sparse(self) -> Path:
        return self.path / "sparse"

    @property
    def speed(self) -> Path:
        return self.path / "speed.json"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def speed_figure(self) -> Path:
        return self.figures / "speed.png"

    @property
    def dense(self) -> RunFolder:
        return RunFolder(self.path / "dense")

    def best(self, step: int) -> Path:
        return self.path / f"best-{step}"

    def best_models(self) -> list[Path]:
        return sorted(self.path.glob("best-*"))

    @property
    def is_started(self) -> bool:
        return self.started.exists()

    @property
    def is_finished(self) -> bool:
        return self.record.exists()

    @property
    def is_twin(self) -> bool:
        """Whether it is the dense twin of the run in the folder above."""
        above = RunFolder(self.path.parent)
        return self.path == above.dense.path and (above.is_started or above.is_finished)

    @classmethod
    def below(cls, folder: Path) -> Iterator[RunFolder]:
        """Runs at or below a folder, finished or not, in alphabetical order from top to bottom."""
        for place, names, files in os.walk(folder):
            entered = (name for name in names if name not in _WITHOUT_RUNS and not name.startswith((".", "best-")))
            names[:] = sorted(entered)
            if {RECORD, STARTED} & set(files):
                yield cls(Path(place))

    def refuse_links(self) -> None:
        """Raise a `UserError` if a name that a run writes or removes is a symbolic link, or holds one."""
        for path in self._written():
            if path.is_symlink():
                raise link_error(path)

    def _written(self) -> Iterator[Path]:
        yield from (self.path / name for name in (*_FILES, *_FOLDERS))
        temporary = (self.path / ".model", *self.path.glob(".best-*"))
        for folder in (*self.checkpoints.glob("checkpoint-*"), *self.best_models(), *temporary, self.model):
            yield folder
            for place, folders, files in os.walk(folder):
                yield from (Path(place) / name for name in (*folders, *files))
