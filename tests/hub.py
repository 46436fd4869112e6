"""A hub of datasets on loopback, as far as huggingface_hub and datasets ask one when they load by id."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0" * 39 + "1"  # of every repository
Files = Mapping[str, bytes]  # by their names in a repository


class Hub(ThreadingHTTPServer):
    """Serves repositories of datasets, by their ids; some only to those who have a token."""

    def __init__(self, datasets: Mapping[str, Files], gated: frozenset[str] = frozenset()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.datasets, self.gated = datasets, gated
        self.asked: list[str] = []  # method and path of each request

    @property
    def address(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(datasets: Mapping[str, Files], gated: frozenset[str] = frozenset()) -> Iterator[Hub]:
    """A hub while the body runs."""
    hub = Hub(datasets, gated)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer_request()

    def do_HEAD(self) -> None:
        self._answer_request()

    def do_POST(self) -> None:
        self._answer_request()

    def _answer_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(f"{self.command} {self.path}")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            name, (what, _, *rest) = (
                "/".join(parts[2:4]),
                [*parts[4:], "revision", COMMIT][:2] + parts[6:],
            )
        elif parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            name, what, rest = "/".join(parts[1:3]), "resolve", parts[5:]
        else:
            return self._refuse(404, "EntryNotFound")
        files = self.server.datasets.get(name)
        if files is None:
            return self._refuse(404 if "Authorization" in self.headers else 401, "RepoNotFound")
        if name in self.server.gated and "Authorization" not in self.headers and what != "revision":
            return self._refuse(401, "GatedRepo")
        if what == "revision":
            siblings = [{"rfilename": one} for one in files]
            facts = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            return self._json({**facts, "gated": "manual" if name in self.server.gated else False})
        if what == "tree":
            whole = "recursive=true" in self.path.lower()
            return self._json(_listed(files, "/".join(rest), whole))
        if what == "paths-info":
            asked = parse_qs(body.decode()).get("paths", [])
            return self._json([one for one in _listed(files) if one["path"] in asked])
        data = files.get("/".join(rest))
        if data is None:
            return self._refuse(404, "EntryNotFound")
        return self._send(200, data, "application/octet-stream", {"ETag": f'"{_oid(data)}"'})

    def _json(self, body: object) -> None:
        self._send(200, json.dumps(body).encode(), "application/json", {})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", "application/json", {"X-Error-Code": code})

    def _send(self, status: int, data: bytes, kind: str, more: Mapping[str, str]) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), "X-Repo-Commit": COMMIT}
        for name, value in {**headers, **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def _listed(files: Files, folder: str = "", whole: bool = True) -> list[dict[str, object]]:
    """Entries of a folder, or of all that is below it."""
    start = f"{folder}/" if folder else ""
    found: dict[str, dict[str, object]] = {}
    for name, data in files.items():
        if name.startswith(start):
            for parent in reversed(PurePosixPath(name).parents[:-1]):
                entry = {"type": "directory", "path": str(parent), "oid": "0" * 40, "size": 0}
                found.setdefault(str(parent), entry)
            found[name] = {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
    return [
        entry
        for name, entry in found.items()
        if name.startswith(start) and (whole or "/" not in name.removeprefix(start))
    ]
