"""Rewards for progress as columns: what is failed, what a sample says of its reward, shards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.srpo import ProgressConfig
from engines.encoders.progress import MEASURED, measure
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

OK, CUT, FAILED = SampleStatus.OK, SampleStatus.TRUNCATED, SampleStatus.FAILED
NAN = float("nan")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


def prompts(store: Store, *tasks: Any) -> BatchRef:
    rows = [{"question": "?", "task": task} for task in tasks]
    columns: dict[str, object] = {"group_id": np.arange(len(tasks)), "row": rows}
    return write_batch(store, "prompts.safetensors", columns)


def samples(store: Store, **changed: Any) -> BatchRef:
    """Six samples of two prompts; the fifth has no embedding, the sixth had failed."""
    columns: dict[str, Any] = {
        "sample_id": np.array([10, 11, 12, 13, 14, 15]),
        "group_id": np.array([0, 0, 0, 1, 1, 1]),
        "status": np.array([OK, OK, CUT, OK, OK, FAILED], np.int64),
        "reward": np.array([1.0, 0.0, 0.0, 0.0, 1.0, NAN], np.float32),
        "embedding": np.array([[0.0], [1.0], [2.0], [4.0], [NAN], [NAN]], np.float32),
        "encoder": ["sha256:e"] * 6,
        "embedding_error": ["", "", "", "", "it broke", "the episode had failed"],
        **changed,
    }
    return write_batch(store, "samples.safetensors", columns)


def test_rewards_and_what_they_were_measured_by(store: Store) -> None:
    found = measure(
        store, prompts(store, "a", "a"), samples(store), ProgressConfig(), "out.safetensors"
    )
    rewards = found.ref.fetch_numpy(store, "reward")[0]
    share = [0.0, 1 / 3, 1.0]
    wanted = [0.6 / (1 + math.exp(-10 * (0.5 - one))) for one in share]
    assert rewards[:4].tolist() == pytest.approx([1.0, *wanted])
    assert np.isnan(rewards[4:]).all(), "a success without an embedding has no reward either"
    assert found.ref.fetch_numpy(store, "status")[0].tolist() == [OK, OK, CUT, OK, FAILED, FAILED]
    assert [(one.sample, one.function, one.error) for one in found.failures] == [
        (14, "progress", "it broke")
    ]
    said = found.ref.fetch_list(store, MEASURED)
    assert said[0] == {"task": "", "encoder": "sha256:e"}
    assert said[2] == {"task": "", "encoder": "sha256:e", "cluster": 0, "distance": 2.0}
    assert said[4] is None and said[5] is None
    assert found.clusters is not None
    assert found.clusters.fetch_list(store, "task") == [""]
    assert [one.tolist() for one in found.clusters.fetch_list(store, "members")] == [[10]]
    assert found.clusters.fetch_numpy(store, "centre")[0].tolist() == [[0.0]]
    assert found.clusters.fetch_list(store, "encoder") == ["sha256:e"]
    assert found.metrics["progress/success_rate"] == 0.25
    assert found.metrics["progress/distance_mean"] == pytest.approx(7 / 3)


def test_episodes_are_compared_by_task_whatever_their_prompts(store: Store) -> None:
    settings = ProgressConfig(task_column="task")
    alike = measure(store, prompts(store, 7, 7), samples(store), settings, "1.safetensors")
    apart = measure(store, prompts(store, "b", "a"), samples(store), settings, "2.safetensors")
    assert alike.ref.fetch_numpy(store, "reward")[0][3] == pytest.approx(0.004015710554570913)
    assert apart.ref.fetch_numpy(store, "reward")[0][3] == 0.0, "no success of its task"
    assert apart.ref.fetch_list(store, MEASURED)[3] == {"task": "a", "encoder": "sha256:e"}
    with pytest.raises(ValueError, match="progress.task_column = task names .* has None there"):
        measure(store, prompts(store, None, "a"), samples(store), settings, "3.safetensors")


def test_the_order_of_the_rows_does_not_count_to_the_bit(store: Store) -> None:
    random = np.random.RandomState(0)
    count = 60
    columns: dict[str, Any] = {
        "sample_id": np.arange(count),
        "group_id": np.arange(count) // 10,
        "status": np.zeros(count, np.int64),
        "reward": (random.rand(count) < 0.5).astype(np.float32),
        "embedding": random.randn(count, 5).astype(np.float32),
        "encoder": ["e"] * count,
        "embedding_error": [""] * count,
    }
    whole = write_batch(store, "whole.safetensors", columns)
    tasks = prompts(store, *"abcabc")
    settings = ProgressConfig(task_column="task")
    first = measure(store, tasks, whole, settings, "first.safetensors")
    order = random.permutation(count)
    other = measure(store, tasks, whole.take(order), settings, "other.safetensors")
    for name in ("reward", "status"):
        one, two = (made.ref.fetch_numpy(store, name)[0] for made in (first, other))
        assert one[order].tobytes() == two.tobytes()
    assert first.clusters is not None and other.clusters is not None
    assert (
        first.clusters.fetch_numpy(store, "centre")[0].tobytes()
        == other.clusters.fetch_numpy(store, "centre")[0].tobytes()
    )


def test_no_success_and_other_bounds(store: Store) -> None:
    lost = samples(store, reward=np.array([0.5, 0.0, 0.0, 0.0, 0.0, NAN], np.float32))
    none = measure(store, prompts(store, "a", "a"), lost, ProgressConfig(), "1.safetensors")
    assert none.ref.fetch_numpy(store, "reward")[0][:4].tolist() == [0.0] * 4
    assert none.clusters is None and none.metrics["progress/success_rate"] == 0.0
    lower = ProgressConfig(success=0.5)
    found = measure(store, prompts(store, "a", "a"), lost, lower, "2.safetensors")
    assert found.ref.fetch_numpy(store, "reward")[0][0] == 1.0


def test_encoders_that_differ_are_no_data(store: Store) -> None:
    mixed = samples(store, encoder=["sha256:e", "sha256:f", *["sha256:e"] * 4])
    with pytest.raises(RuntimeError, match=r"embedded by encoders that differ"):
        measure(store, prompts(store, "a", "a"), mixed, ProgressConfig(), "1.safetensors")
