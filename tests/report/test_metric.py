"""Metrics in which lower is better, and which are no percentages."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from platon.report import text
from platon.report.metric import Metric
from platon.report.reader import read_runs
from platon.report.report import Report, make_report
from platon.report.writer import results_csv

Make = Callable[..., Any]


def perplexity(found: dict[str, Any], value: float) -> dict[str, Any]:
    return found | {"metrics": ["perplexity"], "results": {"validation": {"perplexity": value}}}


@pytest.fixture
def report(tmp_path: Path, make_record: Make, make_run: Make) -> Report:
    for seed in range(3):
        for method, value in (("platon", 21.0 + seed), ("magnitude", 30.0 + 2 * seed), ("movement", 40.0)):
            found = make_record("wiki", method, 0.2, seed, 0.0)
            make_run(tmp_path / f"{method}{seed}", perplexity(found, value))
    return make_report(read_runs(tmp_path))


def test_the_lowest_perplexity_is_bold_and_the_best_baseline(report: Report) -> None:
    table = next(table for table in report.tables if table.name == "runs")
    lines = text.markdown(table).splitlines()
    assert "| Ratio | Method | wiki PPL |" in lines
    assert "|  | PLATON | **22.0** |" in lines
    assert "| 20 % | Magnitude | 32.0 |" in lines
    assert table.notes[0] == "Percent, except perplexity; mean over 3 seeds."
    (tested,) = report.comparisons
    assert tested.baseline == "Magnitude"
    assert tested.test is not None
    assert tested.test.difference == pytest.approx(-10.0)
    assert tested.is_ahead


def test_perplexity_is_not_multiplied_by_a_hundred(report: Report) -> None:
    values = [float(line["percent"]) for line in csv.DictReader(results_csv(report.runs).splitlines())]
    assert max(values) == 40.0
    chart = next(chart for chart in report.charts.lines if chart.name.startswith("training"))
    assert chart.y == "perplexity"
    assert max(point.y for line in chart.lines for point in line.points) == 40.0
    assert Metric("validation", "perplexity").label == "perplexity"
    assert Metric("validation", "perplexity").text(21.5) == "21.50"


def test_higher_is_better_for_every_other_metric() -> None:
    accuracy = Metric("validation", "accuracy")
    assert accuracy.best([0.1, 0.9]) == 0.9
    assert accuracy.gain(2.0) == 2.0
    assert accuracy.text(0.5) == "50.00 %"
