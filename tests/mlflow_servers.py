"""MLflow's server on loopback, and Python processes that have MLflow with or without Refrain."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def mlflow_server(folder: Path, proxied: bool, port: int | None = None) -> Iterator[str]:
    """Its address. `proxied`: clients send it artifacts; else they write them to its folder."""
    port = port or free_port()
    place = (folder / "artifacts").as_uri()
    where = [f"--artifacts-destination={place}"]
    if not proxied:
        where = ["--no-serve-artifacts", f"--default-artifact-root={place}"]
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}"]
    database = f"--backend-store-uri=sqlite:///{folder}/mlflow.db"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, database, *where, "--workers=1"],
            stdout=log,
            stderr=log,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
            start_new_session=True,
        )
    try:
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health"):
                break
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < until, (folder / "server.log").read_text()
            time.sleep(0.2)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(30)


def with_refrain(folder: Path, code: str, **variables: str) -> str:
    """What a Python process prints that has Refrain installed, with the entry points of this tree."""
    package = folder / "refrain_rl-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: refrain-rl\nVersion: 0\n")
    group = "mlflow.artifact_repository"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {where}" for name, where in project["entry-points"][group].items()]
    (package / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return _printed([sys.executable, "-c", code], {"PYTHONPATH": path, **variables})


def without_refrain(code: str, **variables: str) -> str:
    """What a Python process prints that has all packages but Refrain: no folder of ours is known."""
    others = [one for one in sys.path if one and not Path(one, "tasks").is_dir()]
    paths = [*others, sysconfig.get_path("purelib")]
    begin = (
        f"import sys; sys.path += {paths!r}\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('tasks') is None, 'Refrain is there'\n"
    )
    return _printed([sys.executable, "-I", "-S", "-c", begin + code], variables)


def _printed(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
