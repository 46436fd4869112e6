"""The samples of a step that failed, or is under way, are read by what it stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage.audit.samples import judged
from storage.audit.uncommitted import samples_under_way, stored_batch
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.run_store import RunStore


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    run = RunStore(Store(f"file://{tmp_path}"), "run-1")
    run.write_run({"config": {"rollout": {"over_sampling": 1.0}}})
    return run


def sample(run: RunStore, shard: int, stage: str = "rollout", key: str = "aa") -> BatchRef:
    """A shard of two samples, marked as finished."""
    place = run.stage_key(1, stage, shard, key)
    ids = [10 * shard, 10 * shard + 1]
    ref = write_batch(run.store, place, {
        "sample_id": np.array(ids), "group_id": np.array([shard, shard]), "status": np.array([0, 1]),
        "response_ids": [[1, 2], [3]], "finish_reason": ["stop", "length"],
    })  # fmt: skip
    run.finish(place, {"ref": ref.to_json()})
    return ref


def score(run: RunStore, number: int, rewards: list[float], key: str = "bb") -> None:
    status = np.array([0 if np.isfinite(one) else 2 for one in rewards])
    columns = {"reward": np.array(rewards, np.float32), "status": status}
    write_batch(run.store, run.stage_key(1, "reward", number, key), columns)


def test_nothing_was_sampled(run: RunStore) -> None:
    assert samples_under_way(run, 1) is None


def test_shards_are_in_the_order_of_their_numbers_and_none_is_scored(run: RunStore) -> None:
    for shard in (10, 2, 1):
        sample(run, shard)
    found = samples_under_way(run, 1)
    assert found is not None
    assert found.fetch_numpy(run.store, "sample_id")[0].tolist() == [10, 11, 20, 21, 100, 101]
    rewards, failed, groups = judged(run, found)
    assert np.isnan(rewards).all() and failed.all() and groups.tolist() == [1, 1, 2, 2, 10, 10]


def test_scores_go_to_their_samples(run: RunStore) -> None:
    sample(run, 2)
    sample(run, 1)
    score(run, 2, [0.5, float("nan")])
    score(run, 1, [1.0, 2.0])
    found = samples_under_way(run, 1)
    assert found is not None
    rewards, failed, _ = judged(run, found)
    assert rewards[:3].tolist() == [1.0, 2.0, 0.5] and failed.tolist() == [False] * 3 + [True]


def test_scores_of_which_it_is_not_known_whose_they_are_are_left_out(run: RunStore) -> None:
    sample(run, 1)
    sample(run, 2)
    score(run, 1, [1.0, 2.0])  # of the first shard alone: the step died while it scored
    found = samples_under_way(run, 1)
    assert found is not None and "reward" not in found.names
    score(run, 2, [1.0, 2.0])
    score(run, 2, [3.0, 4.0], key="cc")
    found = samples_under_way(run, 1)
    assert found is not None and "reward" not in found.names


def test_with_over_sampling_the_order_of_scores_is_not_known(run: RunStore) -> None:
    run.write_run({"config": {"rollout": {"over_sampling": 1.5}}})
    sample(run, 1)
    score(run, 1, [1.0, 2.0])
    found = samples_under_way(run, 1)
    assert found is not None and "reward" not in found.names


def test_whole_episodes_go_before_what_their_turns_left(run: RunStore) -> None:
    sample(run, 1, "rollout")
    whole = sample(run, 1, "episodes", "ee")
    found = samples_under_way(run, 1)
    assert found is not None and found.objects == whole.objects


def test_a_batch_by_its_object_is_the_batch_that_was_written(run: RunStore) -> None:
    ref = sample(run, 1)
    found = stored_batch(run.store, next(iter(ref.objects)))
    assert found.to_json() == ref.to_json()
    found.verify(run.store)
