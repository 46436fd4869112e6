"""`refrain health`: pages that answer or do not, and processes that run or stand."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flows import health
from tests.ports import free_port

ANSWERS = {"/health": 200, "/broken": 500, "/closed": 401, "/moved": 302}  # all others 503


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow":  # a byte now and then, which no timeout of the socket ends
            for _ in range(200):
                self.wfile.write(b"H")
                time.sleep(0.02)
        self.send_response(ANSWERS.get(self.path, 503))
        self.send_header("Location", "/health")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_pages_are_asked(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert health.main([f"{page}/health"]) == 0
    assert health.main([f"{page}/health", f"{page}/other"]) == 1
    assert f"{page}/other answers 503 Service Unavailable." in capsys.readouterr().err
    assert health.main([f"http://127.0.0.1:{free_port()}/health"]) == 1
    monkeypatch.setenv("REFRAIN_HEALTH_URL", f"{page}/other")
    assert health.main(["--last", "/dev/null"]) == 1


def test_each_page_that_is_not_well_has_a_line_that_is_true(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "TIMEOUT", 0.5)
    down = f"http://127.0.0.1:{free_port()}/health"
    database = "postgresql+asyncpg://refrain:hunter2@127.0.0.1:5432/prefect"
    with socket.create_server(("127.0.0.1", 0)) as full:  # takes connections and never answers
        silent = f"http://127.0.0.1:{full.getsockname()[1]}/"
        pages = [down, silent, database, "file:///etc/hostname", "http://me:hunter2@127.0.0.1/"]
        own = [f"{page}/{name}" for name in ("slow", "broken", "closed", "moved", "health")]
        assert health.main([*pages, *own, "http://127.0.0.1:99999/"]) == 1
    give = "Give one as http://HOST:PORT/PATH, without a login."
    assert capsys.readouterr().err.splitlines() == [
        f"{down} cannot be reached: Connection refused.",
        f"{silent} did not answer in 0.5 s.",
        f"postgresql+asyncpg://…@127.0.0.1:5432/prefect is no address of a page. {give}",
        f"file:///etc/hostname is no address of a page. {give}",
        f"http://…@127.0.0.1/ is no address of a page. {give}",
        f"{page}/slow did not answer in 0.5 s.",
        f"{page}/broken answers 500 Internal Server Error.",
        f"{page}/closed answers 401 Unauthorized: it asks for a login. Name a page that needs none.",
        f"{page}/moved sends on to /health, as to a login. Name the page itself.",
        f"http://127.0.0.1:99999/ is no address of a page. {give}",
    ]


def test_what_speaks_no_http_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as database:

        def answer() -> None:
            with database.accept()[0] as asked:  # as Postgres does
                asked.recv(1000)
                asked.sendall(b"E\0\0\0\x85SFATAL\0VFATAL\0C0A000\0")

        threading.Thread(target=answer, daemon=True).start()
        address = f"http://127.0.0.1:{database.getsockname()[1]}/"
        assert health.main([address]) == 1
    assert capsys.readouterr().err == f"{address} answers, and not by HTTP.\n"


def test_where_the_last_look_cannot_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert health.main(["--last", str(tmp_path)]) == 1
    said = f"The last look cannot be kept in {tmp_path}: Is a directory. Set --last to a file.\n"
    assert capsys.readouterr().err == said


def test_processes_that_stand_still_are_found(tmp_path: Path) -> None:
    """Of one real process, which runs, is stopped, and goes on."""
    proc, last = tmp_path / "proc", tmp_path / "last"
    proc.mkdir()
    words = "import time\nwhile True: time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", words]) as process:
        try:
            (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
            assert health.at_rest(last, proc) == ""  # nothing to compare it with yet
            time.sleep(0.2)
            assert health.at_rest(last, proc) == ""
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            health.at_rest(last, proc)
            assert health.at_rest(last, proc) == "No process here ran since the last look."
            process.send_signal(signal.SIGCONT)
            time.sleep(0.2)
            assert health.at_rest(last, proc) == ""
        finally:
            process.kill()
