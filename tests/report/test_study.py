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
    "full-size": "sweep.toml",
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


def test_the_table_of_the_language_model_is_made_of_its_records() -> None:
    study = ROOT / "studies" / "decoder"
    rows = {
        "50 %": ["at-once/magnitude-50", "at-once/wanda-50", *trained(50)],
        "50 %, 2:4": ["", "at-once/wanda-50-pattern", "", "", ""],
        "30 %": ["at-once/magnitude-30", "at-once/wanda-30", *trained(30)],
    }
    lines = (study / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    for kept, names in rows.items():
        (figures,) = (row[1:] for row in cells if row[0] == kept)
        for name, figure in zip(names, figures, strict=True):
            results = read_record(study / "records" / name)["results"] if name else None
            assert figure == ("" if results is None else f"{results['test']['perplexity']:,.2f}")
    shown = {name for names in rows.values() for name in names if name}
    held = {path.parent.relative_to(study / "records").as_posix() for path in study.glob("records/*/*/record.json")}
    assert held == shown | {"at-once/dense"}


def trained(share: int) -> list[str]:
    return [f"trained/magnitude-{share}", f"trained/platon-{share}", f"trained/platon-{share}-teacher"]
