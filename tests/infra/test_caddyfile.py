"""The proxy file by a real Caddy: TLS, logins, and Prefect's websockets, before two small servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidStatus
from websockets.http11 import Request, Response
from websockets.sync.client import connect

from tests.ports import free_ports

CADDYFILE = Path(__file__).parents[2] / "infra" / "Caddyfile"
NAME, PASSWORD = "team", "a-planted-password"


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """A proxy that runs."""

    prefect: str  # https://…
    mlflow: str
    certificate: Path
    log: Path

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))


@contextlib.contextmanager
def caddy(folder: Path, prefect: int, mlflow: int, name: str = "localhost") -> Iterator[Proxy]:
    """The proxy file before servers at two ports of loopback, with a certificate made here."""
    if shutil.which("caddy") is None or shutil.which("openssl") is None:
        pytest.skip("Caddy or openssl is not installed (apt install caddy openssl)")
    folder.mkdir(parents=True, exist_ok=True)
    cert, key, users = folder / "cert.pem", folder / "key.pem", folder / "users"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    make += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", f"/CN={name}"]
    make += ["-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    subprocess.run(make, check=True, capture_output=True)
    hashed = ["caddy", "hash-password", "--plaintext", PASSWORD]
    digest = subprocess.run(hashed, check=True, capture_output=True, text=True).stdout.strip()
    users.write_text(f"{NAME} {digest}\n")
    first, second = free_ports(2)
    log = folder / "caddy.log"
    environment = {
        **os.environ,
        "PREFECT_SITE": f"https://{name}:{first}",
        "MLFLOW_SITE": f"https://{name}:{second}",
        "PREFECT_AT": f"127.0.0.1:{prefect}",
        "MLFLOW_AT": f"127.0.0.1:{mlflow}",
        "REFRAIN_USERS": str(users),
        "REFRAIN_TLS": f"{cert} {key}",
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["caddy", "run", "--config", str(CADDYFILE), "--adapter", "caddyfile"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until = time.monotonic() + 30
        while "serving initial configuration" not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield Proxy(
            prefect=environment["PREFECT_SITE"],
            mlflow=environment["MLFLOW_SITE"],
            certificate=cert,
            log=log,
        )
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def echo(port: int) -> Iterator[None]:
    """A server that says what a request had; a websocket gets its messages back."""

    def answer(connection: ServerConnection, request: Request) -> Response | None:
        if "Upgrade" in request.headers:
            return None
        had = f"{request.headers['Host']} {request.headers.get('Authorization', '-')}"
        return connection.respond(HTTPStatus.OK, had)

    async def talk(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    loop, ready = asyncio.new_event_loop(), threading.Event()
    over = asyncio.Event()

    async def run() -> None:
        async with serve(talk, "127.0.0.1", port, process_request=answer):
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(10)
    yield
    loop.call_soon_threadsafe(over.set)
    thread.join(10)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    ports = free_ports(2)
    with echo(ports[0]), echo(ports[1]), caddy(tmp_path / "caddy", *ports) as found:
        yield found


@pytest.mark.slow  # bcrypt takes its time
def test_only_a_login_gets_through_and_prefects_websockets_bring_their_own(proxy: Proxy) -> None:
    with httpx.Client(verify=proxy.trusting, trust_env=False, timeout=60) as client:
        for site in (proxy.prefect, proxy.mlflow):
            assert client.get(site).status_code == 401
            assert client.get(site, auth=(NAME, "another")).status_code == 401
            assert client.get(site, auth=("nobody", PASSWORD)).status_code == 401
            answer = client.get(f"{site}/api/health", auth=(NAME, PASSWORD))
            assert answer.status_code == 200
            # The server sees the name that others call it by, and who asks.
            host, kind, _ = answer.text.split(" ")
            assert (f"https://{host}", kind) == (site, "Basic")
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(proxy.prefect, trust_env=False)
    with pytest.raises(httpx.HTTPError):
        httpx.get(proxy.prefect.replace("https", "http"), trust_env=False).raise_for_status()
    for path, site, passes in (
        ("/api/events/in", proxy.prefect, True),
        ("/api/events/out", proxy.prefect, True),
        ("/api/logs/out", proxy.prefect, True),
        ("/api/task_runs/subscriptions/scheduled", proxy.prefect, True),
        ("/api/work_pools/refrain/workers/connect", proxy.prefect, True),
        ("/api/flow_runs/filter", proxy.prefect, False),
        ("/api/events/in", proxy.mlflow, False),
    ):
        address = site.replace("https", "wss") + path
        if passes:
            with connect(address, ssl=proxy.trusting, proxy=None, open_timeout=60) as socket:
                socket.send("ping")
                assert socket.recv(10) == "ping"
        else:
            with pytest.raises(InvalidStatus, match="401"):
                connect(address, ssl=proxy.trusting, proxy=None, open_timeout=60)
    log = proxy.log.read_text()
    assert '"uri":"/api/health"' in log
    assert PASSWORD not in log and "Authorization" not in log


def test_every_websocket_of_prefects_server_looks_at_a_login_itself() -> None:
    """What the proxy lets pass without a login is all of Prefect's websockets, and those alone."""
    spec = find_spec("prefect")  # imports nothing of it
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "server" / "api"
    files = [one for one in folder.glob("*.py") if "@router.websocket(" in one.read_text()]
    assert {one.stem for one in files} == {"events", "logs", "task_runs", "workers"}
    for one in files:
        source = one.read_text()
        assert source.count("@router.websocket(") == source.count("accept_prefect_socket(")
