"""Reading folders of runs: which runs count, which are left out with a note, and how rows are named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from platon.lab.errors import UserError
from platon.lab.record import write_json
from platon.report.reader import Runs, read_runs
from platon.report.report import make_report

Make = Callable[..., Any]


@pytest.fixture
def pair(tmp_path: Path, make_record: Make, make_run: Make) -> Path:
    """Two seeds of PLATON."""
    for seed in (0, 1):
        make_run(tmp_path / "runs" / str(seed), make_record("rte", "platon", 0.2, seed, 60.0 + seed))
    return tmp_path / "runs"


def names(runs: Runs) -> list[str]:
    return [run.name for run in runs]


def test_runs_are_found_at_any_depth(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    deep = make_run(tmp_path / "a" / "b" / "c", make_record("rte", "platon", 0.2, 0, 60.0))
    make_run(tmp_path / "d", make_record("rte", "magnitude", 0.2, 0, 61.0))
    make_run(deep / "checkpoints" / "x", make_record("rte", "platon", 0.2, 3, 1.0))  # inside a run: no run
    found = read_runs(tmp_path)
    assert names(found) == ["d", "a/b/c"]  # magnitude stands before PLATON
    assert found.notes == ()
    assert names(read_runs(deep)) == ["."]


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no finished run: there is no record\.json at or below it"):
        read_runs(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        read_runs(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "has format 2, this version of platon reads 1"),
        (lambda text: "[1, 2]", "it is no record"),
        (lambda text: "", "is damaged"),
        (lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "results"}), "is half a record"),
        (lambda text: json.dumps(json.loads(text) | {"results": {}}), "is half a record"),
        (lambda text: json.dumps(json.loads(text) | {"settings": {"seed": 0}}), "is half a record"),
        (lambda text: json.dumps(json.loads(text) | {"results": {"validation": {"accuracy": None}}}), "half a record"),
    ],
    ids=["truncated", "newer", "a list", "empty", "no results", "empty results", "odd settings", "no number"],
)
def test_a_bad_record_is_named_and_left_out(damage: Callable[[str], str], said: str, pair: Path) -> None:
    file = pair / "1" / "record.json"
    file.write_text(damage(file.read_text()))
    found = read_runs(pair)
    assert names(found) == ["0"]
    assert len(found.notes) == 1
    assert said in found.notes[0]
    assert str(file) in found.notes[0]
    shutil.rmtree(pair / "0")
    with pytest.raises(UserError, match="holds no finished run; left out: "):
        read_runs(pair)


def test_an_unfinished_run_is_named(pair: Path) -> None:
    (pair / "1" / "record.json").unlink()
    found = read_runs(pair)
    assert names(found) == ["0"]
    assert found.notes == ("not finished, so not counted: 1 of the runs (1)",)


def test_the_same_run_twice_counts_once(pair: Path) -> None:
    shutil.copytree(pair / "0", pair / "copy")
    found = read_runs(pair)
    assert names(found) == ["0", "1"]
    assert found.notes == ("the same run 2 times, counted once: 0, copy",)


def test_two_results_of_one_seed_are_never_averaged(pair: Path, make_record: Make, make_run: Make) -> None:
    make_run(pair / "again", make_record("rte", "platon", 0.2, 0, 90.0))
    found = read_runs(pair)
    assert names(found) == ["1"]
    assert found.notes == ("left out: runs with the same settings and seed differ in their results: 0, again",)
    shutil.rmtree(pair / "1")
    with pytest.raises(UserError, match="holds no run that counts; left out: runs with the same settings"):
        read_runs(pair)


def test_settings_that_do_not_matter_do_not_tell_runs_apart(pair: Path, make_record: Make, make_run: Make) -> None:
    """PLATON does not read τ, and the folder of the data does not matter."""
    make_run(pair / "again", make_record("rte", "platon", 0.2, 0, 90.0, tau=0.3, data="/elsewhere"))
    assert names(read_runs(pair)) == ["1"]


def test_other_settings_are_other_rows(pair: Path, make_record: Make, make_run: Make) -> None:
    for seed in (0, 1):
        make_run(pair / f"before{seed}", make_record("rte", "platon", 0.2, seed, 50.0, timing="before"))
    assert {run.row for run in read_runs(pair)} == {"PLATON (timing after)", "PLATON (timing before)"}
    make_run(pair / "third", make_record("rte", "platon", 0.2, 2, 62.0))
    found = read_runs(pair)
    assert [run.row for run in found] == ["PLATON"] * 3 + ["PLATON (timing before)"] * 2
    assert found.notes == ("where a row of PLATON does not say it: timing after",)


def test_a_choice_left_to_the_method_goes_unsaid(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    make_run(tmp_path / "a", make_record("rte", "magnitude", 0.2, 0, 60.0, scope=None))
    make_run(tmp_path / "b", make_record("rte", "magnitude", 0.2, 0, 61.0, scope="matrix"))
    assert {run.row for run in read_runs(tmp_path)} == {"Magnitude", "Magnitude (scope matrix)"}


def test_a_learning_rate_that_goes_with_the_variant_goes_unsaid(
    tmp_path: Path, make_record: Make, make_run: Make
) -> None:
    make_run(tmp_path / "a", make_record("rte", "magnitude", 0.2, 0, 60.0, scope=None, learning_rate=2e-4))
    make_run(tmp_path / "b", make_record("rte", "magnitude", 0.2, 0, 61.0, scope="matrix", learning_rate=4e-4))
    found = read_runs(tmp_path)
    assert {run.row for run in found} == {"Magnitude", "Magnitude (scope matrix)"}
    assert "rows of Magnitude differ in learning_rate as well" in found.notes
    make_run(tmp_path / "c", make_record("rte", "magnitude", 0.2, 0, 62.0, scope="matrix", learning_rate=2e-4))
    assert len({run.row for run in read_runs(tmp_path)}) == 3


def test_a_setting_that_goes_with_the_seed_is_no_average(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    """Seed 0 with one β, seed 1 with another: two rows, not a mean of both."""
    for seed, beta in enumerate((0.85, 0.95)):
        make_run(tmp_path / str(seed), make_record("rte", "platon", 0.2, seed, 60.0, beta2=beta))
    assert {run.row for run in read_runs(tmp_path)} == {"PLATON (β2 0.85)", "PLATON (β2 0.95)"}


def test_settings_may_differ_between_tasks_and_ratios(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    make_run(tmp_path / "a", make_record("rte", "platon", 0.2, 0, 60.0, learning_rate=1e-4, beta2=0.99))
    make_run(tmp_path / "b", make_record("rte", "platon", 0.1, 0, 60.0, learning_rate=1e-4, beta2=0.95))
    make_run(tmp_path / "c", make_record("sst2", "platon", 0.1, 0, 60.0, learning_rate=8e-5))
    assert {run.row for run in read_runs(tmp_path)} == {"PLATON"}


def test_one_model_a_seed_is_one_row(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    for seed in (0, 1):
        make_run(tmp_path / str(seed), make_record("rte", "platon", 0.2, seed, 60.0, model=f"dense-{seed}/model"))
    assert {run.row for run in read_runs(tmp_path)} == {"PLATON"}
    other = make_record("rte", "platon", 0.2, 2, 60.0, model="larger")
    other["parameters"]["prunable"] = 9_999
    make_run(tmp_path / "2", other)
    assert len({run.row for run in read_runs(tmp_path)}) == 3


def test_dense_twins_count_once(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    """Dense twins of one seed count as one run; a dense run of its own is preferred to them."""
    for method in ("platon", "magnitude"):
        place = make_run(tmp_path / method, make_record("rte", method, 0.2, 0, 60.0, dense="first"))
        make_run(place / "dense", make_record("rte", "dense", 0.2, 0, 70.0))
    found = read_runs(tmp_path)
    assert names(found) == ["magnitude/dense", "magnitude", "platon"]
    assert found.notes == ()
    write_json(tmp_path / "platon" / "dense" / "record.json", make_record("rte", "dense", 0.2, 0, 71.0))
    assert "dense twins with the same settings and seed differ" in read_runs(tmp_path).notes[0]
    make_run(tmp_path / "own", make_record("rte", "dense", 0.1, 0, 72.0))
    assert names(read_runs(tmp_path))[0] == "own"
    assert read_runs(tmp_path).notes == ()


def test_a_penalty_s_share_is_a_result(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    for seed, kept in enumerate((0.096, 0.108)):
        make_run(tmp_path / str(seed), make_record("rte", "l0", 0.5, seed, 60.0, penalty=125.0) | {"kept": kept})
    assert {(run.ratio, run.row) for run in read_runs(tmp_path)} == {(0.1, "ℓ0 regularisation")}


def test_other_rows_and_versions_are_said(pair: Path, make_record: Make) -> None:
    changed = make_record("rte", "platon", 0.2, 1, 61.0) | {"data": {"fingerprint": "x"}, "versions": {"platon": "9"}}
    write_json(pair / "1" / "record.json", changed)
    data, versions = read_runs(pair).notes
    assert data == "the runs of rte were trained or measured on 2 different sets of rows"
    assert versions == 'the runs were made by 2 versions of platon: "0.1.0", "9"'


def test_tables_do_not_depend_on_the_order_of_folders(pair: Path, tmp_path: Path) -> None:
    """The same runs under other names: the same tables."""
    (tmp_path / "other").mkdir()
    shutil.copytree(pair / "0", tmp_path / "other" / "z")
    shutil.copytree(pair / "1", tmp_path / "other" / "a")
    assert make_report(read_runs(pair)).tables == make_report(read_runs(tmp_path / "other")).tables
