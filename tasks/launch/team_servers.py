"""Prefect's and MLflow's servers for a team, as processes that run until they are stopped.

Where they listen, and the addresses by which others reach them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import SplitResult, urlsplit

import psutil

from configs.environment import given, installed, mlflow_database, pip_install
from configs.overrides import ConfigError
from configs.terminal_text import print_text
from tasks.launch.server_process import KeptServer, ServerError, ServerProcess

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and where this machine reaches what is there
DOCUMENTATION = "192.0.2.1"  # of nobody (RFC 5737): only a route is looked up


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Of one server."""

    host: str  # that it listens at
    port: int
    url: str  # by which others reach it: http(s)://NAME[:PORT]

    @property
    def here(self) -> str:
        """The address by which this machine reaches it."""
        return f"http://{bracketed(EVERYWHERE.get(self.host, self.host))}:{self.port}"

    @property
    def hosts(self) -> list[str]:
        """What a request to it may have as `Host`."""
        names = {*own_names(), self.host} if self.host in EVERYWHERE else {self.host}
        places = {f"{bracketed(name)}:{self.port}" for name in {*names, "localhost", "127.0.0.1"}}
        return sorted({*places, urlsplit(self.url).netloc})

    @property
    def origins(self) -> list[str]:
        """Origins of its own pages, as browsers name them."""
        return sorted({self.url, *(f"http://{host}" for host in self.hosts)})

    @property
    def is_public(self) -> bool:
        """Whether others than this machine reach it."""
        return not is_loopback(self.host) or not is_loopback(urlsplit(self.url).hostname or "")


def place(name: str, host: str, port: int, url: str | None) -> Place:
    """The place of a server, such as prefect; ConfigError for a port or an address that is none."""
    if not 1 <= port <= 65535:
        raise ConfigError(f"--{name}-port = {port} is no port. Give one from 1 to 65535.")
    if url is None:
        return Place(host=host, port=port, url=f"http://{bracketed(seen_by_others(host))}:{port}")
    parts = urlsplit(url)
    if not _is_origin(parts):
        raise ConfigError(
            f"--{name}-url = {url} is no address of a server. Give it as http://NAME:PORT or "
            "https://NAME[:PORT], with nothing after it."
        )
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(
            f"--{name}-url has a login or a query in it. Give it as https://NAME[:PORT] alone."
        )
    if parts.hostname in EVERYWHERE:
        raise ConfigError(
            f"--{name}-url = {url} is where a server listens, and none that a browser can open. Give "
            "the name or address by which others reach this machine, or the proxy's."
        )
    return Place(host=host, port=port, url=f"{parts.scheme}://{parts.netloc}")


def _is_origin(parts: SplitResult) -> bool:
    """Whether an address names a server and no page of it."""
    try:
        port = parts.port
    except ValueError:  # no number, or none that there is
        return False
    is_named = parts.scheme in ("http", "https") and parts.hostname and port != 0
    return bool(is_named) and not parts.path.strip("/")


def check_places(prefect: Place, mlflow: Place) -> None:
    """ConfigError where no two servers of this machine can be there."""
    if prefect.port == mlflow.port:
        raise ConfigError(
            f"--prefect-port and --mlflow-port are both {prefect.port}. Give one of them another."
        )
    _listen("--host", prefect.host, 0)


def check_free(prefect: Place, mlflow: Place) -> None:
    """ConfigError where one of them cannot listen at its place now."""
    check_places(prefect, mlflow)
    for name, place in (("prefect", prefect), ("mlflow", mlflow)):
        _listen(f"--{name}-port", place.host, place.port)


def _listen(option: str, host: str, port: int) -> None:
    """Listen for a moment; ConfigError that names the option where that cannot be."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(where)
            listener.listen()
    except (OSError, UnicodeError) as error:  # socket.gaierror is an OSError
        if port == 0:
            raise ConfigError(
                f"{option} = {host} is no address of this machine ({_reason(error)}). Give one of "
                f"{', '.join(['0.0.0.0', *own_addresses()])}, or a name of it."
            ) from None
        raise ConfigError(
            f"{option} = {port} cannot be listened at ({_reason(error)}). Give another, or end "
            "what is there."
        ) from None


def _reason(error: OSError | UnicodeError) -> str:
    """What went wrong, in the system's words."""
    return str((isinstance(error, OSError) and error.strerror) or error)


def seen_by_others(host: str) -> str:
    """The name or address that others use for what listens at a host.

    Of all addresses the one from which this machine reaches the network; without any its name.
    """
    if host not in EVERYWHERE:
        return host
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((DOCUMENTATION, 9))  # sends nothing
        return str(probe.getsockname()[0])
    names = [name for name in own_addresses() if not is_loopback(name)]
    return names[0] if names else socket.getfqdn()


def own_names() -> list[str]:
    """Names and addresses of this machine."""
    return [socket.gethostname(), socket.getfqdn(), *own_addresses()]


def own_addresses() -> list[str]:
    """Addresses of this machine's interfaces, those of one link left out."""
    return [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
    ]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


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
        watched = [KeptServer(server) for server in servers]
        while True:
            time.sleep(LOOK_EVERY)
            for keeper in watched:
                if (news := keeper.look()) is not None:
                    print_text(f"{time.strftime('%H:%M:%S')} {news}", error=True, flush=True)
    except ServerError as error:
        print_text(error, error=True)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for server in servers:
            server.stop(STOP_TIMEOUT)
