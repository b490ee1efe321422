"""PLATON against each other row, and what a teacher adds: numbers by hand and by scipy."""

from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from platon.report.difference import difference_tables
from platon.report.reader import read_runs
from platon.report.table import Table

VALUES = {
    ("rte", "dense", 1.0, "none"): (70.0, 71.0, 72.0),
    ("rte", "magnitude", 0.1, "none"): (60.0, 61.0, 60.5),
    ("rte", "platon", 0.1, "none"): (64.0, 66.0, 65.0),
    ("rte", "platon", 0.1, "dense"): (67.0, 68.0, 69.5),
    ("sst2", "dense", 1.0, "none"): (90.0, 90.0, 91.0),
    ("sst2", "magnitude", 0.1, "none"): (80.0, 80.5, 79.5),
    ("sst2", "platon", 0.1, "none"): (82.0, 84.0, 86.0),
    ("sst2", "platon", 0.1, "dense"): (86.0, 87.0, 88.0),
}
RTE, SST2 = ({key[1:]: values for key, values in VALUES.items() if key[0] == task} for task in ("rte", "sst2"))


@pytest.fixture
def tables(tmp_path: Path, make_record: Any, make_run: Any) -> dict[str, Table]:
    for (task, method, keep, teacher), values in VALUES.items():
        for seed, value in enumerate(values):
            folder = tmp_path / f"{task}-{method}-{teacher}-{seed}"
            make_run(folder, make_record(task, method, keep, seed, value, teacher=teacher))
    return {table.name: table for table in difference_tables(read_runs(tmp_path).runs)}


def shown(table: Table, *labels: str) -> list[str]:
    """The cells of the row with these labels."""
    rows = [["".join(span.text for span in spans) for spans in row] for row in table.body]
    (row,) = [row for row in rows if tuple(row[: table.labels]) == labels]
    return row[table.labels :]


def test_each_pair_and_the_mean_over_tasks(tables: dict[str, Table]) -> None:
    table = tables["differences"]
    assert table.head == ("Ratio", "Row", "Against", "RTE", "SST-2", "Mean")
    ours, theirs = ("platon", 0.1, "none"), ("magnitude", 0.1, "none")
    expected = []
    for first, second in (
        (RTE[ours], RTE[theirs]),
        (SST2[ours], SST2[theirs]),
        # The mean over both tasks, seed by seed.
        tuple([(a + b) / 2 for a, b in zip(RTE[row], SST2[row], strict=True)] for row in (ours, theirs)),
    ):
        difference = sum(first) / 3 - sum(second) / 3
        expected.append(f"{difference:+.1f} ({stats.ttest_rel(first, second).pvalue:.3f})")
    assert shown(table, "10 %", "PLATON", "Magnitude") == expected


def test_rows_with_a_teacher_are_compared_with_platon_and_dense_alone(tables: dict[str, Table]) -> None:
    against = [row[2][0].text for row in tables["differences"].body if row[1][0].text == "PLATON + KD"]
    assert against == ["Dense", "PLATON"]


def test_how_much_of_the_distance_to_dense_a_teacher_closes(tables: dict[str, Table]) -> None:
    # RTE: 65 without, 68.17 with, 71 dense: 3.17 of 6. SST-2: 84, 87, 90.33: 3 of 6.33. Mean: 74.5, 77.58, 80.67.
    assert shown(tables["teacher"], "10 %", "PLATON") == [
        "65.0 → 68.2 (53 %)",
        "84.0 → 87.0 (47 %)",
        "74.5 → 77.6 (50 %)",
    ]


def test_a_pair_without_shared_runs_is_not_shown_as_zero(tmp_path: Path, make_record: Any, make_run: Any) -> None:
    for task, method, seed in (("rte", "platon", 0), ("rte", "magnitude", 0), ("sst2", "platon", 0)):
        make_run(tmp_path / f"{task}-{method}", make_record(task, method, 0.1, seed, 60.0))
    make_run(tmp_path / "dense", make_record("rte", "dense", 1.0, 0, 61.0))
    (table,) = difference_tables(read_runs(tmp_path).runs)
    assert shown(table, "10 %", "PLATON", "Magnitude") == ["+0.0", "--", "--"]
