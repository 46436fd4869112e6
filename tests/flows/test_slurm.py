"""Whole runs on a real Slurm: the flow and its pools as jobs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore
from tests.flows.conftest import ROOT, settings_for
from tests.slurm import Slurm

pytestmark = pytest.mark.cluster

Command = Callable[..., str]


@pytest.fixture
def command(slurm: Slurm, prefect_api: str, tmp_path: Path) -> Command:
    """Run `refrain cluster WORDS` in an empty folder; returns what it printed."""

    def run(*words: str, code: int = 0, module: str = "flows.cluster") -> str:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **settings_for(prefect_api)},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def submitted(command: Command, folder: Path, *words: str) -> str:
    """Submit the tiny recipe; returns the submission's name."""
    out = command(
        "submit",
        "tiny",
        "cluster.kind=slurm",
        "cluster.host=lo",
        f"store.uri=file://{folder}/store",
        *words,
    )
    found = re.search(r"Submitted (\S+):", out)
    assert found is not None, out
    return found[1]


def committed(folder: Path) -> tuple[str | None, int]:
    """The only run of the store, and its last committed step."""
    store = Store(f"file://{folder}/store")
    names = store.children()
    return (names[0], head(RunStore(store, names[0])) or 0) if names else (None, 0)


def wait(done: Callable[[], bool], command: Command, name: str, timeout: float = 180.0) -> None:
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            raise AssertionError(command("status", name) + command("logs", name, "-n", "200"))
        time.sleep(0.3)


def test_a_run_is_submitted_followed_and_leaves_no_job(
    command: Command, slurm: Slurm, tmp_path: Path
) -> None:
    name = submitted(command, tmp_path, "steps=2")
    wait(lambda: len(slurm.jobs()) == 4, command, name)
    out = command("status", name)
    assert f"{name}: step 0/2, job" in out
    for pool in ("train", "rollout", "cpu"):
        assert re.search(rf"^  {pool} +1 (running|pending)$", out, re.MULTILINE), out
    wait(lambda: slurm.jobs() == [], command, name)
    run, step = committed(tmp_path)
    assert step == 2, command("logs", name)
    assert run is not None
    out = command("status", name)
    assert f"{name}: step 2/2, finished" in out
    assert f"run    {run}" in out
    log = command("logs", name)
    assert "2 steps are committed" in log
    assert "Traceback" not in log
    attempts = read_commit(RunStore(Store(f"file://{tmp_path}/store"), run), 1).attempts
    assert {one["worker"] for one in attempts if one["stage"] == "rollout"} == {"rollout-0"}
    assert "There are: " in command("logs", name, "nobody", code=2)


@pytest.mark.slow
def test_stop_ends_flow_and_pools(command: Command, slurm: Slurm, tmp_path: Path) -> None:
    name = submitted(command, tmp_path, "steps=1000")
    wait(lambda: committed(tmp_path)[1] >= 1, command, name)
    run, _ = committed(tmp_path)
    assert run is not None
    where = f"store.uri=file://{tmp_path}/store"
    seen = json.loads(command(run, "--json", where, module="flows.inspect"))
    assert {one["name"]: one["status"]["worker"] for one in seen["workers"]} == {
        name: name for name in ("cpu-0", "rollout-0", "train-0")
    }
    out = command("stop", name)
    assert f"Stopped {name}; no job of it is left." in out
    assert f"--resume {committed(tmp_path)[0]}" in out
    assert slurm.jobs() == []
    assert "no job in the queue" in command("status", name)
    assert "Traceback" not in command("logs", name)


@pytest.mark.slow
def test_time_limits_are_passed_on_to_new_jobs(
    command: Command, slurm: Slurm, tmp_path: Path
) -> None:
    """Workers are replaced while the flow goes on, and the flow goes on in a second job."""
    name = submitted(
        command,
        tmp_path,
        "steps=1000",
        "cluster.slurm.time_limit=60",
        "cluster.slurm.handover=40",
        "cluster.slurm.flow.time_limit=180",
        "cluster.slurm.flow.handover=40",
    )
    workers: set[str] = set()
    seen = 0

    def both() -> bool:
        nonlocal seen
        run, step = committed(tmp_path)
        for number in range(seen + 1, step + 1):
            attempts = read_commit(
                RunStore(Store(f"file://{tmp_path}/store"), run), number
            ).attempts
            workers.update(str(one["worker"]) for one in attempts if one["stage"] == "rollout")
        seen = step
        path = tmp_path / ".refrain/slurm" / name / "flow.log"
        log = path.read_text() if path.exists() else ""
        again = log.count("steps of 16 samples") >= 2 and "step " in log.rpartition("samples")[2]
        return again and "rollout-1" in workers

    wait(both, command, name, 400.0)
    log = command("logs", name, "-n", "10000")
    steps = [int(one) for one in re.findall(r"^step (\d+)/1000", log, re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1))
    command("stop", name)
    assert slurm.jobs() == []


def test_what_cannot_be_submitted_is_one_sentence(command: Command, tmp_path: Path) -> None:
    place = [f"store.uri=file://{tmp_path}/store", "cluster.kind=slurm", "cluster.host=lo"]
    out = command("submit", "tiny", *place, "cluster.slurm.partition=nowhere", code=2)
    assert "Jobs of cluster.pools." in out
    assert "invalid partition" in out
    assert "cluster.kind = local" in command("submit", "tiny", code=2)
    out = command("submit", "--flow", "ppo", "tiny", "algorithm.advantage.kind=grpo", code=2)
    assert "algorithm.advantage.kind" in out
    assert "refrain ppo" in command("submit", "--flow", "ppo", "tiny", code=2)
    out = command("submit", "tiny", "cluster.kind=slurm", "cluster.host=lo", code=2)
    assert "file system that all nodes share" in out
    assert "There is no submission nothing" in command("status", "nothing", code=2)
