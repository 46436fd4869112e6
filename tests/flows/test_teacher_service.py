"""A teacher's service and the runs that ask it: it is killed, and both end as if they had their own."""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from storage.audit.audit import audit
from tests.engines.conftest import left_after
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch, Launched
from tests.flows.test_distill import COLUMNS, FLOW, TEACHER, WORDS, replayed
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

AS_TINY = ("train.compute_dtype=float32", "train.micro_batch_tokens=1024")  # the runs' own numbers
KEY = {"REFRAIN_TEACHER_KEY": secrets.token_hex(16)}


def serving(
    launch: Launch, port: int, *words: str, env: Mapping[str, str] | None = None
) -> Launched:
    """A service, once it listens."""
    model = ("model.kind=random", "model.seed=7", f"port={port}", "lease_seconds=10")
    model = (*model, *AS_TINY)
    environment = {**KEY, **(env or {})}
    service = launch("serve", *model, *words, module="flows.teacher", environment=environment)
    assert service.process.stdout is not None
    said = []
    while not said or "teachers.NAME.service" not in said[-1]:
        said.append(service.process.stdout.readline())
        assert said[-1], "".join(said)
    return service


def processes(service: Launched) -> list[int]:
    """Those that it started."""
    return [one.pid for one in psutil.Process(service.process.pid).children(recursive=True)]


def test_two_runs_of_a_service_that_is_killed_end_as_with_teachers_of_their_own(
    launch: Launch, tmp_path: Path
) -> None:
    port = free_port()
    stores = {name: f"file://{tmp_path}/{name}" for name in "abcd"}
    words = {"a": ("tiny", "steps=3"), "b": ("tiny", "steps=3", "seed=1", "rollout.seed=1", *WORDS)}
    where = (f"store.uri={stores['a']}", f"other_stores=[{stores['b']}]", "tokens_per_minute=60000")
    dies = Fault(
        id="service", target="engines.teachers.service:TeacherService._answer", action="kill", nth=6
    )
    worker = Fault(
        id="worker", target="engines.train.fsdp_engine:FSDPEngine.teach", action="kill", nth=2
    )
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [worker, dies])
    service = serving(launch, port, *where, env=faults.environment)
    below = {*processes(service)}
    assert below
    asking = f"teachers.tutor.service=http://127.0.0.1:{port}"
    runs = {}
    for name, settings in words.items():
        uri = f"store.uri={stores[name]}"
        runs[name] = launch(*settings, asking, uri, module=FLOW, environment=KEY)
        runs[name].store_uri = stores[name]
    while service.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            below |= {*processes(service)}  # of a worker that died there is a new one
        time.sleep(0.2)
    assert service.process.wait(200) == -signal.SIGKILL
    assert left_after(10, below) == []
    time.sleep(3)  # both find nobody there
    assert all(run.process.poll() is None for run in runs.values())
    again = serving(launch, port, *where)
    for name, run in runs.items():
        code, out = run.end()
        assert code == 0, out
        assert len(run.commits()) == 3, name
    assert faults.missed == []
    below = processes(again)
    again.process.terminate()
    assert again.process.wait(30) == 0
    assert left_after(10, below) == []
    for name, other in (("a", "c"), ("b", "d")):  # from here on nobody serves
        own = launch(*words[name], *TEACHER, f"store.uri={stores[other]}", module=FLOW)
        own.store_uri = stores[other]
        own.whole()
        asked = [commit.version_out.digest for commit in runs[name].commits()]
        assert asked == [commit.version_out.digest for commit in own.commits()]
        assert audit(runs[name].files).problems == []
        last = runs[name].commits()[-1]
        assert set(last.refs["batch"].names) >= COLUMNS
        assert last.metrics["teacher_service/tutor/tokens"] > 0
        assert last.metrics["teacher_service/tutor/queue_seconds"] >= 0
    runs["b"].store_uri = stores["b"]
    replayed(runs["b"], 3)
