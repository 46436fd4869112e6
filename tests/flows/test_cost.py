"""What the steps of a whole run cost: the parts add up, and nothing is counted twice."""

from __future__ import annotations

import argparse

import pytest

from configs.storage import StoreConfig
from storage.runs.commit_log import head, read_commit
from storage.runs.live import read_end
from storage.runs.run_store import RunStore
from storage.tracking.cost import HELD, SECONDS
from tasks.commands import inspect
from tasks.commands.command import Request

pytestmark = pytest.mark.cluster

POOLS = ("train", "rollout", "cpu")


@pytest.mark.slow
def test_the_parts_of_what_a_pool_held_add_up(undisturbed: RunStore) -> None:
    commits = [read_commit(undisturbed, step) for step in range(1, (head(undisturbed) or 0) + 1)]
    for before, commit in zip([None, *commits], commits, strict=False):
        metrics = {name: value or 0.0 for name, value in commit.metrics.items()}
        for pool in POOLS:
            start = f"{SECONDS}/{pool}/"
            parts = {
                name.removeprefix(start): value
                for name, value in metrics.items()
                if name.startswith(start)
            }
            held = parts.pop(HELD)
            assert sum(parts.values()) == pytest.approx(held)
            assert min(parts.values()) >= 0, (commit.step, pool, parts)
            assert parts["lost"] == 0
            if before is not None:  # one worker each, from commit to commit
                window = commit.committed_at - before.committed_at
                assert held == pytest.approx(window, abs=0.25)
                assert parts["starting"] == 0
        stages = {
            pool: sorted(
                {str(one["stage"]) for one in commit.attempts if pool in worker_seconds(one)}
            )
            for pool in POOLS
        }
        assert {"update", "weight_sync"} <= set(stages["train"])
        assert stages["rollout"] == ["rollout", "weight_sync"]
        assert stages["cpu"] == ["advantage", "prompts", "reward"]
        told = sum(worker_seconds(one).get("rollout", 0.0) for one in commit.attempts)
        kept = metrics[f"{SECONDS}/rollout/rollout"] + metrics[f"{SECONDS}/rollout/weight_sync"]
        assert told == pytest.approx(kept), "made again from the attempts of the commit"
        assert metrics["cost/cpu_seconds/train"] > 0
        assert metrics["cost/per_sample/device_seconds"] > 0
        assert not [name for name in metrics if "money" in name or "joules" in name]


def worker_seconds(attempt: dict[str, object]) -> dict[str, float]:
    """Pool -> seconds that an attempt had of its workers."""
    found = attempt["worker_seconds"]
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_what_followed_the_last_step_is_counted_too(undisturbed: RunStore) -> None:
    last, end = read_commit(undisturbed, 6), read_end(undisturbed)
    assert end is not None
    metrics = {name: value or 0.0 for name, value in end.cost.items()}
    assert metrics["cost/device_hours"] > 0
    so_far = last.metrics["cost/so_far/device_hours"] or 0.0
    assert metrics["cost/so_far/device_hours"] == pytest.approx(
        so_far + metrics["cost/device_hours"]
    )
    for pool in POOLS:
        assert metrics[f"{SECONDS}/{pool}/{HELD}"] == pytest.approx(
            metrics[f"{SECONDS}/{pool}/idle"], rel=0.5
        ), "nothing was left to do but to show it"
    asked = Request(
        files=undisturbed,
        store=StoreConfig(),
        cluster=(),
        arguments=argparse.Namespace(steps=1, size=True),
    )
    told = inspect.answer(asked).record["cost"]
    assert told["steps"]["device_hours"] == so_far
    assert told["after"]["device_hours"] == pytest.approx(metrics["cost/device_hours"])
    assert told["back_fills"] == {"device_hours": 0, "money": None}
