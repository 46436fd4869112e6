"""Prefect's and MLflow's servers for a team, as processes that run until they are stopped."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from configs.environment import given, mlflow_database, pip_install
from configs.terminal_text import print_text
from tasks.launch.server_process import KeptServer, ServerError, ServerProcess
from tasks.launch.team_addresses import Place, check_free, is_loopback
from tasks.run.packages import installed

PREFECT_LOGIN = "PREFECT_SERVER_API_AUTH_STRING"
MLFLOW_LOGIN = "MLFLOW_AUTH_CONFIG_PATH"
MLFLOW_HOSTS = "MLFLOW_SERVER_ALLOWED_HOSTS"
MLFLOW_ORIGINS = "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"
START_TIMEOUT = 600.0  # seconds; the first start migrates the databases
MLFLOW_WORKERS = 4  # processes of MLflow's server, as it has by itself
STOP_TIMEOUT = 10.0  # seconds
LOOK_EVERY = 0.5  # seconds between looks at the servers


def prefect_server(place: Place, folder: Path) -> ServerProcess:
    """Prefect's server with its dashboard and schedules."""
    environment = {
        **os.environ,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_API_HOST": place.host,
        "PREFECT_SERVER_API_PORT": str(place.port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    # The dashboard asks where it came from, by whatever name or proxy.
    environment.setdefault("PREFECT_UI_API_URL", "/api")
    environment.setdefault("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", place.url)
    command = [sys.executable, "-m", "prefect", "server", "start"]
    command += ["--host", place.host, "--port", str(place.port)]
    health = f"{place.here}/api/health"
    return ServerProcess("Prefect", command, environment, health, folder / "prefect.log")


def mlflow_server(place: Place, folder: Path) -> ServerProcess:
    """MLflow's tracking server; artifacts go through it into the folder.

    It answers requests by the names of its place and those that its own variables add, and takes
    what a page sends from the origins of these alone.
    """
    more = given((MLFLOW_HOSTS, MLFLOW_ORIGINS))
    environment = {
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": mlflow_database() or f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        MLFLOW_HOSTS: ",".join(filter(None, [*place.hosts, more.get(MLFLOW_HOSTS)])),
        MLFLOW_ORIGINS: ",".join(filter(None, [*place.origins, more.get(MLFLOW_ORIGINS)])),
    }
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", place.host, "--port", str(place.port)]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    command += ["--workers", str(min(MLFLOW_WORKERS, os.cpu_count() or 1))]
    # One that a busy machine starts slowly would be killed after 5 s, and so for ever.
    command += ["--uvicorn-opts", "--timeout-worker-healthcheck 120"]
    if environment.get(MLFLOW_LOGIN):
        command += ["--app-name", "basic-auth"]
        environment.setdefault("MLFLOW_FLASK_SERVER_SECRET_KEY", secrets.token_urlsafe(32))
    return ServerProcess(
        "MLflow", command, environment, f"{place.here}/health", folder / "mlflow.log"
    )


def open_to_all(prefect: Place, mlflow: Place) -> str | None:
    """Why the servers would let everybody in who reaches them; None where they do not.

    Behind a proxy, which asks for a login, only Prefect's is wanted: the proxy lets its websockets
    pass, since Prefect looks at their login itself.
    """
    public = {
        PREFECT_LOGIN: prefect.is_public,
        MLFLOW_LOGIN: not is_loopback(mlflow.host),
    }
    login = given(public)
    missing = [name for name, needed in public.items() if needed and not login.get(name)]
    if missing:
        return (
            f"Others reach the servers at {prefect.url} and {mlflow.url}, where everybody would be "
            "let in, and who is in may run code where Prefect's workers are. Set "
            f"{' and '.join(missing)} (docs/security.md, Servers of a team), or leave --host out and "
            "put a proxy with a login before them."
        )
    if public[MLFLOW_LOGIN] and installed("flask-wtf") is None:
        return (
            f"{MLFLOW_LOGIN} is set, and MLflow's login needs Flask-WTF. "
            f"Install it: {pip_install('flask-wtf')}."
        )
    return None


def serve(prefect: Place, mlflow: Place, folder: Path) -> int:
    """Run both until Ctrl-C or SIGTERM; returns the exit code.

    One that has answered once is started again when it ends. `folder`: for logs, and for databases
    where the environment names none. Raises ConfigError for a place at which one cannot listen.
    """
    if installed("mlflow") is None:
        print_text(
            "refrain servers starts MLflow's server, and only mlflow-skinny is installed. "
            f"Install it: {pip_install('mlflow')}.",
            error=True,
        )
        return 2
    if (refusal := open_to_all(prefect, mlflow)) is not None:
        print_text(refusal, error=True)
        return 2
    check_free(prefect, mlflow)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    servers = (prefect_server(prefect, folder), mlflow_server(mlflow, folder))

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait(START_TIMEOUT)
        print_text(f"export PREFECT_API_URL={prefect.url}/api")
        if given((PREFECT_LOGIN,)):
            print_text(f"export PREFECT_API_AUTH_STRING=…   # what {PREFECT_LOGIN} is here")
        print_text(f"# and for each run: tracking.uri={mlflow.url}", flush=True)
        kept = [KeptServer(server) for server in servers]
        while True:
            time.sleep(LOOK_EVERY)
            for one in kept:
                if (news := one.look()) is not None:
                    print_text(f"{time.strftime('%H:%M:%S')} {news}", error=True, flush=True)
    except ServerError as error:
        print_text(error, error=True)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for server in servers:
            server.stop(STOP_TIMEOUT)
