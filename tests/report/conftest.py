"""A browser to open pages in, and run folders as real runs leave them."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
        # The protocol wants descriptors 3 and 4; the shell puts them there.
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={place}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" 3<&{there} 4>&{back}', "sh", *words],
            pass_fds=(there, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self._out, self._in, self._buffer = ours_out, ours_in, b""
        self._number, self._session = 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what happens meanwhile is an event."""
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
    """Chromium, or the reason why there is none."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()
