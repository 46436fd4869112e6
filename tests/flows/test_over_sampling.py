"""Steps that do not wait for their longest answers: dropped or carried, killed and resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from storage.batches.columns import SampleStatus
from storage.runs.commit_log import Commit
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch, Launched
from tests.flows.test_epochs import audited
from tests.flows.test_overlap import ASYNC, lags, rows_trained, spans_of

pytestmark = pytest.mark.cluster

# Six groups under way of which the step waits for four; answers take their time.
OVER = (
    *ASYNC,
    "rollout.over_sampling=1.5",
    "rollout.shards=4",
    "rollout.max_new_tokens=40",
    "rollout.ignore_eos=false",
)
CARRY = (*OVER, "rollout.partial_rollout=carry")
SLOW = Fault(id="slow", target="engines.rollout.hf_decoding:Decoding.step", action="delay")


def faults_of(folder: Path, *more: Fault) -> Faults:
    return Faults(folder.parent / f"{folder.name}-faults", [SLOW, *more])


def check_carried(run: Launched, commits: list[Commit]) -> None:
    """Every group is whole, in one step's batch only, and no sample is staler than the bound."""
    seen: set[int] = set()
    for commit in commits:
        groups = commit.refs["samples"].fetch_numpy(run.files.store, "group_id")[0]
        numbers, sizes = np.unique(groups, return_counts=True)
        assert set(sizes.tolist()) == {4}
        assert seen.isdisjoint(numbers.tolist())
        seen |= set(numbers.tolist())
        status = commit.refs["samples"].fetch_numpy(run.files.store, "status")[0]
        assert SampleStatus.UNFINISHED not in status.tolist()
        assert lags(commit, run).max() <= 2
    begun = [commit.refs["begun"] for commit in commits if "begun" in commit.refs]
    left = {n for ref in begun for n in ref.fetch_numpy(run.files.store, "status")[0].tolist()}
    assert (SampleStatus.UNFINISHED in left) == bool(begun), "answers were cut on their way"
    assert [commit.ledger.trained + commit.ledger.filtered for commit in commits] == [
        4 * commit.step for commit in commits
    ]


def replayed(run: Launched, step: int) -> str:
    command = [sys.executable, "-m", "flows.replay", run.files.run, str(step)]
    done = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, timeout=400)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_groups_go_on_in_the_next_step(launch: Launch, tmp_path: Path) -> None:
    faults = faults_of(tmp_path)
    run = launch("tiny", "steps=6", *CARRY, environment=faults.environment)
    code, out = run.end()
    assert (code, faults.missed) == (0, []), out
    commits = run.commits()
    check_carried(run, commits)
    assert [commit.ledger.drawn for commit in commits] == [6, 10, 14, 18, 22, 24]
    assert [commit.ledger.in_flight for commit in commits] == [2, 2, 2, 2, 2, 0]
    assert all(len(commit.carried) == commit.ledger.in_flight for commit in commits)
    went_on = [spans for commit in commits for spans in spans_of(commit, run) if len(spans) > 1]
    assert went_on, "answers went on in a later step"
    rows = [row for step in rows_trained(commits, run.files.store) for row in step]
    assert len(rows) <= 24
    assert audited(run)[-1]["recounted"]
    assert run.children() == []
    assert "Equal, to the bit." in replayed(run, 5)


KILLED = {
    "sampling": Fault(
        id="kill", target="engines.rollout.rollout_pool:RolloutPool.generate", action="kill", nth=15
    ),
    "queued": Fault(id="kill", target="engines.workers.pool:SlotQueue.take", action="kill", nth=16),
    "carried": Fault(id="kill", target="tasks.over_sampling.groups:settled", action="kill", nth=3),
    "scored": Fault(id="kill", target="tasks.reward:scored", action="kill", nth=11),
    "training": Fault(
        id="kill", target="engines.train.trainer:Trainer.update", action="kill", nth=3
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("when", KILLED)
def test_killed_while_groups_are_carried(launch: Launch, tmp_path: Path, when: str) -> None:
    """The step after the kill takes the carried groups from the commit, tokens and all."""
    faults = faults_of(tmp_path, KILLED[when])
    broken = launch("tiny", "steps=6", *CARRY, environment=faults.environment)
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    before = broken.commits()
    assert before and before[-1].carried
    resumed = launch("--resume", broken.files.run)
    code, out = resumed.end()
    assert code == 0, out
    commits = resumed.commits()
    check_carried(resumed, commits)
    # All prompts that were drawn are trained: the first 24, as in a run that nobody kills.
    trained = [rows(commit, "samples", resumed) for commit in commits]
    drawn = [rows(commit, "prompts", resumed) for commit in commits]
    assert set().union(*trained) == set().union(*drawn)
    assert len(set().union(*trained)) == 24
    handed_on = rows(before[-1], "carried", resumed)
    assert handed_on <= set().union(*trained[before[-1].step :])
    assert audited(resumed)[-1]["recounted"]


def rows(commit: Commit, name: str, run: Launched) -> set[int]:
    """Rows of the data that a batch of a commit is about."""
    return set(commit.refs[name].fetch_numpy(run.files.store, "prompt_row")[0].tolist())


@pytest.mark.slow
def test_another_worker_goes_on_from_the_saved_tokens(launch: Launch, tmp_path: Path) -> None:
    worker = Fault(
        id="kill", target="engines.rollout.hf_decoding:Decoding.step", action="kill", nth=60
    )
    faults = faults_of(tmp_path, worker)
    words = [*CARRY, "rollout.save_every=0.05", "cluster.pools.rollout.workers=2"]
    run = launch("tiny", "steps=4", *words, environment=faults.environment)
    code, out = run.end()
    assert (code, faults.missed) == (0, []), out
    commits = run.commits()
    check_carried(run, commits)
    assert sum(commit.metrics["retries"] or 0 for commit in commits) >= 1
    assert audited(run)[-1]["recounted"]
    named = set().union(*(commit.objects for commit in commits))
    kept = {key for key in run.files.store.list(run.files.run) if "partial" in key}
    assert kept <= named, "saves of groups that were handed on before another engine took them"


@pytest.mark.slow
@pytest.mark.parametrize("overdue", ["drop_and_refill", "cut"])
def test_overdue_groups(launch: Launch, tmp_path: Path, overdue: str) -> None:
    faults = faults_of(tmp_path)
    words = [*CARRY, f"rollout.overdue={overdue}", "rollout.max_carried_steps=1"]
    run = launch("tiny", "steps=6", *words, environment=faults.environment)
    code, out = run.end()
    assert code == 0, out
    commits = run.commits()
    check_carried(run, commits)
    last = commits[-1].ledger
    assert last.drawn == 24 + last.dropped.get("overdue", 0) and last.in_flight == 0
    reasons = [
        reason
        for commit in commits
        for reason in commit.refs["samples"].fetch_list(run.files.store, "finish_reason")
    ]
    assert ("cut" in reasons) <= (overdue == "cut")
    assert audited(run)[-1]["recounted"]


@pytest.mark.slow
def test_without_carrying_they_are_dropped_and_counted_by_length(
    launch: Launch, tmp_path: Path
) -> None:
    faults = faults_of(tmp_path)
    run = launch("tiny", "steps=4", *OVER, environment=faults.environment)
    code, out = run.end()
    assert code == 0, out
    commits = run.commits()
    check_carried(run, commits)
    assert commits[-1].ledger.dropped == {"over_sampled": 8}
    assert commits[-1].ledger.drawn == 24
    assert all(commit.metrics["drop_rate/all"] == pytest.approx(1 / 3) for commit in commits)
    assert any(name.startswith("drop_rate/length_decile_") for name in commits[-1].metrics)
    assert audited(run)[-1]["recounted"]
