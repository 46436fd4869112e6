"""A real OpenSSH server on loopback, with keys of its own."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT = 20.0  # seconds

CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/client.pub
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""


@dataclass(frozen=True)
class Sshd:
    """A server that lets this user in."""

    host: str  # as `ssh` takes it
    options: list[str]  # by which `ssh` finds the server and the key


def missing() -> list[str]:
    """Programs that are not installed."""
    programs = ("ssh", "ssh-keygen", "/usr/sbin/sshd")
    return [name for name in programs if shutil.which(name) is None]


@contextlib.contextmanager
def running_sshd(folder: Path) -> Iterator[Sshd]:
    """The server for the body."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("host", "client"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    (folder / "sshd_config").write_text(CONFIG.format(port=port, folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)  # where Debian's server drops its privileges
    log = (folder / "sshd.log").open("wb")
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")],
        stderr=log,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + START_TIMEOUT
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < end, (folder / "sshd.log").read_text()
            time.sleep(0.1)
        options = [
            f"-p{port}",
            f"-i{folder}/client",
            "-oStrictHostKeyChecking=no",
            f"-oUserKnownHostsFile={folder}/known_hosts",
            "-oIdentitiesOnly=yes",
        ]
        yield Sshd(host=f"{getpass.getuser()}@127.0.0.1", options=options)
    finally:
        server.terminate()
        server.wait()
        log.close()
