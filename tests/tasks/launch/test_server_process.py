"""A server that ends or hangs is started again, later each time."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.launch import server_process
from tasks.launch.server_process import KeptServer, ServerProcess
from tests.ports import free_port


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    command += ["--directory", str(tmp_path)]
    found = ServerProcess(
        "file", command, os.environ, f"http://127.0.0.1:{port}/", tmp_path / "server.log"
    )
    found.start()
    found.wait(20)
    yield found
    found.stop(5)


def news(kept: KeptServer, seconds: float = 20) -> str:
    until = time.monotonic() + seconds
    while (said := kept.look()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return said


def pid(server: ServerProcess) -> int:
    assert server._process is not None
    return server._process.pid


def test_a_killed_server_is_back_and_waits_longer_each_time(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "FIRST_WAIT", 0.1)
    kept = KeptServer(server)
    assert kept.look() is None
    for wait in ("0.1", "0.2"):
        os.kill(pid(server), signal.SIGKILL)
        said = news(kept)
        assert f"The file server ended with code -9; it is started again in {wait} s." in said
        assert str(server.log) in said
        assert news(kept) == "The file server answers again."
    monkeypatch.setattr(server_process, "STEADY", 0.0)  # it has run for long
    os.kill(pid(server), signal.SIGKILL)
    assert "again in 0.1 s" in news(kept)


def test_a_hung_server_is_killed_and_started_again(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("HEALTH_TIMEOUT", 0.2), ("ASK_EVERY", 0.1), ("SILENCE", 0.5)):
        monkeypatch.setattr(server_process, name, seconds)
    monkeypatch.setattr(server_process, "FIRST_WAIT", 0.1)
    kept, first = KeptServer(server), pid(server)
    os.kill(first, signal.SIGSTOP)
    assert "has not answered for 0.5 s and was killed" in news(kept)
    assert not psutil.pid_exists(first)
    monkeypatch.setattr(server_process, "SILENCE", 20.0)
    assert news(kept) == "The file server answers again."


def test_a_large_log_begins_anew_and_the_last_one_stays(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "ASK_EVERY", 0.0)
    monkeypatch.setattr(server_process, "LARGEST_LOG", 2000)
    kept, last = KeptServer(server), server.log.with_name("server.log.1")
    until = time.monotonic() + 20
    while not last.exists():  # the server writes a line for each question
        assert kept.look() is None and time.monotonic() < until
    assert last.stat().st_size > 2000
    assert server.answers()
    assert 0 < server.log.stat().st_size < 2000
    assert "GET /" in server.log.read_text()
