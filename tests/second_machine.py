"""A second machine, as far as the network goes: a namespace of Linux, with a link that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, kw_only=True)
class SecondMachine:
    """Where `ip netns exec NAME` runs commands."""

    name: str
    own: str  # our address, as it is reached from there
    its: str

    def link(self, state: str) -> None:
        """Take the link `down` or `up`."""
        subprocess.run(["ip", "link", "set", f"{self.name}a", state], check=True)


@contextlib.contextmanager
def second_machine() -> Iterator[SecondMachine]:
    """One that is there as long as the body runs."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces want root and ip (apt install iproute2)")
    name, net = f"rf{os.getpid()}", f"10.231.{os.getpid() % 250}"
    commands = [
        f"netns add {name}",
        f"link add {name}a type veth peer name {name}b netns {name}",
        f"addr add {net}.1/24 dev {name}a",
        f"link set {name}a up",
        f"-n {name} addr add {net}.2/24 dev {name}b",
        f"-n {name} link set {name}b up",
        f"-n {name} link set lo up",
    ]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield SecondMachine(name=name, own=f"{net}.1", its=f"{net}.2")
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)
