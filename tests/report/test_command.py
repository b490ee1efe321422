"""`platon report` as a user runs it: what goes where, and one sentence when there is nothing to show."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from platon import cli
from platon.lab.errors import UserError


def report(*words: str | Path) -> str:
    done = CliRunner().invoke(cli.app, ["report", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_tables_are_printed_and_files_are_written(study: Path, tmp_path: Path) -> None:
    said = report(study, "--output", tmp_path / "out", "--html", tmp_path / "elsewhere" / "p.html", "--no-figures")
    assert "PLATON against the best baseline" in said
    assert "Paired t-test" in said
    assert (tmp_path / "elsewhere" / "p.html").read_text().startswith("<!doctype html>")
    assert not (tmp_path / "out" / "index.html").exists()
    assert not (tmp_path / "out" / "figures").exists()
    assert not (study / "report").exists()


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("markdown", "| 20 % | Magnitude | 66.0 ± 2.6 |"),
        ("latex", r"20 \% & Magnitude & 66.0 $\pm$ 2.6 \\"),
        ("csv", "20 %,Magnitude,66.0 ± 2.6"),
    ],
)
def test_formats(form: str, words: str, study: Path, tmp_path: Path) -> None:
    said = report(study, "--format", form, "--sd", "--no-figures", "--output", tmp_path)
    assert words in said.splitlines()
    assert "Magnitude, paper" not in said
    assert "Magnitude, paper" in report(study, "--format", form, "--paper", "--no-figures", "--output", tmp_path)


def test_a_report_does_not_read_itself(study: Path, tmp_path: Path) -> None:
    first = report(study, "--no-figures", "--output", tmp_path / "one")
    report(study, "--no-figures")
    try:
        assert report(study, "--no-figures", "--output", tmp_path / "two") == first
    finally:
        for path in (study / "report").iterdir():
            path.unlink()
        (study / "report").rmdir()


def test_nothing_to_report_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        cli.app(["report", str(tmp_path)], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []
    codes: list[int] = []
    monkeypatch.setattr(sys, "argv", ["platon", "report", str(tmp_path / "nowhere")])
    monkeypatch.setattr(cli.os, "_exit", codes.append)
    cli.main()
    assert codes == [2]
    assert capfd.readouterr().err.count("\n") == 1
