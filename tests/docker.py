"""A Docker engine of the tests' own, and Debian's files under the name of the image that ours begins with."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("dockerd", "docker", "debootstrap")
BASE = "python:3.11-slim-bookworm"
# What that image has besides a minimal Debian: Python with its headers, pip and certificates.
PACKAGES = "python3,python3-dev,python3-pip,python3-venv,ca-certificates"
START_SECONDS = 60
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def missing() -> list[str]:
    """What is not installed of what is needed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass(frozen=True, kw_only=True)
class Docker:
    """An engine without networks of its own; containers have the machine's, or none."""

    socket: Path

    def __call__(
        self, *words: str, check: bool = True, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["docker", *words],
            env={**os.environ, "DOCKER_HOST": f"unix://{self.socket}", "DOCKER_BUILDKIT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout[-5000:]}"
        return done

    def says(self, *words: str) -> str:
        return self(*words).stdout.strip()


@contextlib.contextmanager
def docker_engine(folder: Path) -> Iterator[Docker]:
    """An engine for the body, with all of its files below `folder`, which is removed at the end.

    Raises RuntimeError, with the end of its log, where none starts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    socket, log = folder / "docker.sock", folder / "dockerd.log"
    words = ["dockerd", "--iptables=false", "--bridge=none", "--storage-driver=overlay2"]
    words += [f"--data-root={folder / 'data'}", f"--exec-root={folder / 'exec'}"]
    words += [f"--pidfile={folder / 'docker.pid'}", f"--host=unix://{socket}"]
    with log.open("w") as output:
        engine = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    docker = Docker(socket=socket)
    try:
        end = time.monotonic() + START_SECONDS
        while docker("version", check=False).returncode:
            if engine.poll() is not None or time.monotonic() > end:
                raise RuntimeError(log.read_text()[-1000:])
            time.sleep(0.5)
        yield docker
    finally:
        engine.terminate()
        try:
            engine.wait(60)
        except subprocess.TimeoutExpired:
            engine.kill()
            engine.wait()
        for network in folder.glob("exec/netns/*"):  # which the engine leaves mounted
            subprocess.run(["umount", str(network)], stderr=subprocess.DEVNULL)
        shutil.rmtree(folder)


def import_base(docker: Docker, folder: Path) -> None:
    """Make Debian's own files the image that the Dockerfile begins with.

    Raises RuntimeError where Debian's archive cannot be had.
    """
    root = folder / "base"
    words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
    with (folder / "debootstrap.log").open("w") as log:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    if done.returncode:
        raise RuntimeError((folder / "debootstrap.log").read_text()[-1000:])
    (root / "usr/bin/python").symlink_to("python3")
    for mark in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        mark.unlink()  # the real image's Python is nobody else's
    if CERTIFICATES.exists():  # whoever vouches for the package index here
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    for archive in (
        *root.glob("var/cache/apt/archives/*.deb"),
        *root.glob("var/lib/apt/lists/*_*"),
    ):
        archive.unlink()
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as files:
        done = subprocess.run(
            ["docker", "import", "-", BASE],
            env={**os.environ, "DOCKER_HOST": f"unix://{docker.socket}"},
            stdin=files.stdout,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(root)


@contextlib.contextmanager
def served(folder: Path, port: int) -> Iterator[str]:
    """A folder of wheels, for a build that has the machine's network."""
    words = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen([*words, "--directory", str(folder)], stdout=quiet, stderr=quiet)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


def index_arguments(links: str | None) -> Sequence[str]:
    """Build arguments by which the packages come from where this machine's pip has them.

    links: address of a folder of wheels, which has torch for a CPU.
    """
    found = {
        "PIP_INDEX_URL": os.environ.get("PIP_INDEX_URL"),
        "UV_INDEX_URL": os.environ.get("UV_INDEX_URL") or os.environ.get("PIP_INDEX_URL"),
        "UV_FIND_LINKS": links,
    }
    words = [f"--build-arg={name}={value}" for name, value in found.items() if value]
    return [*words, *(["--build-arg=TORCH_BACKEND="] if links else [])]
