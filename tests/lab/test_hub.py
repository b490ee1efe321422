"""`platon push`: the real client of the hub against a server on this machine; and the model card."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from platon import cli
from platon.lab import hub
from platon.lab.card import model_card
from platon.lab.errors import UserError

SETTINGS = {"model": ("/home/me/models/bert", "user"), "keep": (0.1, "user"), "teacher": ("none", "ours")}
SETTINGS |= {"data": ("/home/me/secret/reviews.csv", "user")}
RECORD: dict[str, Any] = {
    "format": 1,
    "task": "mrpc",
    "method": "platon",
    "title": "PLATON",
    "decided_by": "keep",
    "metrics": ["accuracy", "f1"],
    "settings": {name: {"value": value, "source": source} for name, (value, source) in SETTINGS.items()},
    "results": {"validation": {"accuracy": 0.8125, "f1": 0.75}},
    "dense": {"results": {"validation": {"accuracy": 0.875, "f1": 0.8}}},
    "kept": 0.1,
    "layers": {},
    "parameters": {"all": 2000, "prunable": 1000, "left": 1100},
    "seconds": 1.0,
    "versions": {"torch": "2.13.0"},
}
LINE = {"engine": "eager", "rows": 8, "length": 128}
SPEED = {
    "machine": {"threads": 2, "processor": "a processor"},
    "timings": [
        LINE | {"model": "dense", "median_ms": 30.0},
        LINE | {"engine": "onnx", "model": "dense", "median_ms": 25.0},
        LINE | {"engine": "compile", "model": "pruned", "error": "no compiler"},
        LINE | {"engine": "sparse", "model": "pruned", "median_ms": 10.0},
    ],
}


class Hub(BaseHTTPRequestHandler):
    """What the client needs of the hub to upload small files; keeps the requests."""

    asked: list[tuple[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        type(self).asked.append((self.path, lines))
        if self.path == "/api/repos/create":
            answer: dict[str, Any] = {"url": f"http://{self.headers['Host']}/me/pruned"}
        elif "/preupload/" in self.path:
            files = lines[0]["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif "/commit/" in self.path:
            answer = {"commitUrl": f"http://{self.headers['Host']}/me/pruned/commit/1", "commitOid": "1"}
        else:
            answer = {"warnings": [], "errors": []}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST  # noqa: N815  # the name that the server calls

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """The requests that the hub gets."""
    Hub.asked = []
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{listening.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HfApi", lambda: huggingface_hub.HfApi(endpoint=address, token="hf_test"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield Hub.asked
    listening.shutdown()
    listening.server_close()


def committed(asked: list[tuple[str, Any]]) -> dict[str, bytes]:
    """The files of the one commit."""
    [lines] = (lines for path, lines in asked if "/commit/" in path)
    files = (line["value"] for line in lines if line["key"] == "file")
    return {one["path"]: base64.b64decode(one["content"]) for one in files}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for form in ("model", "sparse"):
        (folder / form).mkdir(parents=True)
        (folder / form / "config.json").write_text("{}")
        (folder / form / "model.safetensors").write_bytes(b"weights")
    (folder / "record.json").write_text(json.dumps(RECORD))
    (folder / "model" / "README.md").write_text(model_card(RECORD))
    return folder


def push(*words: Any) -> None:
    assert not cli.app(["push", *map(str, words)], standalone_mode=False)


def test_a_run_is_uploaded_in_one_commit_with_its_results(
    run: Path, server: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "speed.json").write_text(json.dumps(SPEED))
    push(run, "me/pruned")
    files = committed(server)
    assert files.keys() == {"config.json", "model.safetensors", "README.md"}
    assert files["model.safetensors"] == b"weights"
    assert "/me/pruned" in capsys.readouterr().out
    head, body = files["README.md"].decode().removeprefix("---\n").split("\n---\n", 1)
    data = yaml.safe_load(head)
    assert data["tags"] == ["pruned", "sparse", "platon"]
    [index] = data["model-index"]
    assert index["name"] == "pruned"
    found = {metric["type"]: metric["value"] for one in index["results"] for metric in one["metrics"]}
    assert found == {"accuracy": 0.8125, "f1": 0.75}
    assert index["results"][0]["dataset"] == {"name": "GLUE MRPC", "type": "mrpc", "split": "validation"}
    assert 'AutoModelForSequenceClassification.from_pretrained("me/pruned")' in body
    assert "| eager | dense | 8 × 128 | 30.0 | 1.00 × |" in body
    assert "| sparse | pruned | 8 × 128 | 10.0 | 3.00 × |" in body
    assert body.count("× 128") == 2  # rivals with the dense model, and what failed, are left out
    assert "/home/me" not in body  # paths of this machine are nobody's business
    assert len(body.split("<details>")[0].splitlines()) < 30


def test_other_forms_say_how_to_load_them(run: Path, server: list[tuple[str, Any]]) -> None:
    push(run / "sparse", "me/pruned", "--private")
    card = committed(server)["README.md"].decode()
    assert 'platon.load(snapshot_download("me/pruned"))' in card
    path, [made] = server[0]
    assert path == "/api/repos/create"
    assert made.get("private") is True or made.get("visibility") == "private"


def test_a_card_of_the_users_is_left_alone(run: Path, server: list[tuple[str, Any]]) -> None:
    (run / "model" / "README.md").write_text("mine")
    push(run, "me/pruned")
    assert committed(server)["README.md"] == b"mine"


def test_what_push_says(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="must be USER/NAME, got 'pruned'"):
        push(run, "pruned")
    with pytest.raises(UserError, match=r"has no onnx/; make it with: platon export .*run --format onnx"):
        push(run, "me/pruned", "--form", "onnx")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="the hub does not know you; log in with `hf auth login`"):
        push(run, "me/pruned")
    monkeypatch.setattr(hub, "get_token", lambda: "hf_test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the hub cannot be reached"):
        push(run, "me/pruned")
