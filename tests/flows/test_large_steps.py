"""Large steps: prompts, advantages and update plan in parts, and more shards than task runs.

The weights are those of steps in one piece, of few shards, and nothing is lost.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from storage.runs.commit_log import read_commit
from storage.runs.run_store import RunStore
from tasks.run.shard_driver import FEWEST
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch
from tests.flows.test_epochs import audited
from tests.flows.test_grpo import flow_runs

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# GRPO as it is, with parts so small that a step of `tiny` has several of each.
SMALL_PARTS = """
import sys

import tasks.advantage
import tasks.draw
import tasks.run.life_cycle
import tasks.update
from configs.grpo import GRPOConfig
from tasks.launch.command_line import main

tasks.draw.PART_ROWS = 2
tasks.advantage.PART_TOKENS = 60
tasks.update.PLANNED_ROWS = 1
tasks.run.life_cycle.ROWS_AT_ONCE = 10

if __name__ == "__main__":
    sys.exit(main("flows.grpo:grpo", GRPOConfig))
"""

WORKER_DIES = Fault(
    id="worker",
    target="engines.data.data_engine:DataEngine.advantage_part",
    action="kill",
    nth=3,
    only="cpu",
)
# A step removes three things: statistics (none here), what was decided of each sample, and the plan.
# The eighth is what was decided in step 3, whose update has not begun.
FLOW_DIES = Fault(
    id="flow", target="storage.runs.run_store:StageStore.discard", action="kill", nth=8
)

SHARDS = 40
STEP = ("tiny", "steps=2", f"prompts_per_step={SHARDS}", "group_size=2")


def test_killed_and_resumed_it_has_the_weights_of_whole_steps(
    launch: Launch, undisturbed: RunStore, tmp_path: Path
) -> None:
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [WORKER_DIES, FLOW_DIES])
    module = {"small_parts.py": SMALL_PARTS}
    broken = launch(
        "tiny", "steps=6", module="small_parts", files=module, environment=faults.environment
    )
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    assert len(broken.commits()) == 2
    resumed = launch("--resume", broken.files.run, module="small_parts")
    code, out = resumed.end()
    assert code == 0, out

    commits = resumed.commits()
    assert [commit.version_out.digest for commit in commits] == [
        read_commit(undisturbed, step).version_out.digest for step in range(1, 7)
    ]
    for commit in commits:
        calls = [one["stage"] for one in commit.attempts if one["shard"] is not None]
        # What was finished before the flow died is not made again.
        parts = 0 if commit.step == 3 else 2
        assert calls.count("prompts") == parts
        assert (calls.count("advantage") > 1) == bool(parts)
        assert calls.count("update") == 1, "the plan"
    failed = [one for commit in commits for one in commit.attempts if one["error"]]
    assert [one["stage"] for one in failed] == ["advantage"]
    # What a failed attempt had of its worker is a cost of the step, and marked as lost.
    for commit in commits:
        lost = any(one["error"] for one in commit.attempts)
        assert (commit.metrics["cost/device_seconds/cpu/lost"] > 0) == lost
    assert resumed.files.store.read(f"{resumed.files.run}/rows.u64") == undisturbed.store.read(
        f"{undisturbed.run}/rows.u64"
    )
    assert audited(resumed)[-1]["recounted"]
    command = [sys.executable, "-m", "flows.replay", resumed.files.run, "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert (done.returncode, "Equal, to the bit." in done.stdout) == (0, True), done.stdout


def test_corrections_in_parts_give_the_weights_of_whole_steps(
    launch: Launch, tmp_path: Path
) -> None:
    """What they need of the whole batch is made in parts too, one of which dies with its worker."""
    words = ["tiny", "steps=3", "train.mini_batches=2"]
    words += ["algorithm.correction=[{kind: truncate, normalize: true}]"]
    whole = launch(*words, "store.uri=file://whole")
    code, out = whole.end()
    assert code == 0, out
    whole.store_uri = f"file://{tmp_path}/whole"
    dies = dataclasses.replace(
        WORKER_DIES, target="engines.data.data_engine:DataEngine.advantage_statistics"
    )
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [dies])
    run = launch(
        *words,
        module="small_parts",
        files={"small_parts.py": SMALL_PARTS},
        environment=faults.environment,
    )
    code, out = run.end()
    assert (code, faults.missed) == (0, []), out
    for one, other in zip(run.commits(), whole.commits(), strict=True):
        assert one.version_out.digest == other.version_out.digest
        corrected = [name for name in other.metrics if name.startswith("correction/")]
        assert corrected
        assert {name: one.metrics[name] for name in corrected} == {
            name: other.metrics[name] for name in corrected
        }
    assert audited(run)[-1]["recounted"]


def test_the_weights_are_those_of_few_shards_though_a_worker_dies(
    launch: Launch, prefect_api: str, tmp_path: Path
) -> None:
    few = launch(*STEP, "rollout.shards=2", "store.uri=file://few")
    code, out = few.end()
    assert code == 0, out
    few.store_uri = f"file://{tmp_path}/few"
    fault = Fault(
        id="dead",
        target="engines.rollout.hf_decoding:Decoding.step",
        action="kill",
        nth=30,
        only="rollout",
    )
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [fault])
    many = launch(*STEP, "name=many", f"rollout.shards={SHARDS}", environment=faults.environment)
    code, out = many.end()
    assert (code, faults.missed) == (0, []), out
    commits = many.commits()
    assert [commit.version_out.digest for commit in commits] == [
        commit.version_out.digest for commit in few.commits()
    ]
    for commit in commits:
        shards = [one["shard"] for one in commit.attempts if one["stage"] == "rollout"]
        assert set(shards) == set(range(1, SHARDS + 1)), "each shard has attempts of its own"
    repeated = Counter(
        (commit.step, one["shard"])
        for commit in commits
        for one in commit.attempts
        if one["stage"] == "rollout"
    )
    again = [place for place, count in repeated.items() if count > 1]
    assert 0 < len(again) <= 3, "only what the dead worker had in its three slots"
    assert audited(many)[-1]["recounted"]
    for step in flow_runs(prefect_api, "many-"):
        names = Counter(
            task["name"].partition(" ")[0]
            for task in httpx.post(
                f"{prefect_api}/task_runs/filter",
                json={"flow_runs": {"id": {"any_": [step["id"]]}}, "limit": 200},
            ).json()
        )
        assert names["rollout"] == names["reward"] == FEWEST


def test_groups_that_share_task_runs_are_cut_and_carried(launch: Launch) -> None:
    run = launch(
        "tiny",
        "steps=4",
        "prompts_per_step=32",
        "rollout.shards=32",
        "group_size=2",
        "max_staleness=2",
        "algorithm.correction=[{kind: truncate}]",
        "rollout.over_sampling=1.5",
        "rollout.partial_rollout=carry",
        "data.source.size=256",
    )
    code, out = run.end()
    assert code == 0, out
    commits = run.commits()
    assert [commit.ledger.trained for commit in commits] == [32, 64, 96, 128]
    assert [commit.ledger.in_flight for commit in commits] == [16, 16, 16, 0]
    for commit in commits:
        calls = [one for one in commit.attempts if one["stage"] == "reward"]
        assert len(calls) == FEWEST
    assert audited(run)[-1]["recounted"]
