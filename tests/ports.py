"""Ports of loopback for servers of tests."""

from __future__ import annotations

from engines.workers.placement import find_free_port


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    found: set[int] = set()
    while len(found) < count:
        found.add(find_free_port("127.0.0.1"))
    return sorted(found)


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
