"""Runs of DAPO: killed in the second round of a step, short of groups, with steps that overlap."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from storage.audit.audit import audit
from storage.runs.commit_log import Commit
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch

pytestmark = pytest.mark.cluster

WORDS = ("tiny-dapo", "steps=3")
ALIKE = "rewards.functions=[{kind: function, path: my_rewards.py:alike}]"
REWARD = """
def alike(prompts, completions, **columns):
    return [1.0] * len(completions)
"""


def rounds(commit: Commit) -> int:
    """How many times a step drew."""
    return int(commit.metrics["sampling/rounds"] or 0)


def answer(folder: Path, command: str, *words: str) -> dict[str, object]:
    """What a command says of the folder's run, which must be good."""
    done = subprocess.run(
        [sys.executable, "-m", f"flows.{command}", *words, "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_second_round_samples_nothing_twice(
    launch: Launch, tmp_path: Path
) -> None:
    """Two shards are a round: the third of the first step is one of the second round.

    The kill may come before or after the fourth is stored.
    """
    whole = launch(*WORDS, "store.uri=file://whole", module="flows.dapo")
    code, out = whole.end()
    assert code == 0, out
    whole.store_uri = f"file://{tmp_path}/whole"
    commits = committed(whole.files)
    assert rounds(commits[0]) > 1 and f"rounds {rounds(commits[0])}" in out
    for commit in commits:
        metrics, ledger = commit.metrics, commit.ledger
        assert metrics["sampling/groups"] == len(commit.refs["prompts"])
        assert ledger.filtered == ledger.filtered_by["informative"] > 0
        tasks = [one for one in commit.attempts if one["stage"] == "rollout"]
        numbers = sorted(int(str(one["shard"])) for one in tasks)
        assert numbers == list(range(1, len(tasks) + 1))  # on through the rounds
    dies = Fault(
        id="round", target="tasks.run.shard_driver:ShardDriver.ended", action="kill", nth=3
    )
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [dies])
    broken = launch(*WORDS, module="flows.dapo", environment=faults.environment)
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    name = broken.files.run
    stored = {
        int(key.partition("-")[0])
        for key in broken.files.store.children(f"{broken.files.step_key(1)}/rollout")
        if key.endswith(".json")
    }
    assert len(stored) >= 3
    resumed = launch("--resume", name, module="flows.dapo")
    code, out = resumed.end()
    assert code == 0, out
    again = committed(resumed.files)
    assert story(again) == story(commits)
    every, sampled = (
        {one["shard"] for one in step.attempts if one["stage"] == "rollout"}
        for step in (commits[0], again[0])
    )
    assert sampled == every - stored
    assert audit(resumed.files).problems == []
    assert answer(tmp_path, "replay", name, "2")["equal"]


@pytest.mark.slow
def test_too_few_groups_stop_the_run_or_train_by_setting(launch: Launch) -> None:
    limits = ("dynamic_sampling.max_rounds=1", "dynamic_sampling.on_shortage=stop")
    run = launch(*WORDS, *limits, module="flows.dapo")
    code, out = run.end()
    assert code == 1, out
    assert "TooFewGroups: Step 1 wants 4 groups whose rewards differ, and" in out
    assert f"To go on from the last step: refrain dapo --resume {run.files.run}" in out
    words = ("dynamic_sampling.max_rounds=2", "dynamic_sampling.on_shortage=train", "steps=1")
    code, out = launch("--resume", run.files.run, *words, module="flows.dapo").end()
    assert code == 0, out
    (commit,) = committed(run.files)
    sampled = {one["shard"] for one in commit.attempts if one["stage"] == "rollout"}
    assert not sampled & {1, 2}  # of the round that was made before


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["dapo", "grpo"])
def test_a_step_whose_groups_are_all_filtered_has_no_update(
    launch: Launch, tmp_path: Path, flow: str
) -> None:
    words = ["steps=2", "dynamic_sampling.max_rounds=2", "store.snapshot_every=1"]
    if flow == "grpo":
        words[1] = "algorithm.selection=[{kind: informative}]"
    run = launch(
        "tiny-dapo", ALIKE, *words, module=f"flows.{flow}", files={"my_rewards.py": REWARD}
    )
    code, out = run.end()
    assert code == 0, out
    assert "step 2/2  reward 1.000  no update" in out
    first, second = committed(run.files)
    assert first.version_out.digest == second.version_out.digest
    assert (first.version_out.version, second.version_out.version) == (1, 2)
    drawn = 24 if flow == "dapo" else 8
    assert (second.ledger.drawn, second.ledger.filtered_by) == (drawn, {"informative": drawn})
    assert None not in second.metrics.values()
    assert audit(run.files).problems == []
    assert answer(tmp_path, "replay", run.files.run, "2")["equal"]


@pytest.mark.slow
def test_steps_that_overlap_draw_in_turn(launch: Launch, tmp_path: Path) -> None:
    """Each draws its first round after the last one of the step before; log-probs are made apart."""
    words = (
        "max_staleness=2",
        "algorithm.correction=[{kind: truncate}]",
        "algorithm.kl.coefficient=0.01",
        "train.mini_batches=2",
        "steps=4",
    )
    run = launch("tiny-dapo", *words, module="flows.dapo")
    code, out = run.end()
    assert code == 0, out
    commits = committed(run.files, max_staleness=2)
    rows = [
        row
        for commit in commits
        for row in commit.refs["prompts"].fetch_numpy(run.files.store, "prompt_row")[0].tolist()
    ]
    assert len(set(rows)) == len(rows) == commits[-1].ledger.drawn
    for commit in commits:
        batch = commit.refs["batch"]
        assert {"old_logprobs", "ref_logprobs"} <= set(batch.names)
        assert len(batch) < len(commit.refs["samples"])
    assert audit(run.files).problems == []
    assert answer(tmp_path, "replay", run.files.run, "3")["equal"]
