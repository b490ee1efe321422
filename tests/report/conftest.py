"""A headless browser, and run folders with the files that a real run writes."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from platon.lab.record import PROBE, append_history, write_json

METRICS = {"mnli": {"matched": ("accuracy",), "mismatched": ("accuracy",)}, "mrpc": {"validation": ("accuracy", "f1")}}
METRICS |= {"stsb": {"validation": ("pearson", "spearman")}, "squad": {"validation": ("f1", "exact_match")}}
METRICS |= {"cola": {"validation": ("matthews",)}}
MATRICES = [
    f"bert.encoder.layer.{n}.{name}.weight" for n in range(3) for name in ("attention.self.query", "output.dense")
]


def record(task: str, method: str, keep: float, seed: int, *percents: float, **changes: Any) -> dict[str, Any]:
    """A record as platon 0.1 wrote it. `percents` are its metrics in order; `changes` are settings."""
    names = METRICS.get(task, {"validation": ("accuracy",)})
    numbers = iter(percents)
    results = {split: {metric: next(numbers) / 100 for metric in metrics} for split, metrics in names.items()}
    values: dict[str, Any] = {"task": task, "model": "google-bert/bert-base-uncased", "method": method, "keep": keep}
    values |= {"units": "weights", "seed": seed, "batch": 32, "learning_rate": 5e-05, "beta1": 0.85, "beta2": 0.85}
    values |= {"timing": "after", "penalty": None, "data": None, "dense": "none", "group_by_length": True, "tau": 0.1}
    told = {"task", "method", "keep", "seed", *changes}
    values |= changes
    return {
        "format": 1,
        "task": task,
        "method": method,
        "recipe": None,
        "settings": {name: {"value": v, "source": "user" if name in told else "ours"} for name, v in values.items()},
        "data": {"fingerprint": task},
        "metrics": list(next(iter(names.values()))),
        "results": results,
        "not_converged": None,
        "best": {"step": 40, "value": percents[0] / 100, "kept": keep},
        "kept": 1.0 if method == "dense" else keep,
        "decided_by": None if method == "dense" else "penalty" if values["penalty"] else "keep",
        "parameters": {"all": 1000, "prunable": 600, "left": 460},
        "layers": dict.fromkeys(MATRICES, keep),
        "seconds": 12.0,
        "dense": None,
        "versions": {"platon": "0.1.0", "torch": "2.13.0"},
    }


def write_run(folder: Path, found: dict[str, Any], probe: bool = False) -> Path:
    """A run folder with this record, a history, and, if asked for, a probe file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", {"format": 1, "recipe": None, "settings": found["settings"]})
    write_json(folder / "record.json", found)
    split, metric = next(iter(found["results"])), found["metrics"][0]
    seed, value = found["settings"]["seed"]["value"], found["results"][split][metric]
    for step in range(10, 60, 10):
        append_history(folder, {"step": step, "loss": 1.0, f"eval_{split}_{metric}": value * step / 50})
    if probe:
        _write_probe(folder, found, seed)
    return folder


def _write_probe(folder: Path, found: dict[str, Any], seed: int) -> None:
    random = np.random.default_rng(seed)
    smooth = np.full(12, 1e-4)
    for step in range(1, 51):
        signal = 10 ** random.normal(-4, 1, 12)
        smooth = 0.9 * smooth + 0.1 * signal
        line: dict[str, Any] = {"step": step, "signal": signal.tolist(), "weight": np.ones(12).tolist()}
        if found["method"] in ("platon", "sensitivity"):
            line |= {"sensitivity": smooth.tolist(), "uncertainty": (0.5 * smooth).tolist()}
        if found["method"] != "dense":
            line |= {"removed": 0.02, "returned": 0.004 if found["method"] == "movement" else 0.001, "since": step - 1}
        append_history(folder, line, PROBE)
        if found["method"] == "platon" and step in (13, 25, 50):
            values = np.logspace(-9, -3, 201).tolist()
            append_history(folder, {"step": step, "quantiles": {"sensitivity": values, "uncertainty": values}}, PROBE)
        if found["method"] != "dense" and step % 10 == 0:
            shares = {name: round(1 - step / 60 + n / 100, 3) for n, name in enumerate(MATRICES)}
            append_history(folder, {"step": step, "layers": shares}, PROBE)


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    """`record`, for tests in other files."""
    return record


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """`write_run`, for tests in other files."""
    return write_run


STUDY = {
    ("dense", 1.0): (70.0, 71.0, 72.0),
    ("magnitude", 0.2): (64.0, 65.0, 69.0),
    ("platon", 0.2): (67.0, 66.0, 71.0),
}
STUDY |= {("movement", 0.2): (60.0, 61.0, 62.0), ("platon", 0.1): (60.0, 61.0, 63.5)}
STUDY |= {("magnitude", 0.1): (61.0, 60.0, 62.0), ("sensitivity", 0.1): (59.0, 60.0, 61.0)}


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of three methods and an ablation on RTE, two β, with probe files."""
    folder = tmp_path_factory.mktemp("runs") / "study"
    for (method, keep), values in STUDY.items():
        for seed, value in enumerate(values):
            write_run(folder / f"{method}-{keep}" / f"seed{seed}", record("rte", method, keep, seed, value), probe=True)
    for beta in (0.75, 0.9):
        write_run(folder / f"beta1-{beta}", record("rte", "platon", 0.1, 0, 60.5, beta1=beta), probe=True)
    return folder


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# No sandbox (CI is root in a container), and nothing that reaches for the network by itself.
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio")


class Browser:
    """Headless Chromium, driven by the DevTools protocol over a pipe: JSON messages that end with a zero byte."""

    def __init__(self, place: Path) -> None:
        assert CHROMIUM is not None
        there, ours_out = os.pipe()
        ours_in, back = os.pipe()
        # The protocol wants descriptors 3 and 4. bash puts them there, from numbers that are neither of these.
        given = [fcntl.fcntl(number, fcntl.F_DUPFD, 20) for number in (there, back)]
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={place}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{given[0]} 4>&{given[1]}', "bash", *words],
            pass_fds=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in (there, back, *given):
            os.close(number)
        self._out, self._in, self._buffer = ours_out, ours_in, b""
        self._number, self._session = 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; other messages are stored as events."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(60)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {seconds} s"
            found = os.read(self._in, 1 << 20)
            assert found, "the browser has gone"
            self._buffer += found
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file at this size, and wait until its script has drawn."""
        self.events.clear()
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call("Page.navigate", url=file.resolve().as_uri())
        for _ in range(300):
            if self.run("document.readyState === 'complete' && document.documentElement.dataset.drawn === 'yes'"):
                return
            time.sleep(0.1)
        raise AssertionError(f"the page was not drawn: {self.complaints()}")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the mouse over an element."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(f"(b => [b.left, b.top, b.width, b.height])({where}.getBoundingClientRect())")
        place = {"x": box[0] + across * box[2], "y": box[1] + down * box[3]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and anything that was asked of a network."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["text"])
            if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
                found.append(params["request"]["url"])
        return found

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        """The page as it prints."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        self.process.terminate()
        self.process.wait(20)
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests; they are skipped if it is not installed."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()
