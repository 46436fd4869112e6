"""Prefect's and MLflow's servers for a team, as processes that run until they are stopped."""

from __future__ import annotations

import ipaddress
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from configs.environment import given, mlflow_database
from configs.optional_packages import pip_install
from configs.terminal_text import print_text
from tasks.launch.server_process import ServerError, ServerProcess
from tasks.run.packages import installed

LOOPBACK = "127.0.0.1"
PREFECT_LOGIN = "PREFECT_SERVER_API_AUTH_STRING"
MLFLOW_LOGIN = "MLFLOW_AUTH_CONFIG_PATH"
START_TIMEOUT = 180.0  # seconds; the first start migrates the databases
STOP_TIMEOUT = 10.0  # seconds


def prefect_server(host: str, port: int, folder: Path) -> ServerProcess:
    """Prefect's server with its dashboard and schedules."""
    environment = {
        **os.environ,
        "PREFECT_HOME": str(folder / "prefect"),
        # The dashboard calls the address that these two name, not the one that it came from.
        "PREFECT_SERVER_API_HOST": host,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    own = f"http://{_reachable(host)}:{port}"
    environment.setdefault("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", own)
    command = [sys.executable, "-m", "prefect", "server", "start"]
    command += ["--host", host, "--port", str(port)]
    health = f"http://{_reachable(host)}:{port}/api/health"
    return ServerProcess("Prefect", command, environment, health, folder / "prefect.log")


def open_to_all(host: str) -> str | None:
    """Why servers at an address of the network would let everybody in; None where they do not."""
    if _is_loopback(host):
        return None
    login = given((PREFECT_LOGIN, MLFLOW_LOGIN))
    missing = [name for name in (PREFECT_LOGIN, MLFLOW_LOGIN) if not login.get(name)]
    if missing:
        return (
            f"--host {host} would let everybody there into the servers, and who is in may run code "
            f"where Prefect's workers are. Set {' and '.join(missing)} (docs/security.md, Servers "
            "of a team), or leave --host out and put a proxy with a login before them."
        )
    if installed("flask-wtf") is None:
        return (
            f"{MLFLOW_LOGIN} is set, and MLflow's login needs Flask-WTF. "
            f"Install it: {pip_install('flask-wtf')}."
        )
    return None


def mlflow_server(host: str, port: int, folder: Path) -> ServerProcess:
    """MLflow's tracking server; artifacts go through it into the folder."""
    environment = {
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": mlflow_database() or f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", host, "--port", str(port)]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    if environment.get(MLFLOW_LOGIN):
        command += ["--app-name", "basic-auth"]
        environment.setdefault("MLFLOW_FLASK_SERVER_SECRET_KEY", secrets.token_urlsafe(32))
    health = f"http://{_reachable(host)}:{port}/health"
    return ServerProcess("MLflow", command, environment, health, folder / "mlflow.log")


def serve(host: str, prefect_port: int, mlflow_port: int, folder: Path) -> int:
    """Run both until Ctrl-C or SIGTERM; returns the exit code.

    `folder`: for logs, and for databases where the environment names none.
    """
    if installed("mlflow") is None:
        print_text(
            "refrain servers starts MLflow's server, and only mlflow-skinny is installed. "
            f"Install it: {pip_install('mlflow')}.",
            error=True,
        )
        return 2
    if (refusal := open_to_all(host)) is not None:
        print_text(refusal, error=True)
        return 2
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    servers = (
        prefect_server(host, prefect_port, folder),
        mlflow_server(host, mlflow_port, folder),
    )

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait(START_TIMEOUT)
        seen = _reachable(host)
        print_text(f"export PREFECT_API_URL=http://{seen}:{prefect_port}/api")
        if given((PREFECT_LOGIN,)):
            print_text(f"export PREFECT_API_AUTH_STRING=…   # what {PREFECT_LOGIN} is here")
        print_text(f"# and for each run: tracking.uri=http://{seen}:{mlflow_port}", flush=True)
        while all(server.exit_code is None for server in servers):
            time.sleep(1.0)
        ended = next(server for server in servers if server.exit_code is not None)
        raise ServerError(f"The {ended.name} server ended. Its log is {ended.log}.")
    except ServerError as error:
        print_text(error, error=True)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for server in servers:
            server.stop(STOP_TIMEOUT)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _reachable(host: str) -> str:
    return LOOPBACK if host == "0.0.0.0" else host
