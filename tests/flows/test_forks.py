"""Forks under the conditions that could break them: killed and resumed, on S3."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tests.contract.conftest import BUCKET, Endpoint, s3_server  # noqa: F401
from tests.faults.ledger import committed
from tests.faults.planted import Faults
from tests.faults.test_matrix import FLOW
from tests.flows.conftest import Launch, Launched

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = ("tiny", "steps=4", "store.snapshot_every=2", "algorithm.kl.coefficient=0.01")


def forked(run: Launched, name: str) -> RunStore:
    """The run in the store whose name begins with `name`."""
    store = Store(run.store_uri)
    (found,) = (one for one in store.children() if one.startswith(name))
    return RunStore(store, found)


def digests(files: RunStore, after: int) -> list[str]:
    """Of the versions that a run's steps made, after the checks that every run must pass."""
    return [one.version_out.digest for one in committed(files) if one.step > after]


def audited(run: Launched, name: str, *words: str) -> dict[str, object]:
    """What `flows.audit --strict` says."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.audit", name, "--strict", "--json", *words],
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("moment", ["update", "commit", "committed"])
def test_a_fork_that_is_killed_and_resumed_repeats_its_parents_steps(
    launch: Launch, tmp_path: Path, moment: str
) -> None:
    """In its first step, when all that it has is its parent's, and in its second."""
    parent = launch(*WORDS, "name=whole")
    code, out = parent.end()
    assert code == 0, out
    name = parent.files.run
    kills = [replace(FLOW[moment], id=f"{moment}-{nth}", nth=nth) for nth in (2, 1)]
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", kills)
    broken = launch("--fork", f"{name}@1", "name=child", environment=faults.environment)
    code, out = broken.end()
    assert code == -9, out
    child = forked(parent, "child")
    for _ in range(2):
        resumed = launch("--resume", child.run, environment=faults.environment)
        code, out = resumed.end()
        if code == 0:
            break
        assert code == -9, out
    assert code == 0, out
    assert faults.missed == []
    assert digests(child, 1) == digests(forked(parent, "whole"), 1)
    audited(parent, child.run)


def test_a_fork_on_s3_copies_nothing(
    launch: Launch,
    s3_server: Endpoint,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    uri = f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"
    parent = launch(*WORDS, "name=whole", f"store.uri={uri}")
    parent.store_uri = uri
    code, out = parent.end()
    assert code == 0, out
    name = parent.files.run
    s3_server.requests.clear()
    code, out = launch("--fork", f"{name}@3", "name=child", f"store.uri={uri}").end()
    assert code == 0, out
    whole, child = forked(parent, "whole"), forked(parent, "child")
    (commit,) = committed(child)
    assert commit.version_in.key == f"{name}/weights/v000003"
    assert digests(child, 3) == digests(whole, 3)
    weights = {re.split(r"/v0+", key)[1][0] for key in child.store.list(f"{child.run}/weights")}
    assert weights == {"4"}
    audited(parent, child.run, f"store.uri={uri}")
