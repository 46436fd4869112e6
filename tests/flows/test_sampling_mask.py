"""Runs that sample from a part of the distribution and train on that part: killed, replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.audit.audit import audit
from storage.batches.sampling_mask import COUNTS
from storage.objects.store import Store
from storage.runs.commit_log import Commit
from tests.flows import test_episodes, test_tree
from tests.flows.conftest import AFTER_STEP_3, Launch, ends_alike, starting
from tests.flows.test_over_sampling import CARRY, faults_of, replayed

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CUT = ("rollout.engine=transformers", "rollout.top_p=0.8", "rollout.sampling_mask=true")
CORRECTED = (*CUT, "algorithm.correction=[{kind: reject}]")


def check_words(commits: list[Commit], store: Store) -> None:
    """The trainer's log-probs are the sampler's, and whatever the policy drew has its words."""
    for commit in commits:
        batch = commit.refs["batch"]
        counts, _ = batch.fetch_numpy(store, COUNTS)
        mask, _ = batch.fetch_numpy(store, "response_mask")
        assert (counts[mask.astype(bool)] != 0).all()
        assert counts.max() > 1
        assert commit.metrics["train/rollout_mismatch"] < 1e-4


def test_killed_and_resumed_it_ends_alike_and_replays(
    launch: Launch, prefect_api: str, tmp_path: Path
) -> None:
    words = ["tiny", "steps=4", *CORRECTED]
    undisturbed = tmp_path.parent / f"{tmp_path.name}-undisturbed"
    undisturbed.mkdir()
    with starting(undisturbed, prefect_api) as start:
        whole = start(*words).whole()
        check_words(whole.commits(), whole.files.store)
        ends_alike(whole, launch, tmp_path.parent / f"{tmp_path.name}-f", words, AFTER_STEP_3)
        assert "Equal, to the bit." in replayed(whole, 4)


def test_carried_answers_keep_the_words_of_their_beginning(launch: Launch, tmp_path: Path) -> None:
    faults = faults_of(tmp_path)
    run = launch("tiny", "steps=5", *CARRY, *CUT, environment=faults.environment).whole()
    commits = run.commits()
    for commit in commits:
        counts, _ = commit.refs["batch"].fetch_numpy(run.files.store, COUNTS)
        assert (counts != 0).all(), "also of what an earlier version drew"
    assert any(len(commit.carried) for commit in commits)
    assert audit(run.files).problems == []


def test_a_run_on_trees(launch: Launch) -> None:
    run = launch(*test_tree.WORDS, "steps=2", *CORRECTED, module="flows.tree").whole()
    check_words(run.commits(), run.files.store)
    assert "Equal, to the bit." in replayed(run, 2)


def test_a_run_of_episodes(launch: Launch) -> None:
    run = launch(*test_episodes.WORDS, *CORRECTED).whole()
    check_words(run.commits(), run.files.store)
    counts, _ = run.commits()[-1].refs["batch"].fetch_numpy(run.files.store, COUNTS)
    assert (counts == 0).any(), "of what the environment wrote"


def test_a_fork_of_answers_that_were_begun_without_it_is_refused(
    launch: Launch, tmp_path: Path
) -> None:
    faults = faults_of(tmp_path)
    run = launch("tiny", "steps=5", *CARRY, environment=faults.environment).whole()
    step = next(c.step for c in run.commits() if any(one.begun for one in c.carried))
    code, out = launch("tiny", "steps=6", *CARRY, *CUT, "--fork", f"{run.files.run}@{step}").end()
    assert code != 0
    assert "hands on answers that were begun without it" in out
    assert "Traceback" not in out
