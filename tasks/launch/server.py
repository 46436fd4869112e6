"""The Prefect server of a run: the one that PREFECT_API_URL names, or one started for the run.

Prefect's own in-process server serves no dashboard, so the embedded one is the same ASGI app with
its UI. It keeps its database under .refrain/prefect unless PREFECT_HOME says otherwise.

Who started the run has the login of its own server, and nobody else. It is NAME:PASSWORD, Prefect's
auth string, made anew for each server. The server and the flow have it in memory; people and other
commands on the machine read it in a file of the server's folder.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prefect.logging.handlers import APILogHandler
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    temporary_settings,
)

from engines.processes.node import python_path
from tasks.launch import dashboard_link
from tasks.launch.server_process import ServerError, ServerProcess

HOST = "127.0.0.1"
LOGIN = re.compile(r"refrain:[\w-]{32}")  # so that no other file is taken for one and sent


def new_login() -> str:
    """A login of 192 random bits."""
    return f"refrain:{secrets.token_urlsafe(24)}"


def login_file(home: Path, port: int) -> Path:
    """Where the login of the server with that folder and port is."""
    return home / f"login-{port}"


def write_login(file: Path, login: str) -> None:
    """Write a login that only this user can read, whoever could read what was there before."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(login)


def headers_for(api: str, logs: str | None) -> dict[str, str]:
    """HTTP headers by which this user may ask a run's Prefect server; none where no login is known.

    The record of a run says where its server is, and who can write to the store can change that. So a
    team's login goes to PREFECT_API_URL alone, and a run's own to its port of this machine.

    Args:
        api: the server's API, of the run's record.
        logs: folder of the flow's log; the folder of its server is beside that of all logs.
    """
    if api == PREFECT_API_URL.value():
        login = PREFECT_API_AUTH_STRING.value()
    else:
        login = _own_login(api, logs)
    if login is None:
        return {}
    return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


def _own_login(api: str, logs: str | None) -> str | None:
    place = urlsplit(api)
    if logs is None or place.hostname != HOST or place.port is None:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        login = login_file(Path(logs).parents[1] / "prefect", place.port).read_text()
        if LOGIN.fullmatch(login):
            return login
    return None


FIRST_PORT = 4200
OTHER_PORTS = range(20000, 32768)  # below those of connections and of listeners on port 0
START_TIMEOUT = 120.0  # seconds; the first start migrates the database
STOP_TIMEOUT = 2.0  # seconds until a server that does not stop is killed
LOOK_EVERY = 2.0  # seconds between looks at whether the process lives
ASK_EVERY = 8.0  # seconds between questions to a server that has answered
SILENCE = 30.0  # seconds after which a server that has answered counts as hung


class EmbeddedServer:
    """A Prefect server with its dashboard, on loopback, that ends with this process.

    Killed or hung, it is started again on the same port with the same database; Prefect's client
    waits that long.
    """

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.log = self.home / "server.log"
        self.port, self._reserved = _free_port()
        self.login = new_login()
        self.login_file = login_file(self.home, self.port)
        self._answered = threading.Event()
        self._stopping = threading.Event()
        self._ended: int | None = None  # exit code, where it is not started again
        self._keeper: threading.Thread | None = None
        health = f"{self.address}/api/health"
        self._server = ServerProcess(
            "Prefect", self._command(), self._environment(), health, self.log
        )

    @property
    def address(self) -> str:
        """Where the dashboard is; it asks for the login."""
        return f"http://{HOST}:{self.port}"

    @property
    def dashboard(self) -> Dashboard:
        """How people get to the dashboard."""
        link = dashboard_link.link(self.address, self.login)
        return Dashboard(address=self.address, link=link, login_file=self.login_file)

    def launch(self) -> None:
        """Start the server's process and return at once; `wait` tells when it answers."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        write_login(self.login_file, self.login)
        # The kernel ends the process with the thread that started it, so that one stays.
        self._keeper = threading.Thread(target=self._keep, name="prefect-server", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        """Have a server run until `stop`, except when the first one ends by itself or hangs."""
        while not self._stopping.is_set():
            self._server.start()
            hung, ask = time.monotonic() + START_TIMEOUT, 0.0
            while self._server.exit_code is None and not self._stopping.wait(LOOK_EVERY):
                if time.monotonic() < ask:
                    continue
                if self._server.answers():
                    ask, hung = time.monotonic() + ASK_EVERY, time.monotonic() + SILENCE
                if time.monotonic() > hung:
                    self._server.send(signal.SIGKILL)
            killed = (self._server.exit_code or 0) < 0
            if self._stopping.is_set() or not (killed or self._answered.is_set()):
                break
        self._ended = self._server.stop(STOP_TIMEOUT)

    def _command(self) -> list[str]:
        # -P: a user's own tasks/ in the working folder must not hide ours.
        return [sys.executable, "-P", "-m", "tasks.launch.prefect_app", HOST, str(self.port)]

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "PREFECT_HOME": str(self.home),
            "PREFECT_UI_API_URL": "/api",  # the dashboard asks where it came from
            "PREFECT_SERVER_API_HOST": HOST,
            "PREFECT_SERVER_API_PORT": str(self.port),
            # Others of this machine see no environment of ours, other than a command line.
            "PREFECT_SERVER_API_AUTH_STRING": self.login,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.address,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PREFECT_API_URL", None)
        return environment

    def wait(self, timeout: float = 2 * START_TIMEOUT) -> None:  # one that hung is started again
        """Return when the server answers; ServerError with its last words if it ends or hangs."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self._ended is not None:
                raise ServerError(self._failure(f"ended with code {self._ended}"))
            if self._server.answers() and self._server.exit_code is None:
                self._answered.set()
                return
            time.sleep(0.1)
        raise ServerError(self._failure(f"did not answer within {timeout:.0f} s"))

    def stop(self) -> None:
        """End the server's process."""
        self._stopping.set()
        self._server.send(signal.SIGTERM)
        if self._keeper is not None:
            self._keeper.join()
            self.login_file.unlink(missing_ok=True)
        self._reserved.close()

    def _failure(self, what: str) -> str:
        words = self.log.read_text(errors="replace")
        remedy = f"Its log is {self.log}."
        if "Can't locate revision" in words:
            remedy = (
                f"Its database in {self.home} was made by a newer Prefect. "
                "Set PREFECT_HOME to another folder, or remove that one."
            )
        return f"The Prefect server on port {self.port} {what}. {remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Where people find a server's dashboard."""

    address: str  # for everybody: it asks for a login
    link: str  # opens without asking: for the terminal of who started the server, and no log
    login_file: Path | None = None  # of a run's own server

    @property
    def asking(self) -> str:
        """The address, and where the login is."""
        if self.login_file is None:
            return self.address
        return f"{self.address} (its login is in {self.login_file})"


@contextlib.contextmanager
def prefect_server(home: Path) -> Iterator[Dashboard]:
    """Run the body against a Prefect server.

    Step flows keep no heartbeat: each synchronous flow would otherwise wait for it on exit, up to a
    second a step, since https://github.com/PrefectHQ/prefect/pull/19641 (the wait is not reported).
    """
    api = PREFECT_API_URL.value()
    if api is not None:
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            address = api.removesuffix("/api")
            yield Dashboard(address=address, link=address)
        return
    server = EmbeddedServer(home)
    server.launch()
    try:
        server.wait()
        settings = {
            PREFECT_API_URL: f"{server.address}/api",
            PREFECT_API_AUTH_STRING: server.login,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        }
        with temporary_settings(settings):
            try:
                yield server.dashboard
            finally:
                # Logs on their way would be waited for, when Python ends, while the server is gone.
                APILogHandler().flush()
    finally:
        server.stop()


def server_sentence(home: Path) -> str:
    """Which server that is, for people, before it runs."""
    api = PREFECT_API_URL.value()
    if api is not None:
        return (
            f"Prefect: the server of PREFECT_API_URL, {re.sub('//[^/@]*@', '//', api)}, not asked"
        )
    return f"Prefect: one is started with the run, its data in {home}"


def _free_port() -> tuple[int, socket.socket]:
    """Prefect's usual port if it is free, else one that the kernel gives to nobody by itself.

    It is free until the server binds it, seconds later; a scheduler or worker must not get it, nor a
    run that starts at the same moment: the socket, while it is open, is the sign that it is taken.
    """
    for port in (FIRST_PORT, *random.sample(OTHER_PORTS, 100)):
        sign = socket.socket(socket.AF_UNIX)
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sign.bind(f"\0refrain-port-{port}")  # a name in the kernel, not a file
                probe.bind((HOST, port))
            except OSError:
                sign.close()
                continue
            return port, sign
    raise ServerError(f"No port is free on {HOST} for the Prefect server.")
