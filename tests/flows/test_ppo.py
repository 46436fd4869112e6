"""Runs with a critic: killed and resumed, overlapping, forked, and gone on from an earlier run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from storage.objects.store import Store
from storage.runs.run_store import RunStore, origin_of
from tests.faults.ledger import committed
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import AFTER_STEP_3, Launch
from tests.flows.test_epochs import audited as audited_lines
from tests.flows.test_forks import WORDS, audited, digests, forked
from tests.flows.test_lora import WORDS as LORA
from tests.flows.test_lora import command, ended
from tests.flows.test_methods import check_records
from tests.flows.test_overlap import ASYNC, lags

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_critics_run_killed_and_resumed_ends_with_the_same_weights(
    launch: Launch, tmp_path: Path
) -> None:
    """First a train worker dies in the critic's update, later the flow; nothing shows of either."""

    whole = launch("tiny", "steps=4", "store.uri=file://whole", module="flows.ppo")
    code, out = whole.end()
    assert code == 0, out
    whole.store_uri = f"file://{tmp_path}/whole"
    commits = check_records(whole)
    for commit in commits:
        assert {"values", "returns"} <= set(commit.refs["batch"].names)
        assert commit.metrics["critic/skipped_steps"] == 0
    errors = [commit.metrics["critic/value_mean"] for commit in commits]
    assert errors[0] == 0, "the head begins at 0"
    assert all(value != 0 for value in errors[1:]), "and is trained"
    assert {key.split("/")[2] for key in whole.files.store.list(f"{whole.files.run}/critic")} == {
        "000002",
        "000004",
    }
    # Policy and critic live on this worker; the policy may have had its update already.
    dies = Fault(
        id="critic", target="engines.critic.engine:CriticUpdater._columns", action="kill", nth=2
    )
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [dies, AFTER_STEP_3])
    broken = launch("tiny", "steps=4", module="flows.ppo", environment=faults.environment)
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    name = broken.files.run
    code, out = launch("--resume", name).end()
    assert code == 2
    assert f"Go on with it by: refrain ppo --resume {name}" in out
    resumed = launch("--resume", name, module="flows.ppo")
    code, out = resumed.end()
    assert code == 0, out
    assert [commit.version_out.digest for commit in commits] == [
        commit.version_out.digest for commit in resumed.commits()
    ]
    # The last step's values are those of a critic that was restored and replayed.
    ours, theirs = (
        one.refs["batch"].fetch_numpy(run.files.store, "values")[0].tolist()
        for one, run in ((commits[-1], whole), (resumed.commits()[-1], resumed))
    )
    assert ours == theirs


def test_a_critic_has_workers_of_its_own(launch: Launch) -> None:
    run = launch(
        "tiny",
        "steps=2",
        "cluster.pools.critic.workers=2",
        "cluster.roles.critic=critic",
        "critic.mini_batches=2",
        module="flows.ppo",
    )
    code, out = run.end()
    assert code == 0, out
    assert check_records(run)[-1].metrics["critic/optimizer_steps"] == 2


def test_a_critics_steps_overlap_too(launch: Launch) -> None:
    run = launch("tiny", "steps=5", *ASYNC, module="flows.ppo")
    code, out = run.end()
    assert code == 0, out
    commits = run.commits()
    assert [commit.ledger.trained for commit in commits] == [4, 8, 12, 16, 20]
    assert 0 < max(lags(commit, run).max() for commit in commits) <= 2
    assert all("critic/loss" in commit.metrics for commit in commits)
    assert audited_lines(run)[-1]["recounted"]
    command = [sys.executable, "-m", "flows.replay", run.files.run, "4"]
    done = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, timeout=400)
    assert (done.returncode, "Equal, to the bit." in done.stdout) == (0, True), done.stdout


def test_a_critic_beside_an_adapter_has_all_its_weights_trained(launch: Launch) -> None:
    run = ended(launch(*LORA, "steps=2", module="flows.ppo"))
    files = run.files
    index = json.loads(files.store.read(f"{files.run}/critic/000002/index.json"))
    assert not any("lora" in name for name in index["body"]["tensors"])
    assert command(run, "replay", files.run, "2")["equal"]


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
