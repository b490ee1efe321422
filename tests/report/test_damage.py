"""Records, histories and probe files that are damaged or from an older version: one sentence that names the file."""

import builtins
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from platon import cli
from platon.lab.errors import UserError
from platon.lab.record import PROBE, append_history, write_json
from platon.report.command import command
from platon.report.reader import read_runs
from platon.report.report import make_report
from platon.report.run_figure import draw_run

Make = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, make_record: Make, make_run: Make) -> Path:
    return make_run(tmp_path / "runs" / "a", make_record("rte", "platon", 0.2, 0, 60.0), probe=True)


@pytest.mark.parametrize(
    ("method", "penalty", "words"),
    [("platon", None, "--keep 0.2"), ("l0", 125.0, "--penalty 125"), ("dense", None, "--method dense")],
)
def test_a_record_without_decided_by(
    method: str, penalty: float | None, words: str, tmp_path: Path, make_record: Make, make_run: Make
) -> None:
    """As the first version wrote it."""
    found = make_record("rte", method, 0.2, 0, 60.0, penalty=penalty)
    del found["decided_by"]
    make_run(tmp_path / "a", found)
    (read,) = read_runs(tmp_path)
    assert read.has_share is (method == "platon")
    assert words in command(read)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"task": None}, "'task'"),
        ({"kept": None}, "'kept'"),
        ({"layers": {"a": None}}, "'layers'"),
        ({"parameters": {}}, "'parameters'"),
        ({"metrics": []}, "'metrics'"),
        ({"metrics": ["f1"]}, "'metrics'"),
        ({"not_converged": 3}, "'not_converged'"),
        ({"data": None}, "'data'"),
        ({"versions": []}, "'versions'"),
        ({"seconds": "long"}, "'seconds'"),
        ({"title": 5}, "'title'"),
        ({"settings": {"seed": {"value": 0}}}, "'keep'"),
        ({"settings": {"seed": {"value": 0, "source": 7}}}, "'settings'"),
    ],
    ids=str,
)
def test_a_record_with_a_hole_says_which(change: dict[str, Any], what: str, run: Path) -> None:
    file = run / "record.json"
    write_json(file, json.loads(file.read_text()) | change)
    with pytest.raises(UserError, match="half a record") as raised:
        read_runs(run)
    assert f"{str(file)!r} is half a record: " in str(raised.value)
    assert what in str(raised.value)


LINES = [5, [1], "text", None, {"loss": 1.0}, {"step": "ten"}, {"step": 1, "loss": "high"}]
PROBE_LINES = [{"step": 1, "signal": 3}, {"step": 1, "signal": [1.0]}, {"step": 1, "signal": ["a"] * 12}]
PROBE_LINES += [{"step": 1, "since": 0}, {"step": 1, "quantiles": [1]}, {"step": 1, "layers": {"a": "b"}}]
PROBE_LINES += [{"step": 1, "signal": [0.5] * 12, "sensitivity": [1.0]}]


@pytest.mark.parametrize(
    ("name", "line"),
    [*(("history.jsonl", line) for line in LINES), *((PROBE, line) for line in [*LINES, *PROBE_LINES])],
)
def test_a_foreign_line_is_one_sentence_before_anything_is_written(name: str, line: Any, run: Path) -> None:
    append_history(run, line, name)
    done = CliRunner().invoke(cli.app, ["report", str(run)])
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith(f"{str(run / name)!r} is damaged: ")
    assert done.stdout == ""
    assert not (run / "report").exists()


def test_figures_of_a_run_with_a_foreign_line(run: Path) -> None:
    append_history(run, {"loss": 1.0})
    with pytest.raises(UserError, match=r"history\.jsonl' is damaged"):
        draw_run(run)


def test_every_file_is_read_once(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Counter[str] = Counter()
    original = io.open

    def counting(file: Any, *arguments: Any, **options: Any) -> Any:
        opened[str(file)] += 1
        return original(file, *arguments, **options)

    monkeypatch.setattr(io, "open", counting)
    monkeypatch.setattr(builtins, "open", counting)
    make_report(read_runs(study))
    probes = [count for file, count in opened.items() if file.endswith(PROBE)]
    histories = [count for file, count in opened.items() if file.endswith("history.jsonl")]
    assert set(probes) == set(histories) == {1}
    assert len(probes) == len(histories) == len(read_runs(study).runs)


def test_loss_or_metric_is_decided_for_each_task(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    """The runs of RTE were evaluated while training, those of CoLA only at the end."""
    make_run(tmp_path / "a", make_record("rte", "platon", 0.2, 0, 60.0))
    once = make_run(tmp_path / "b", make_record("cola", "platon", 0.2, 0, 20.0))
    (once / "history.jsonl").unlink()
    for step in range(10, 60, 10):
        append_history(once, {"step": step, "loss": 1 / step})
    append_history(once, {"step": 50, "eval_validation_matthews": 0.2})
    charts = {chart.name: chart.y for chart in make_report(read_runs(tmp_path)).charts.lines}
    assert charts == {"training-rte-20": "accuracy, %", "training-cola-20": "loss"}


def test_a_loss_with_a_teacher_has_a_chart_of_its_own(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    """The distance to the teacher is part of it, so one axis would flatten the others."""
    taught = {"teacher": "dense", "distil_weight": 0.9, "temperature": 2.0, "hidden_weight": 10.0}
    for name, settings in (("alone", {}), ("taught", taught)):
        folder = make_run(tmp_path / name, make_record("cola", "platon", 0.2, 0, 20.0, **settings))
        (folder / "history.jsonl").unlink()
        for step in range(10, 60, 10):
            append_history(folder, {"step": step, "loss": 1 / step})
    charts = make_report(read_runs(tmp_path)).charts.lines
    rows = {chart.name: [line.name for line in chart.lines] for chart in charts}
    assert rows == {"training-cola-20": ["PLATON"], "training-taught-cola-20": ["PLATON + KD"]}
