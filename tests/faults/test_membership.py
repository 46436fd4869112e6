"""Workers join and leave while a run goes on; with none left it says so, and can be resumed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.runs.commit_log import Commit, head
from tests.engines.clusters.test_own_workers import CUT, started
from tests.faults.conftest import WORDS
from tests.faults.ledger import committed, story
from tests.flows.conftest import ROOT, Launch, Launched
from tests.ports import free_port
from tests.second_machine import second_machine

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

WAIT = 10  # seconds for which a pool may be empty


class Workers:
    """A scheduler, and workers that come and go."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        self._folder = folder
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._start("scheduler", "scheduler", "--port", str(port))

    def _start(self, name: str, *words: str) -> None:
        host = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
        self._started[name] = subprocess.Popen(
            [sys.executable, "-m", "dask", *words, *host],
            cwd=self._folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
                "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
                "OMP_NUM_THREADS": "1",
            },
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def join(self, name: str, pool: str, slots: int) -> None:
        """A worker comes."""
        own = ["--name", name, "--resources", f"{pool}={slots}", "--nthreads", str(slots + 1)]
        own += ["--memory-limit", "0", "--local-directory", str(self._folder)]
        self._start(name, "worker", self.address, *own)

    def leave(self, name: str) -> None:
        """A worker goes for good, its nanny with it."""
        process = self._started.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        for name in list(self._started):
            self.leave(name)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    folder = tmp_path / "workers"
    folder.mkdir()
    found = Workers(folder)
    for name, slots in (("train", 2), ("rollout", 3), ("cpu", 4)):
        found.join(f"{name}-0", name, slots)
    yield found
    found.end()


def wait_for_step(run: Launched, step: int) -> None:
    end = time.monotonic() + 180
    while not any(Path(run.folder, ".refrain/store").glob("*/HEAD")) or head(run.files) < step:
        assert run.process.poll() is None, run.end()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


def samplers(commit: Commit) -> set[str]:
    return {str(one["worker"]) for one in commit.attempts if one["stage"] == "rollout"}


def test_workers_come_and_go(launch: Launch, workers: Workers, tmp_path: Path) -> None:
    words = ("steps=40", "rollout.max_new_tokens=48", f"cluster.no_workers_timeout={WAIT}")
    place = ("cluster.kind=address", f"cluster.address={workers.address}")
    store = f"store.uri=file://{tmp_path}/.refrain/store"
    run = launch(*WORDS, *words, *place, store)
    wait_for_step(run, 1)
    workers.join("late", "rollout", 3)
    began = time.monotonic()
    while not any("late" in samplers(commit) for commit in run.commits()):
        assert run.process.poll() is None, run.end()[1]
        assert time.monotonic() - began < 120
        time.sleep(0.2)
    workers.leave("rollout-0")
    wait_for_step(run, (head(run.files) or 0) + 2)
    assert samplers(run.commits()[-1]) == {"late"}
    workers.leave("late")
    began = time.monotonic()
    code, out = run.end(timeout=180)
    assert code == 1, out
    assert f"pool 'rollout' has 0 of 1 live workers after {WAIT} s" in out
    assert "Traceback" not in out
    last = head(run.files)
    assert last is not None and last < 40
    workers.join("new", "rollout", 3)
    code, out = launch("--resume", run.files.run, f"steps={last + 2}", *place, store).end()
    assert code == 0, out
    assert len(committed(run.files)) == last + 2


def test_a_run_goes_on_after_its_workers_were_cut_off(launch: Launch, tmp_path: Path) -> None:
    """All workers are on another machine, by `refrain worker`; the network is away for a while."""
    with second_machine() as machine:
        address = f"tcp://{machine.own}:{free_port()}"
        place = (
            "cluster.kind=address",
            f"cluster.address={address}",
            f"store.uri=file://{tmp_path}/.refrain/store",
        )
        words = (
            *WORDS,
            "steps=20",
            "cluster.no_workers_timeout=180",
            "rollout.deadline=120",
            "train.deadline=120",
            *place,
        )
        own = ["--host", machine.own, "--port", address.rpartition(":")[2]]
        with contextlib.ExitStack() as stack:
            own += ["--dashboard-address", "127.0.0.1:0"]
            folder = tmp_path / "workers"
            folder.mkdir()
            stack.enter_context(started(folder, "scheduler", "engines.clusters.scheduler", *own))
            for pool in ("train", "rollout", "cpu"):
                command = ("flows.worker", pool, *words)
                stack.enter_context(started(folder, pool, *command, namespace=machine.name))
            run = launch(*words)
            wait_for_step(run, 2)
            machine.link("down")
            time.sleep(CUT)
            assert run.process.poll() is None, run.end()[1]
            before = head(run.files) or 0
            machine.link("up")
            wait_for_step(run, before + 2)
            code, out = run.end(timeout=400)
            assert code == 0, out
            assert len(run.commits()) == 20


def by_train_workers(commit: Commit) -> set[str]:
    return {str(one["worker"]) for one in commit.attempts if one["stage"] == "unit"}


def test_elastic_train_workers_come_and_go(
    launch: Launch, workers: Workers, undisturbed: Callable[..., list[Commit]], tmp_path: Path
) -> None:
    """Weights are those of FSDP, whoever was there; the aggregator is on the pool that stays."""
    split = ("data.max_prompt_tokens=80", "train.micro_batch_tokens=88")
    plain = (*split, "algorithm.kl.coefficient=0", "steps=12")
    place = ("cluster.kind=address", f"cluster.address={workers.address}")
    store = f"store.uri=file://{tmp_path}/.refrain/store"
    elastic = ("train.engine=elastic", "train.unit_tokens=88", "cluster.roles.aggregator=cpu")
    run = launch(*WORDS, *plain, *elastic, *place, store)
    wait_for_step(run, 1)
    workers.join("late", "train", 2)
    began = time.monotonic()
    while not any("late" in by_train_workers(commit) for commit in run.commits()):
        assert run.process.poll() is None, run.end()[1]
        assert time.monotonic() - began < 120
        time.sleep(0.1)
    workers.leave("train-0")  # in mid-step, more often than not
    code, out = run.end(timeout=300)
    assert code == 0, out
    assert by_train_workers(run.commits()[-1]) == {"late"}
    assert story(committed(run.files)) == story(undisturbed(*plain))
