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
from pathlib import Path

import httpx
import psutil
import pytest

from tasks.run.packages import installed
from tests.engines.conftest import left_after
from tests.flows.conftest import ROOT, Launched
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PASSWORD = "planted-postgres-password"


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[dict[str, str]]:
    """A Postgres server on loopback; yields the variables that name its databases."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("Postgres is not installed: no initdb (apt install postgresql)")
    pytest.importorskip("psycopg2")
    pytest.importorskip("asyncpg")
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


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_run_against_a_teams_servers(database: str, tmp_path: Path) -> None:
    if installed("mlflow") is None:
        pytest.skip("the whole mlflow is not installed (the extra ui)")
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        if database == "postgres":
            (tmp_path / "pg").mkdir()
            variables = stack.enter_context(postgres(tmp_path / "pg"))
        ports = {"prefect": free_port(), "mlflow": free_port()}
        words = [f"--{name}-port={port}" for name, port in ports.items()]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        environment.pop("PREFECT_API_URL", None)
        servers = subprocess.Popen(
            [sys.executable, "-m", "flows.servers", *words, f"--folder={tmp_path}/servers"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(servers.wait, 30)
        stack.callback(servers.terminate)
        assert servers.stdout is not None
        line = servers.stdout.readline().strip()
        assert line == f"export PREFECT_API_URL=http://127.0.0.1:{ports['prefect']}/api"
        url = f"http://127.0.0.1:{ports['mlflow']}"
        assert url in servers.stdout.readline()
        below = psutil.Process(servers.pid).children(recursive=True)
        for process in below:
            assert PASSWORD not in " ".join(process.cmdline())
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    assert one.laddr.ip == "127.0.0.1"

        run = Launched(
            tmp_path,
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "flows.grpo",
                    "tiny",
                    "name=team",
                    "steps=2",
                    f"tracking.uri={url}",
                ],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "PREFECT_API_URL": f"http://127.0.0.1:{ports['prefect']}/api",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ),
            f"file://{tmp_path}/.refrain/store",
        )
        code, out = run.end()
        assert code == 0, out
        assert f"{url}/#/experiments/" in out
        found = httpx.post(
            f"http://127.0.0.1:{ports['prefect']}/api/flow_runs/filter",
            json={"flow_runs": {"name": {"any_": ["team"]}}},
        ).json()
        assert [one["state_type"] for one in found] == ["COMPLETED"]

        from mlflow import MlflowClient

        client = MlflowClient(url)
        (page,) = client.search_runs([client.get_experiment_by_name("refrain").experiment_id])
        assert page.info.status == "FINISHED"
        assert len(client.get_metric_history(page.info.run_id, "reward/mean")) == 2
        servers.send_signal(signal.SIGTERM)
        assert servers.wait(30) == 0
        assert left_after(5, [process.pid for process in below]) == []
