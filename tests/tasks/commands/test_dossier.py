"""A dossier goes to the hub as a private model repository; the hub is one of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from configs.overrides import ConfigError
from tasks.commands.dossier import login, push


class Hub(ThreadingHTTPServer):
    """The requests of an upload, as far as a dossier needs them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None]] = []  # path, token
        self.made: dict[str, object] = {}
        self.files: dict[str, str] = {}  # name -> content, base64
        self.refuses = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if self.server.refuses:
            self._answer(403, {"error": "You have no right to do that"})
        elif self.path == "/api/repos/create":
            self.server.made = json.loads(body)
            self._answer(200, {"url": f"{self.server.address}/me/run"})
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif self.path == "/api/validate-yaml":  # the card's first lines
            self._answer(200, {"errors": [], "warnings": []})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = line["value"]["content"]
            commit = {"commitUrl": f"{self.server.address}/me/run/commit/1", "commitOid": "1"}
            self._answer(200, commit)

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self._answer(404 if self.server.refuses else 200, {"id": "me/run", "sha": "0"})

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "dossier"
    made.mkdir()
    (made / "README.md").write_text("# run\n")
    (made / "verify.py").write_text("print(1)\n")
    return made


def test_a_dossier_becomes_a_private_repository(hub: Hub, folder: Path) -> None:
    address = push(folder, "me/run", "hf_token", hub.address)
    assert address == f"{hub.address}/me/run"
    assert hub.made["visibility"] == "private"
    assert sorted(hub.files) == ["README.md", "verify.py"]
    assert {token for _, token in hub.asked} == {"Bearer hf_token"}


def test_what_the_hub_refuses_is_one_sentence(hub: Hub, folder: Path) -> None:
    hub.refuses = True
    with pytest.raises(ConfigError, match="--push me/run: the hub refused: .*403"):
        push(folder, "me/run", "hf_token", hub.address)


def test_without_a_login_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="--push needs a login at the hub"):
        login()
