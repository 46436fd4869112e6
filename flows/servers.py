"""Servers for a team as plain processes: Prefect and MLflow, until Ctrl-C.

    python -m flows.servers [--host ADDRESS] [--folder FOLDER]

The databases come from the environment, passwords included, because a command line can be read by
everybody on the machine:

    PREFECT_SERVER_DATABASE_CONNECTION_URL=postgresql+asyncpg://USER:PASSWORD@HOST/prefect
    MLFLOW_BACKEND_STORE_URI=postgresql+psycopg2://USER:PASSWORD@HOST/mlflow

Without them both use SQLite files in the folder, which one person at a time is well served by.
The servers listen on loopback unless --host says otherwise; put a proxy with TLS and a login before
them then (docs/security.md).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import httpx

from configs.environment import mlflow_database
from engines.processes.parent_death import die_with_parent, kill_all, session

LOOPBACK = "127.0.0.1"
START_TIMEOUT = 180.0  # seconds; the first start migrates the databases
STOP_TIMEOUT = 10.0  # seconds


class Server:
    """A server process and how to tell that it answers."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        health: str,
        log: Path,
    ) -> None:
        self.name = name
        self.health = health
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def wait(self, timeout: float = START_TIMEOUT) -> None:
        """Return when it answers; RuntimeError when it ends or does not."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"The {self.name} server ended with code {self.process.returncode}. "
                    f"Its log is {self.log}."
                )
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.health, timeout=2).is_success:
                    return
            time.sleep(0.2)
        raise RuntimeError(
            f"The {self.name} server did not answer within {timeout:g} s. Its log is {self.log}."
        )

    def stop(self) -> None:
        """End it and what it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT)
                break
        kill_all(session(self.process.pid))  # children that did not end with it


def prefect_server(host: str, port: int, folder: Path) -> Server:
    """Prefect's server with its dashboard and schedules."""
    environment = {
        "PREFECT_HOME": str(folder / "prefect"),
        # The dashboard calls the address that these two name, not the one that it came from.
        "PREFECT_SERVER_API_HOST": host,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    command = [sys.executable, "-m", "prefect", "server", "start"]
    command += ["--host", host, "--port", str(port)]
    health = f"http://{_reachable(host)}:{port}/api/health"
    return Server("Prefect", command, environment, health, folder / "prefect.log")


def mlflow_server(host: str, port: int, folder: Path) -> Server:
    """MLflow's tracking server; artifacts go through it into the folder."""
    environment = {
        "MLFLOW_BACKEND_STORE_URI": mlflow_database() or f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", host, "--port", str(port)]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    health = f"http://{_reachable(host)}:{port}/health"
    return Server("MLflow", command, environment, health, folder / "mlflow.log")


def _reachable(host: str) -> str:
    return LOOPBACK if host == "0.0.0.0" else host


def main(words: Sequence[str] = ()) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    arguments = _parser().parse_args(list(words) or sys.argv[1:])
    folder = Path(arguments.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    servers: list[Server] = []

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        servers.append(prefect_server(arguments.host, arguments.prefect_port, folder))
        servers.append(mlflow_server(arguments.host, arguments.mlflow_port, folder))
        for server in servers:
            server.wait()
        seen = _reachable(arguments.host)
        print(f"export PREFECT_API_URL=http://{seen}:{arguments.prefect_port}/api")
        print(f"# and for each run: tracking.uri=http://{seen}:{arguments.mlflow_port}", flush=True)
        while all(server.process.poll() is None for server in servers):
            time.sleep(1.0)
        ended = next(server for server in servers if server.process.poll() is not None)
        raise RuntimeError(f"The {ended.name} server ended. Its log is {ended.log}.")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for server in servers:
            server.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.servers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default=LOOPBACK, help="address to listen at [127.0.0.1]")
    parser.add_argument("--prefect-port", type=int, default=4200)
    parser.add_argument("--mlflow-port", type=int, default=5000)
    parser.add_argument("--folder", default=".refrain/servers", help="for logs and SQLite files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
