"""The committed reports of the studies are made from their records, byte for byte."""

from pathlib import Path

import pytest

from platon.lab import sweep
from platon.lab.record import read_record
from platon.report.reader import Runs, read_runs
from platon.report.report import make_report
from platon.report.result_table import Options
from platon.report.writer import write_report

ROOT = Path(__file__).parents[2]


SWEEPS = {
    "glue": "tasks.toml",
    "uncertainty": "seeds.toml",
    "time": "sweep.toml",
    "beside": "sweep.toml",
    "embeddings": "sweep.toml",
}


@pytest.fixture(scope="module", params=SWEEPS)
def study(request: pytest.FixtureRequest) -> Path:
    return ROOT / "studies" / request.param


@pytest.fixture(scope="module")
def runs(study: Path) -> Runs:
    return read_runs(study)


def test_report_is_made_of_the_records(study: Path, runs: Runs, tmp_path: Path) -> None:
    for path in write_report(make_report(runs, Options(sd=True)), tmp_path, figures=False):
        assert path.read_bytes() == (study / "report" / path.name).read_bytes(), path.name


def test_every_run_of_the_sweep_has_a_record_and_no_other_has_one(study: Path, runs: Runs, tmp_path: Path) -> None:
    wanted = {job.name: job.resolved.settings for job in sweep.read(str(study / SWEEPS[study.name]), tmp_path)}
    found = {run.name.removeprefix("records/"): run for run in runs}
    assert found.keys() == wanted.keys()
    for name, run in found.items():
        for setting, value in run.relevant().items():
            assert value == getattr(wanted[name], setting), (name, setting)


def test_the_readme_shows_the_table_of_the_report() -> None:
    lines = (ROOT / "studies" / "glue" / "report" / "tables.md").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    beyond = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    assert "\n".join(lines[first:beyond]) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_of_the_language_model_are_made_of_its_records() -> None:
    study = ROOT / "studies" / "decoder"
    columns = {
        "| 50 %": ["at-once/magnitude-50", "at-once/wanda-50", *trained(50)],
        "| 30 %": ["at-once/magnitude-30", "at-once/wanda-30", *trained(30)],
        "| perplexity": [f"part/{name}" for name in ("dense", "magnitude-30", "wanda-30", "wanda-50-pattern")],
    }
    lines = (study / "README.md").read_text(encoding="utf-8").splitlines()
    for start, names in columns.items():
        (line,) = (line for line in lines if line.startswith(start))
        for name, figure in zip(names, line.replace("*", "").strip("| ").split(" | ")[1:], strict=True):
            folder = study / "records" / name
            assert folder.is_dir() == (figure != "–")
            if figure != "–":
                assert f"{read_record(folder)['results']['test']['perplexity']:,.2f}" == figure


def trained(share: int) -> list[str]:
    return [f"trained/magnitude-{share}", f"trained/platon-{share}", f"trained/platon-{share}-teacher"]
