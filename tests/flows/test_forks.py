"""Forks under the conditions that could break them: with a critic, killed and resumed, on S3.

And PPO that goes on from an earlier run: with a new critic, the old one, and with nothing new.
"""

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
from storage.runs.origins import origin_of
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


@pytest.mark.parametrize("at", [1, 2])  # between snapshots, and at one
def test_a_fork_with_a_critic_repeats_its_parents_steps(launch: Launch, at: int) -> None:
    """The critic goes on too: its values decide the advantages, so the weights would tell."""
    parent = launch(*WORDS, "name=whole", module="flows.ppo")
    code, out = parent.end()
    assert code == 0, out
    name = parent.files.run
    code, out = launch("--fork", f"{name}@{at}", "name=child").end()
    assert code == 2
    assert (
        f"Run {name} was made by the flow flows.ppo:ppo, and this is flows.grpo:grpo. Fork it by: "
        f"refrain ppo --fork {name}@{at}\n"
    ) in out
    code, out = launch("--fork", f"{name}@{at}", "name=child", module="flows.ppo").end()
    assert code == 0, out
    whole, child = forked(parent, "whole"), forked(parent, "child")
    assert digests(child, at) == digests(whole, at)
    values = [
        committed(files)[-1].refs["batch"].fetch_numpy(files.store, "values")[0].tolist()
        for files in (whole, child)
    ]
    assert values[0] == values[1]
    assert audited(parent, child.run)["origin"] == f"{name}@{at}"


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


def test_ppo_goes_on_and_is_skipped_with_nothing_new(launch: Launch) -> None:
    # A first epoch of all 64 rows, in steps of 4, would take long; 8 rows are seen in two steps.
    rows = ["data.source.size=8", "steps=2"]
    first = launch("tiny", *rows, "name=first", module="flows.ppo")
    code, out = first.end()
    assert code == 0, out
    name = first.files.run
    code, out = launch("tiny", *rows, f"continue_from={name}", module="flows.ppo").end()
    assert code == 0, out
    assert out == (
        "Nothing new to train on: all 8 rows of reasoning_gym/chain_sum were seen by "
        f"{name}@2 or the runs before it.\n"
    )
    store = Store(first.store_uri)
    values = []
    for state in ("weights", "trainer"):
        words = [f"name={state}", f"continue_state={state}", "continue_data=restart", "steps=1"]
        code, out = launch(
            "tiny", "data.source.size=8", *words, f"continue_from={name}", module="flows.ppo"
        ).end()
        assert code == 0, out
        (child,) = (one for one in store.children() if one.startswith(state))
        files = RunStore(store, child)
        assert str(origin_of(files)) == f"{name}@2"
        (commit,) = committed(files)
        assert commit.version_in.digest == committed(RunStore(store, name))[-1].version_out.digest
        values.append(commit.refs["batch"].fetch_numpy(store, "values")[0])
    assert (values[0] == 0).all()  # a new value head begins at 0
    assert (values[1] != 0).any()
