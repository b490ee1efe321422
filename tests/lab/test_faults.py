"""The short form of the fault campaign, and that each promise names a test that is there."""

import json
import re
from pathlib import Path

from forked import Forked

ROOT = Path(__file__).parents[2]


def test_short_campaign(tmp_path: Path) -> None:
    output = tmp_path / "faults.json"
    words = ["python", str(ROOT / "benchmarks" / "faults.py"), "--short", "--seed", "1", "--output", str(output)]
    code = Forked(words, tmp_path / "log").wait()
    assert code == 0, (tmp_path / "log").read_text()
    found = json.loads(output.read_text())
    assert found["failures"] == []
    assert found["counts"]["SIGKILLs"] >= 4
    assert found["counts"]["killed runs that ended as the undisturbed"] >= 1


def test_every_promise_names_a_test() -> None:
    lines = [line for line in (ROOT / "docs" / "promises.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 10
    for line in lines:
        named = re.findall(
            r"`((?:tests|benchmarks)/[\w/]+\.py)(?:::(\w+))?`", line.rpartition("|")[0].rpartition("| ")[2]
        )
        assert named, line
        for path, test in named:
            assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"
            assert (ROOT / path).is_file()
        for fault in re.findall(r"\(`(\w+)`\)", line):
            assert f'"{fault}"' in (ROOT / "benchmarks" / "faults.py").read_text()
