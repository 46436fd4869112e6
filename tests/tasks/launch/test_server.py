"""The embedded Prefect server: its port stays free until it has it, and its database is a copy."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from tasks.launch.server import FIRST_PORT, HOST, OTHER_PORTS, EmbeddedServer
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
