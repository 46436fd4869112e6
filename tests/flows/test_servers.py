"""Servers for a team: a run against Prefect and MLflow as plain processes, on Postgres too."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from configs.environment import installed
from tests.engines.conftest import left_after
from tests.flows.conftest import ROOT, Launched
from tests.infra.test_caddyfile import NAME, caddy
from tests.infra.test_caddyfile import PASSWORD as PROXY_PASSWORD
from tests.ports import free_port, free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PASSWORD = "planted-postgres-password"
PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def need_drivers() -> None:
    """Skip the test where Prefect's and MLflow's servers cannot speak to Postgres."""
    pytest.importorskip("psycopg2")
    pytest.importorskip("asyncpg")


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[dict[str, str]]:
    """A Postgres server on loopback; yields the variables that name its databases."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("Postgres is not installed: no initdb (apt install postgresql)")
    user = getpass.getuser()
    as_user: list[str] = []
    if user == "root":  # Postgres refuses to run as root
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        folder.chmod(0o777)
        for parent in [one for one in folder.parents if str(one).startswith("/tmp/")]:
            parent.chmod(0o755)
    secret = folder / "password"
    secret.write_text(PASSWORD)
    secret.chmod(0o644)
    data, port = folder / "data", free_port()
    quiet = {"stdout": subprocess.DEVNULL, "check": True}
    make = ["initdb", "-D", str(data), "-U", "refrain", "-A", "scram-sha-256"]
    subprocess.run([*as_user, *make, f"--pwfile={secret}"], **quiet)
    options = ["-c", "listen_addresses=127.0.0.1", "-p", str(port), "-k", str(folder)]
    server = subprocess.Popen(
        [*as_user, "postgres", "-D", str(data), *options],
        stderr=(folder / "postgres.log").open("wb"),
        start_new_session=True,
    )
    try:
        ask = {**os.environ, "PGPASSWORD": PASSWORD}
        for name in ("prefect", "mlflow"):
            words = ["createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "refrain", name]
            for _ in range(100):
                if (
                    subprocess.run(
                        words, env=ask, check=False, stderr=subprocess.DEVNULL
                    ).returncode
                    == 0
                ):
                    break
                time.sleep(0.2)
        where = f"refrain:{PASSWORD}@127.0.0.1:{port}"
        yield {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{where}/prefect",
            "MLFLOW_BACKEND_STORE_URI": f"postgresql+psycopg2://{where}/mlflow",
        }
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)


@dataclass(frozen=True, kw_only=True)
class Servers:
    """A team's servers that run."""

    process: subprocess.Popen[str]
    said: Path  # what they print

    def child(self, name: str) -> psutil.Process:
        """The process of one of them."""
        found = psutil.Process(self.process.pid).children()
        (one,) = [process for process in found if name in process.cmdline()]
        return one

    def wait_for(self, words: str, seconds: float = 300) -> str:
        """The lines so far, once they hold these words."""
        end = time.monotonic() + seconds
        while words not in (lines := self.said.read_text()):
            assert self.process.poll() is None and time.monotonic() < end, lines
            time.sleep(0.1)
        return lines


@contextlib.contextmanager
def servers(folder: Path, variables: dict[str, str], *words: str) -> Iterator[Servers]:
    """`refrain servers` with these words, once both answer."""
    if installed("mlflow") is None:
        pytest.skip("the whole mlflow is not installed (the extra ui)")
    environment = {**os.environ, "PYTHONPATH": PATH, **variables}
    environment.pop("PREFECT_API_URL", None)
    said = folder / "servers.txt"
    with said.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.servers", *words, f"--folder={folder}/servers"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        found = Servers(process=process, said=said)
        found.wait_for("tracking.uri=")
        yield found
    finally:
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert left_after(5, [one.pid for one in below]) == []


def start_run(folder: Path, variables: dict[str, str], *words: str) -> Launched:
    """A run of `tiny` in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.grpo", "tiny", "name=team", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PATH, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Launched(folder, process, f"file://{folder}/.refrain/store")


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_run_against_a_teams_servers(database: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        if database == "postgres":
            need_drivers()
            (tmp_path / "pg").mkdir()
            variables = stack.enter_context(postgres(tmp_path / "pg"))
        ports = {"prefect": free_port(), "mlflow": free_port()}
        words = [f"--{name}-port={port}" for name, port in ports.items()]
        team = stack.enter_context(servers(tmp_path, variables, *words))
        url = f"http://127.0.0.1:{ports['mlflow']}"
        assert team.said.read_text().splitlines() == [
            f"export PREFECT_API_URL=http://127.0.0.1:{ports['prefect']}/api",
            f"# and for each run: tracking.uri={url}",
        ]
        for process in psutil.Process(team.process.pid).children(recursive=True):
            assert PASSWORD not in " ".join(process.cmdline())
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    assert one.laddr.ip == "127.0.0.1"

        api = {"PREFECT_API_URL": f"http://127.0.0.1:{ports['prefect']}/api"}
        code, out = start_run(tmp_path, api, "steps=2", f"tracking.uri={url}").end()
        assert code == 0, out
        assert f"{url}/#/experiments/" in out
        found = httpx.post(
            f"{api['PREFECT_API_URL']}/flow_runs/filter",
            json={"flow_runs": {"name": {"like_": "team-"}}},
        ).json()
        assert [one["state_type"] for one in found] == ["COMPLETED"]

        from mlflow import MlflowClient

        client = MlflowClient(url)
        (page,) = client.search_runs([client.get_experiment_by_name("refrain").experiment_id])
        assert page.info.status == "FINISHED"
        assert len(client.get_metric_history(page.info.run_id, "reward/mean")) == 2


def test_a_run_through_the_proxy_goes_on_while_the_servers_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports, login = free_ports(2), f"{NAME}:{PROXY_PASSWORD}"
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(caddy(tmp_path / "caddy", *ports))
        words = [f"--prefect-port={ports[0]}", f"--mlflow-port={ports[1]}"]
        words += [f"--prefect-url={proxy.prefect}", f"--mlflow-url={proxy.mlflow}"]
        own = {"PREFECT_SERVER_API_AUTH_STRING": login}
        team = stack.enter_context(servers(tmp_path, own, *words))
        assert login not in team.said.read_text()
        variables = {
            "PREFECT_API_URL": f"{proxy.prefect}/api",
            "PREFECT_API_AUTH_STRING": login,
            "PREFECT_API_SSL_CERT_FILE": str(proxy.certificate),
            "MLFLOW_TRACKING_USERNAME": NAME,
            "MLFLOW_TRACKING_PASSWORD": PROXY_PASSWORD,
            "MLFLOW_TRACKING_SERVER_CERT_PATH": str(proxy.certificate),
        }
        run = start_run(tmp_path, variables, "steps=8", f"tracking.uri={proxy.mlflow}")
        end = time.monotonic() + 240
        while not any(Path(tmp_path, ".refrain/store").glob("*/HEAD")):
            assert run.process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        for process in [team.child(name) for name in ("prefect", "mlflow")]:
            process.kill()
        team.wait_for("The Prefect server answers again.")
        team.wait_for("The MLflow server answers again.")
        code, out = run.end(timeout=600)
        assert code == 0, out
        assert len(run.commits()) == 8
        lines = team.said.read_text()
        for name in ("Prefect", "MLflow"):
            assert f"The {name} server ended with code -9; it is started again in 1 s." in lines

        found = httpx.post(
            f"{proxy.prefect}/api/flow_runs/filter",
            json={"flow_runs": {"name": {"like_": "team-"}}},
            auth=(NAME, PROXY_PASSWORD),
            verify=proxy.trusting,
            timeout=60,
        ).json()
        assert [one["state_type"] for one in found] == ["COMPLETED"]

        from mlflow import MlflowClient

        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        client = MlflowClient(proxy.mlflow)
        (page,) = client.search_runs([client.get_experiment_by_name("refrain").experiment_id])
        assert page.info.status == "FINISHED"
        assert len(client.get_metric_history(page.info.run_id, "reward/mean")) == 8
