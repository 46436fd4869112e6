"""Keeping what only this machine's processes need to reach off the network."""

from __future__ import annotations

import os
import socket


def pin_to_loopback(host: str) -> bool:
    """Have Gloo and NCCL use the loopback device when all ranks are on this host.

    A loopback meeting point shows it. Nothing is opened to the network then, and a host that cannot
    reach its own address works too. True if pinned.
    """
    try:
        alone = socket.gethostbyname(host).startswith("127.")
    except OSError:
        alone = host == "localhost"
    if not alone:
        return False
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    return True


def listen_at(host: str, port: int = 0, backlog: int | None = None) -> socket.socket:
    """A socket that listens at `host` alone; port 0: at a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
