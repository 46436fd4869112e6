"""The image is built, by Docker on Debian's own files, and run: a run of two steps, its health, its labels.

Takes a quarter of an hour and 15 GB of disk for the time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.docker import Docker, docker_engine, import_base, index_arguments, missing, served
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
IMAGE = "refrain:cpu"
MOST_GB = 3.6  # of the image, without what it begins with
READ_ONLY = ("--read-only", "--tmpfs", "/tmp:exec", "--env", "HOME=/tmp")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """An engine that has the images."""
    if missing():
        pytest.skip(f"no {', '.join(missing())} (apt install docker.io debootstrap)")
    if os.geteuid():
        pytest.skip("a Docker engine of its own takes root")
    folder = tmp_path_factory.mktemp("docker")
    wheels = os.environ.get("PIP_FIND_LINKS") or os.environ.get("UV_FIND_LINKS")
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(docker_engine(folder / "engine"))
            import_base(engine, folder)
        except RuntimeError as error:
            pytest.skip(f"no Docker engine or no Debian archive here: {error}")
        links = None
        if wheels and Path(wheels).is_dir():
            links = stack.enter_context(served(Path(wheels), free_port()))
        words = ["build", "--network=host", "--tag", IMAGE, *index_arguments(links)]
        words += ["--build-arg=VERSION=0.0", "--build-arg=REVISION=abc", str(ROOT)]
        engine(*words, timeout=3000)
        yield engine


def inspected(docker: Docker) -> dict[str, Any]:
    (found,) = json.loads(docker.says("inspect", IMAGE))
    return dict(found)


def test_it_is_labelled_and_no_larger_than_it_was(docker: Docker) -> None:
    image = inspected(docker)
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "refrain"
    assert labels["org.opencontainers.image.version"] == "0.0"
    assert labels["org.opencontainers.image.revision"] == "abc"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert image["Config"]["User"] == "1000"
    base = json.loads(docker.says("inspect", "python:3.11-slim-bookworm"))[0]
    assert (image["Size"] - base["Size"]) / 1e9 < MOST_GB
    history = docker.says("history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGE)
    assert "127.0.0.1" not in history  # nothing of where it was built


def test_it_has_what_runs_call(docker: Docker) -> None:
    program = "ssh -V && g++ --version && python -c 'import bokeh, kr8s, s3fs, vllm, torch'"
    done = docker("run", "--rm", "--network=none", *READ_ONLY, IMAGE, "sh", "-c", program)
    assert "OpenSSH" in done.stdout
    bill = json.loads(docker.says("run", "--rm", IMAGE, "cat", "/opt/refrain/dist/sbom.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    names = {one["name"] for one in bill["components"]}
    assert {"torch", "prefect", "bokeh", "refrain-rl"} <= names
    assert "dask-jobqueue" not in names  # Slurm's scripts are ours (docs/decisions/clusters.md)


def test_a_run_in_it_writes_to_its_volumes_alone(docker: Docker, tmp_path: Path) -> None:
    """As a pod has it: no root, nothing writable but /tmp and .refrain, no network."""
    volume = f"refrain-{os.getpid()}"
    mount = ("--volume", f"{volume}:/home/refrain/.refrain")
    words = ["run", "--rm", "--network=none", *READ_ONLY, *mount, "--shm-size=1g", IMAGE]
    words += ["refrain", "grpo", "tiny", "--name", "sums-1"]
    done = docker(*words, "steps=1", timeout=900)
    assert "1 steps are committed" in done.stdout
    again = docker(*words, "steps=2", timeout=900)  # it goes on
    assert "2 steps are committed" in again.stdout
    assert docker(*words, "steps=2").stdout.strip().endswith(
        "Run sums-1 is finished: 2 of 2 steps are committed."
    )  # fmt: skip


def test_its_health_is_that_of_its_processes(docker: Docker) -> None:
    checks = ("--health-interval=2s", "--health-start-period=1s", "--health-retries=2")
    loop = "import time\nwhile True: time.sleep(0.1)"
    words = ["run", "--detach", "--network=none", *checks, IMAGE, "python", "-c", loop]
    name = docker.says(*words)
    try:
        wait_for(docker, name, "healthy")
        docker("kill", "--signal=STOP", name)
        wait_for(docker, name, "unhealthy")
    finally:
        docker("rm", "--force", name)


def wait_for(docker: Docker, name: str, state: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while (now := docker.says("inspect", "--format", "{{.State.Health.Status}}", name)) != state:
        assert time.monotonic() < end, now
        time.sleep(1.0)
