"""`refrain health`: pages that answer or do not, and processes that run or stand."""

from __future__ import annotations

import signal
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


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
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
    assert "503" in capsys.readouterr().err
    assert health.main([f"http://127.0.0.1:{free_port()}/health"]) == 1
    monkeypatch.setenv("REFRAIN_HEALTH_URL", f"{page}/other")
    assert health.main(["--last", "/dev/null"]) == 1


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
