"""More shards than task runs: several share one, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import httpx
import pytest

from tasks.run.shard_driver import TASK_RUNS
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch
from tests.flows.test_epochs import audited
from tests.flows.test_grpo import flow_runs

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SHARDS = 40
STEP = ("tiny", "steps=2", f"prompts_per_step={SHARDS}", "group_size=2")


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
    for step in flow_runs(prefect_api, "many"):
        names = Counter(
            task["name"].partition(" ")[0]
            for task in httpx.post(
                f"{prefect_api}/task_runs/filter",
                json={"flow_runs": {"id": {"any_": [step["id"]]}}, "limit": 200},
            ).json()
        )
        assert names["rollout"] == names["reward"] == TASK_RUNS


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
        assert len(calls) == TASK_RUNS
    assert audited(run)[-1]["recounted"]
