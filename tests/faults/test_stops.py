"""A run that is stopped leaves no process, whenever it is stopped; it says how to go on, and does."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from storage.runs.commit_log import head
from tests.faults.conftest import WORDS
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults
from tests.faults.test_matrix import CPU, RANK_0, ROLLOUT, TRAIN
from tests.flows.conftest import Launch, Launched

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN = 5.0  # seconds
MOMENTS = {
    "workers start": Fault(id="x", target="engines.workers.host:EngineHost.setup", action="hang"),
    "engines start": ROLLOUT["start"],
    "rollout": ROLLOUT["rollout"],
    "reward": CPU["reward"],
    "update": TRAIN["update"],
    "weight_sync": RANK_0["weight_sync"],
    "trainer": Fault(id="x", target="engines.train.trainer:Trainer.update", action="hang"),
    "commit": Fault(id="x", target="storage.runs.commit_log:commit", action="hang"),
}
OWN_THREADS = ("trainer", "commit")  # of the flow, which nobody can wake


def reached(run: Launched, faults: Faults, timeout: float = 300) -> None:
    """Return when the run hangs where it was planted to."""
    end = time.monotonic() + timeout
    while faults.missed:
        assert run.process.poll() is None, run.end()[1]
        assert time.monotonic() < end, "the run did not come there"
        time.sleep(0.05)
    time.sleep(0.5)


def cancel(api: str) -> str:
    """What the button on the dashboard does; returns the flow run's id."""
    question = {
        "flow_runs": {"name": {"like_": "faults-"}, "state": {"type": {"any_": ["RUNNING"]}}},
        "sort": "START_TIME_DESC",
        "limit": 1,
    }
    (found,) = httpx.post(f"{api}/flow_runs/filter", json=question).json()
    answer = httpx.post(
        f"{api}/flow_runs/{found['id']}/set_state", json={"state": {"type": "CANCELLING"}}
    ).json()
    assert answer["status"] == "ACCEPT", answer
    return str(found["id"])


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL", "dashboard"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_is_left(
    launch: Launch, tmp_path: Path, prefect_api: str, moment: str, how: str
) -> None:
    if how == "dashboard" and ("start" in moment or moment in OWN_THREADS):
        pytest.skip("no flow run on the dashboard yet, or nobody who could look there")
    faults = Faults(tmp_path / "faults", [replace(MOMENTS[moment], action="hang")])
    embedded = how != "dashboard"
    run = launch(*WORDS, environment=faults.environment, embedded=embedded)
    reached(run, faults)
    assert len(run.children()) >= 2
    began = time.monotonic()
    if how == "dashboard":
        flow_run = cancel(prefect_api)
    else:
        run.process.send_signal(getattr(signal, how))
    while run.children() and time.monotonic() - began < 2 * WITHIN:
        time.sleep(0.02)
    took = time.monotonic() - began
    assert run.children() == []
    assert took < WITHIN
    code, out = run.end(timeout=60)
    assert code == {"SIGKILL": -9, "dashboard": 3}.get(how, 130), out
    if how == "dashboard":
        assert httpx.get(f"{prefect_api}/flow_runs/{flow_run}").json()["state_type"] == "CANCELLED"
    assert "Traceback" not in out, out
    if how != "SIGKILL":
        assert re.search(r"Stopped. To go on: refrain grpo --resume faults-\S+", out), out


def test_a_second_flow_is_refused_and_an_expired_lease_is_taken_over(
    launch: Launch, undisturbed
) -> None:
    first = launch(*WORDS)
    while not (list(Path(first.folder, ".refrain/store").glob("*/HEAD"))):
        assert first.process.poll() is None, first.end()[1]
        time.sleep(0.05)
    first.process.send_signal(signal.SIGSTOP)
    name = first.files.run
    code, out = launch("--resume", name).end()
    assert code == 1
    assert re.search(
        rf"Run {name} is being written by \S+'s flow \(process {first.process.pid} on", out
    )
    before = head(first.files)
    time.sleep(68)  # the lease's minute, and a tenth
    code, out = launch("--resume", name).end()
    assert code == 0, out
    first.process.send_signal(signal.SIGCONT)
    code, out = first.end(timeout=120)
    assert code == 1, out
    assert "was taken over by" in out or "has run out" in out
    assert "Traceback" not in out
    assert before < 4
    assert story(committed(first.files)) == story(undisturbed())


def test_settings_that_may_and_may_not_change(launch: Launch) -> None:
    run = launch(*WORDS, "steps=1")
    assert run.end()[0] == 0
    name = run.files.run
    code, out = launch("--resume", name, "steps=2", "group_size=2", "train.learning_rate=1").end()
    assert code == 2
    assert f"Run {name} was made with other values of group_size, train.learning_rate." in out
    assert "may change: steps, cluster," in out
    code, out = launch("--resume", name, "steps=2", "cluster.no_workers_timeout=50").end()
    assert code == 0, out
    code, out = launch("--resume", name, "steps=2").end()
    assert code == 2
    assert f"Run {name} is finished: 2 of 2 steps are committed." in out
