"""The embedded Prefect server's port stays free until the server has it."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from tasks.launch.server import FIRST_PORT, HOST, OTHER_PORTS, EmbeddedServer

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
