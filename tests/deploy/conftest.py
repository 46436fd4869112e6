"""A Prefect server with its scheduler, a process worker, and runs started as the dashboard does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]


class Patient(httpx.HTTPTransport):
    """Asks again after a 503, Prefect's answer while SQLite is being written to by others."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(30):
            response = super().handle_request(request)
            if response.status_code != 503:
                break
            response.close()
            time.sleep(0.5)
        return response


API = httpx.Client(timeout=120, transport=Patient())
OVER = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its own session, and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


@dataclass
class Platform:
    """A team's server, as the tests use it."""

    home: Path
    port: int = field(default_factory=free_port)
    database: str | None = None  # SQLAlchemy address; None: SQLite
    python: str | Path = sys.executable
    variables: dict[str, str] = field(default_factory=environment)  # for all that it starts
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)
    worker: subprocess.Popen[Any] | None = None

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api(self) -> str:
        return f"{self.dashboard}/api"

    @property
    def environment(self) -> dict[str, str]:
        return {
            **self.variables,
            "PREFECT_API_URL": self.api,
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        }

    def start_server(self) -> None:
        settings = {
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_SERVER_API_HOST": "127.0.0.1",
            "PREFECT_SERVER_API_PORT": str(self.port),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "1",
        }
        if self.database is not None:
            settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self.database
        words = ["server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        server = self.start(words, "server.log", {**self.variables, **settings})
        until = time.monotonic() + 300
        while time.monotonic() < until:
            assert server.poll() is None, self.log("server.log")
            with contextlib.suppress(httpx.HTTPError):
                if API.get(f"{self.api}/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(self.log("server.log"))

    def start_worker(self, **more: str) -> None:
        words = ["worker", "start", "--pool", "refrain", "--type", "process", "--name", "tests"]
        self.worker = self.start(words, "worker.log", {**self.environment, **more})

    def start(self, words: list[str], log: str, variables: dict[str, str]) -> subprocess.Popen[Any]:
        with (self.home / log).open("wb") as out:
            process = subprocess.Popen(
                [self.python, "-m", "prefect", *words],
                cwd=self.home,
                env=variables,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.home / name).read_text(errors="replace")[-8000:]

    def deploy(self, *words: str) -> subprocess.CompletedProcess[str]:
        """What `make deploy` runs."""
        return subprocess.run(
            [self.python, "-m", "flows.deploy", *words],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def deployment(self, name: str) -> dict[str, Any]:
        return API.get(f"{self.api}/deployments/name/grpo/{name}").raise_for_status().json()

    def config(self, name: str, /, **changes: Any) -> dict[str, Any]:
        """The deployment's settings, in places of the test's own, with changes by dotted name."""
        config = self.deployment(name)["parameters"]["config"]
        changes = {
            "store.uri": f"file://{self.home}/store",
            "tracking.uri": f"sqlite:///{self.home}/mlflow.db",
            **changes,
        }
        for key, value in changes.items():
            *groups, last = key.split(".")
            place = config
            for group in groups:
                place = place[group]
            place[last] = value
        return config

    def submit(self, name: str, config: dict[str, Any], /, **more: str) -> httpx.Response:
        """Start a run as the form does; more: `name`, of the flow run."""
        body = {"parameters": {"config": config}, "state": {"type": "SCHEDULED"}, **more}
        return API.post(
            f"{self.api}/deployments/{self.deployment(name)['id']}/create_flow_run", json=body
        )

    def flow_run(self, identity: str) -> dict[str, Any]:
        return API.get(f"{self.api}/flow_runs/{identity}").raise_for_status().json()

    def flow_runs_of(self, deployment: str) -> list[dict[str, Any]]:
        """Those of the deployment of this id that somebody asked for."""
        asked = {"deployments": {"id": {"any_": [deployment]}}}
        answer = API.post(f"{self.api}/flow_runs/filter", json=asked).raise_for_status()
        return [one for one in answer.json() if not one["auto_scheduled"]]

    def wait(self, identity: str, *states: str, timeout: float = 240) -> dict[str, Any]:
        """The flow run, once it is in one of the states."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            found = self.flow_run(identity)
            if found["state_type"] in states:
                return found
            assert found["state_type"] not in OVER, (found["state"], self.log("worker.log"))
            time.sleep(0.3)
        raise AssertionError(f"{found['state']}\n{self.log('worker.log')}")

    def wait_until(self, identity: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The flow run, once `holds` is true of it."""
        until = time.monotonic() + 240
        while time.monotonic() < until:
            found = self.flow_run(identity)
            if holds(found):
                return found
            time.sleep(0.3)
        raise AssertionError(f"{found['state']}\n{self.log('worker.log')}")

    def children(self) -> list[psutil.Process]:
        """What the worker has started."""
        assert self.worker is not None
        return psutil.Process(self.worker.pid).children(recursive=True)

    def stop(self) -> None:
        for process in reversed(self.processes):
            end(process)


Make = Callable[..., Platform]


@pytest.fixture(scope="module")
def make_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    made: list[Platform] = []

    def make(**options: Any) -> Platform:
        platform = Platform(tmp_path_factory.mktemp("platform"), **options)
        made.append(platform)
        platform.start_server()
        return platform

    yield make
    for platform in made:
        platform.stop()
        shutil.rmtree(platform.home, ignore_errors=True)


@pytest.fixture(scope="module")
def platform(make_platform: Make) -> Platform:
    """A server on SQLite with the deployments tiny and nightly, and a worker."""
    found = make_platform()
    done = found.deploy("tiny", "nightly")
    assert done.returncode == 0, done.stderr
    assert "prefect worker start --pool refrain" in done.stdout
    found.start_worker()
    return found
