"""What the steps of a whole run cost: the parts add up, and nothing is counted twice."""

from __future__ import annotations

import pytest

from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore
from storage.tracking.cost import HELD, SECONDS

pytestmark = pytest.mark.cluster

POOLS = ("train", "rollout", "cpu")


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
