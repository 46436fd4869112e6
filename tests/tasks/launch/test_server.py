"""The embedded Prefect server: its port, its database, and that it answers who started it alone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tasks.launch.server import (
    FIRST_PORT,
    HOST,
    LOGIN,
    OTHER_PORTS,
    EmbeddedServer,
    headers_for,
    login_file,
    write_login,
)
from tests.storage.tracking.test_database_template import tables

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_it_is_none_that_the_kernel_gives_to_others(tmp_path: Path) -> None:
    if not EPHEMERAL.exists():
        pytest.skip("the kernel does not say which ports it gives")
    lowest = int(EPHEMERAL.read_text().split()[0])
    if lowest < OTHER_PORTS.stop:
        pytest.skip(f"this machine gives ports from {lowest} on, not from Linux's usual 32768")
    with contextlib.closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # taken already: as good
            other.bind((HOST, FIRST_PORT))
            other.listen()
        ports = {EmbeddedServer(tmp_path).port for _ in range(5)}
    assert FIRST_PORT not in ports
    assert max(ports) < lowest
    assert len(ports) > 1  # runs that start together get different ones


def test_runs_that_start_together_get_different_ports(tmp_path: Path) -> None:
    """Neither has bound its port yet when the other looks whether it is free."""
    servers = [EmbeddedServer(tmp_path) for _ in range(3)]
    assert len({server.port for server in servers}) == 3
    for server in servers:
        server.stop()
    assert EmbeddedServer(tmp_path).port in {FIRST_PORT, *OTHER_PORTS}


@pytest.mark.slow
def test_a_new_folder_gets_a_copy_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("one", "two"):
        server = EmbeddedServer(tmp_path / name)
        server.launch()
        try:
            server.wait()
        finally:
            server.stop()
    (template,) = (tmp_path / "cache" / "refrain").iterdir()
    migrated = tables(template)
    assert len(migrated) > 100
    assert tables(tmp_path / "one" / "prefect.db") == migrated
    assert tables(tmp_path / "two" / "prefect.db") == migrated


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server whose log of runs would be in a folder beside its own, as of a run."""
    server = EmbeddedServer(tmp_path_factory.mktemp("work") / "prefect")
    server.launch()
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def asked(server: EmbeddedServer, login: str | None, **headers: str) -> int:
    """Status of a question for flow runs."""
    auth = None if login is None else httpx.BasicAuth(*login.split(":"))
    url = f"{server.address}/api/flow_runs/filter"
    return httpx.post(url, json={}, auth=auth, headers=headers).status_code


def test_who_has_no_login_is_refused(server: EmbeddedServer) -> None:
    assert asked(server, None) == 401
    assert asked(server, "refrain:" + "a" * 32) == 401
    assert asked(server, server.login) == 200
    with connect(
        f"ws://{HOST}:{server.port}/api/events/in", subprotocols=[Subprotocol("prefect")]
    ) as socket_:
        socket_.send('{"type": "auth", "token": "guessed"}')
        with pytest.raises(Exception, match="1008"):
            socket_.recv(timeout=10)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:4200", "127.0.0.1.evil.example", ""]
)
def test_a_foreign_host_is_refused_even_with_the_login(server: EmbeddedServer, host: str) -> None:
    assert asked(server, server.login, Host=host) == 400


def test_the_host_of_a_forwarded_port_is_none(server: EmbeddedServer) -> None:
    assert asked(server, server.login, Host="localhost:9999") == 200


def test_no_other_origin_may_read(server: EmbeddedServer) -> None:
    url = f"{server.address}/api/health"
    for origin, allowed in ((server.address, server.address), ("http://evil.example", None)):
        answer = httpx.get(url, headers={"Origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_the_login_is_in_a_file_of_ours_alone(server: EmbeddedServer) -> None:
    assert server.login_file.read_text() == server.login
    assert server.login_file.stat().st_mode & 0o777 == 0o600
    assert LOGIN.fullmatch(server.login)
    assert EmbeddedServer(server.home).login != server.login
    mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert not any(server.login in " ".join(process.cmdline()) for process in mine)
    for file in server.home.rglob("*"):
        readable = file.is_file() and file.stat().st_mode & 0o077
        assert not readable or server.login.encode() not in file.read_bytes(), file


def test_a_file_that_others_can_read_is_not_written_into(tmp_path: Path) -> None:
    file = login_file(tmp_path, 4200)
    file.write_text("")
    file.chmod(0o666)
    with file.open() as opened_by_another:
        write_login(file, "refrain:secret")
        assert opened_by_another.read() == ""
    assert file.stat().st_mode & 0o777 == 0o600
    target = tmp_path / "target"
    file.unlink()
    file.symlink_to(target)
    write_login(file, "refrain:secret")
    assert not target.exists()


def test_the_link_sets_what_the_dashboard_asks_for(server: EmbeddedServer) -> None:
    page, _, login = server.dashboard.link.partition("#")
    assert login == server.login  # a fragment, which no browser sends
    answer = httpx.get(page)
    assert 'localStorage.setItem("prefect-password"' in answer.text
    assert server.login not in answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert server.login not in server.dashboard.asking
    assert str(server.login_file) in server.dashboard.asking
    assert httpx.get(f"{server.address}/ui-settings").json()["api_url"] == "/api"


def test_other_commands_get_the_login_of_a_run_of_ours(server: EmbeddedServer) -> None:
    logs = str(server.home.parent / "logs" / "run")
    api = f"{server.address}/api"
    headers = headers_for(api, logs)
    assert httpx.post(f"{api}/flow_runs/filter", json={}, headers=headers).status_code == 200


def test_a_login_is_sent_to_nobody_else(tmp_path: Path) -> None:
    """The record of a run, which names the server, is in a store that others may write to."""
    logs = str(tmp_path / "logs" / "run")
    (tmp_path / "prefect").mkdir()
    write_login(login_file(tmp_path / "prefect", 4200), "refrain:" + "a" * 32)
    assert headers_for("http://127.0.0.1:4200/api", logs)
    assert headers_for("http://evil.example:4200/api", logs) == {}
    assert headers_for("http://127.0.0.1:4200@evil.example:4200/api", logs) == {}
    assert headers_for("http://127.0.0.1:4201/api", logs) == {}
    write_login(login_file(tmp_path / "prefect", 4202), "another file of this user's")
    assert headers_for("http://127.0.0.1:4202/api", logs) == {}
    team = {PREFECT_API_URL: "http://team:4200/api", PREFECT_API_AUTH_STRING: "team:secret"}
    with temporary_settings(team):
        assert headers_for("http://team:4200/api", None)
        assert headers_for("http://evil.example/api", None) == {}
