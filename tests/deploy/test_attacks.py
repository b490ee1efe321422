"""The short form of the attacks, and that an attack which succeeds is counted as such."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from platon.deploy import sparse_kernel

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "attacks.py"

pytestmark = pytest.mark.skipif(isinstance(sparse_kernel.find(), str), reason="attacks the compiled kernel too")


def test_short_campaign() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FILE), "--short", "--seed", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)["counts"]
    saved = {"manifest", "configuration", "file", "tensors", "sparse layer"}
    assert counts.keys() == saved | {"pruner state", "pruner input", "run folder", "compaction", "kernel arrays"}
    assert all(counts[kind].get("refused", 0) >= 5 for kind in saved | {"pruner state", "run folder"})
    assert counts["compaction"]["same"] >= 5
    if counts["kernel arrays"]:  # empty without a compiler that has sanitizers
        assert counts["kernel arrays"]["refused"] + counts["kernel arrays"]["computed"] == 300


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FILE.parent)
    spec = importlib.util.spec_from_file_location("attacks", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "KINDS", {})
    monkeypatch.setattr(module, "SECONDS", 2)
    return module


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_outcomes_are_told_apart(attacks: ModuleType) -> None:
    """Each way to fail is counted, and the attacks after a dead process still run."""

    def refuse(chance: object, place: Path) -> bool:
        raise ValueError("keep must be in (0, 1], got 80; write 0.8 for 80 %")

    def internal(chance: object, place: Path) -> bool:
        raise KeyError("weights")

    def die(chance: object, place: Path) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    def wait(chance: object, place: Path) -> bool:
        while True:
            pass

    def eat(chance: object, place: Path) -> bool:
        return bytearray(attacks.MEMORY * 2) != b""

    ways = {"refused": refuse, "same": lambda *_: True, "wrong": lambda *_: False}
    for expected, function in {**ways, "crashed": internal}.items():
        attacks.attack("kind")(function)
        failures: list[str] = []
        assert attacks.campaign("kind", 3, 0, failures) == {expected: 3}
        assert len(failures) == (3 if expected in ("wrong", "crashed") else 0)
    for function in (die, eat):
        attacks.attack("kind")(function)
        assert attacks.campaign("kind", 3, 0, []) == {"crashed": 3}
    attacks.attack("kind")(wait)
    assert attacks.campaign("kind", 1, 0, []) == {"crashed": 1}
