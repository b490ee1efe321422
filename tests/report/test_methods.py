"""Methods that the report has no table for: new ones, and runs with a teacher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from platon.report import text
from platon.report.page import page
from platon.report.reader import read_runs
from platon.report.report import Report, make_report

Make = Callable[..., Any]


def new_method(make_record: Make, keep: float, seed: int, percent: float, **changes: Any) -> dict[str, Any]:
    """A record of a method that platon does not ship; it reads the setting `beta1`."""
    found = make_record("rte", "mine", keep, seed, percent, **changes)
    return found | {"title": "My method", "method_settings": ["scope", "beta1"]}


@pytest.fixture
def report(tmp_path: Path, make_record: Make, make_run: Make) -> Report:
    for seed in range(3):
        for keep in (0.2, 0.1):
            make_run(tmp_path / f"mine{keep}{seed}", new_method(make_record, keep, seed, 62.0 + seed), probe=True)
            found = make_record("rte", "platon", keep, seed, 64.0 + 2 * seed)
            make_run(tmp_path / f"platon{keep}{seed}", found, probe=True)
    return make_report(read_runs(tmp_path))


def test_a_new_method_is_in_tables_tests_figures_and_page(report: Report) -> None:
    tables = {table.name: text.markdown(table) for table in report.tables}
    assert "| 20 % | My method | 63.0 |" in tables["glue"]
    assert "| RTE | 20 % | PLATON | My method | accuracy | 66.0 | 63.0 | +3.0 | 3 |" in tables["tests"]
    assert "| RTE | 20 % | My method | 100.00 |" in tables["churn"]
    drawn = {chart.name: [line.name for line in chart.lines] for chart in report.charts.lines}
    for name in ("ratio-rte", "training-rte-20", "churn-rte-10"):
        assert "My method" in drawn[name]
    assert any("My method" in one.title for one in report.charts.maps)
    assert "My method" in page(report)


def test_the_settings_of_a_new_method_are_the_ones_in_its_record(
    tmp_path: Path, make_record: Make, make_run: Make
) -> None:
    """It reads β1, so other values are another row; it does not read β2."""
    make_run(tmp_path / "a", new_method(make_record, 0.2, 0, 60.0, beta1=0.5, beta2=0.1))
    make_run(tmp_path / "b", new_method(make_record, 0.2, 0, 61.0, beta1=0.9, beta2=0.2))
    assert {run.row for run in read_runs(tmp_path)} == {"My method (β1 0.5)", "My method (β1 0.9)"}


def test_settings_that_only_a_new_method_reads_do_not_tell_other_runs_apart(
    tmp_path: Path, make_record: Make, make_run: Make
) -> None:
    found = new_method(make_record, 0.2, 0, 60.0, sharpness=1)
    make_run(tmp_path / "mine", found | {"method_settings": ["sharpness"]})
    make_run(tmp_path / "a", make_record("rte", "magnitude", 0.2, 0, 60.0, sharpness=1))
    make_run(tmp_path / "b", make_record("rte", "magnitude", 0.2, 1, 61.0, sharpness=2))
    assert [run.row for run in read_runs(tmp_path)] == ["Magnitude", "Magnitude", "My method"]


def test_an_old_record_of_an_unknown_method_has_its_name_for_a_title(
    tmp_path: Path, make_record: Make, make_run: Make
) -> None:
    make_run(tmp_path / "a", make_record("rte", "mine", 0.2, 0, 60.0, beta1=0.5))
    make_run(tmp_path / "b", make_record("rte", "mine", 0.2, 0, 61.0, beta1=0.9))
    assert {run.row for run in read_runs(tmp_path)} == {"mine (β1 0.5)", "mine (β1 0.9)"}


def test_runs_of_an_earlier_version_share_the_row(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    """Their records have no settings of a teacher, which a run without a teacher does not read."""
    make_run(tmp_path / "a", make_record("rte", "platon", 0.2, 0, 60.0))
    unread = {"teacher": "none", "distil_weight": 0.5, "temperature": 2.0, "hidden_weight": 0.0}
    make_run(tmp_path / "b", make_record("rte", "platon", 0.2, 1, 61.0, **unread))
    assert [run.row for run in read_runs(tmp_path)] == ["PLATON", "PLATON"]


def test_runs_with_a_teacher_are_rows_of_their_own(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    """Teachers of the same shape, one for each seed, are one row. PLATON + KD is tested against Magnitude + KD."""
    for seed in range(3):
        for method, value in (("platon", 64.0), ("magnitude", 62.0)):
            for teacher, gain in ((None, 0.0), ("none", 0.0), (f"dense-{seed}/model", 1.0)):
                if method == "platon" or teacher != "none":
                    found = make_record("rte", method, 0.2, seed, value + gain + 0.1 * seed**2, teacher=teacher)
                    make_run(tmp_path / f"{method}{seed}{teacher is None}{gain}", found)
    report = make_report(read_runs(tmp_path))
    lines = text.markdown(report.results[0]).splitlines()
    assert [line.split(" | ")[1] for line in lines if (line.endswith("|") and " % " in line) or "|  |" in line] == [
        *("Magnitude", "Magnitude + KD", "PLATON", "PLATON + KD"),
    ]
    assert [(one.row, one.baseline) for one in report.comparisons] == [
        ("PLATON", "Magnitude"),
        ("PLATON + KD", "Magnitude + KD"),
    ]
