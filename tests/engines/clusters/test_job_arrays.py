"""When jobs are replaced, and which workers leave; the queue and the cluster are played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters import slurm as slurm_cluster
from engines.clusters.slurm import JobArrays
from engines.clusters.slurm_jobs import Task
from engines.failures import ClusterLost
from tests.engines.conftest import one_pool_roles


class PlayedCluster:
    """Live workers of a pool, by name."""

    def __init__(self) -> None:
        self.live: set[str] = set()

    def members(self, pool: str | None = None) -> dict[str, Any]:
        return {name: SimpleNamespace(name=name, address=name) for name in self.live}


class Queue:
    """Slurm's queue of pool `train`, and what was asked of Slurm."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: dict[int, float | None] = {}  # seconds of each job
        self.cancelled: list[str] = []
        monkeypatch.setattr(slurm_cluster, "slurm_says", self.says)
        monkeypatch.setattr(slurm_cluster, "listed", self.listed)

    def says(self, command: str, *words: str) -> str:
        if command == "scancel":
            self.cancelled.append(words[-1])
            return ""
        array = next(word for word in words if word.startswith("--array="))
        first, last = array.removeprefix("--array=").split("-")
        self.left |= dict.fromkeys(range(int(first), int(last) + 1), None)
        return ""

    def listed(self, names: list[str], ending: bool = False) -> list[Task]:
        return [
            Task(
                id=f"9_{number}",
                job_name=names[0],
                number=number,
                state="RUNNING",
                left=left,
                reason="",
            )
            for number, left in self.left.items()
        ]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """An empty queue."""
    monkeypatch.setattr(slurm_cluster, "IDLE", 0.0)
    monkeypatch.setattr(
        slurm_cluster, "status_of", lambda cluster, address: SimpleNamespace(running=())
    )
    return Queue(monkeypatch)


def arrays(folder: Path, workers: int, per_job: int) -> JobArrays:
    """The pool's first jobs, submitted."""
    config = ClusterConfig.model_validate(
        {
            "kind": "slurm",
            "host": "127.0.0.1",
            "slurm": {"handover": 60, "pools": {"train": {"workers_per_job": per_job}}},
            "pools": {"train": PoolConfig(workers=workers)},
            "roles": one_pool_roles("train"),
        }
    )
    made = JobArrays(config, "run", folder)
    made._submit("train", workers // per_job)
    return made


def train(*numbers: int) -> set[str]:
    """Names of workers."""
    return {f"train-{n}" for n in numbers}


def test_a_job_leaves_when_another_has_joined_as_a_whole(queue: Queue, tmp_path: Path) -> None:
    made, cluster = arrays(tmp_path, 4, 2), PlayedCluster()
    cluster.live = train(0, 1, 2, 3)
    made._tend(cluster)  # type: ignore[arg-type]
    assert made.leaving() == frozenset()
    assert list(queue.left) == [0, 1]

    queue.left |= {0: 50.0, 1: 40.0}
    made._tend(cluster)  # type: ignore[arg-type]
    assert list(queue.left) == [0, 1, 2, 3]
    assert made.leaving() == frozenset()

    cluster.live |= train(4)  # one of job 2
    made._tend(cluster)  # type: ignore[arg-type]
    assert made.leaving() == frozenset()
    assert queue.cancelled == []

    cluster.live |= train(5)
    made._tend(cluster)  # type: ignore[arg-type]
    assert made.leaving() == train(2, 3)  # of job 1, whose time is over first
    assert queue.cancelled == ["9_1"]

    del queue.left[1]
    cluster.live = train(0, 1, 4, 5, 6, 7)
    made._tend(cluster)  # type: ignore[arg-type]
    assert made.leaving() == train(0, 1)
    assert queue.cancelled == ["9_1", "9_0"]
    assert list(queue.left) == [0, 2, 3]


def test_a_replaced_job_stays_while_a_worker_of_it_is_busy(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, cluster = arrays(tmp_path, 2, 2), PlayedCluster()
    cluster.live = train(0, 1, 2, 3)
    queue.left = {0: 50.0, 1: None}
    busy = {"train-1"}
    monkeypatch.setattr(
        slurm_cluster,
        "status_of",
        lambda cluster, address: SimpleNamespace(running=("call",) if address in busy else ()),
    )
    made._tend(cluster)  # type: ignore[arg-type]
    assert made.leaving() == train(0, 1)
    assert queue.cancelled == []
    busy.clear()
    made._tend(cluster)  # type: ignore[arg-type]
    assert queue.cancelled == ["9_0"]


def test_jobs_that_never_join_as_a_whole_end_the_run(queue: Queue, tmp_path: Path) -> None:
    made, cluster = arrays(tmp_path, 2, 2), PlayedCluster()
    for _ in range(2):
        cluster.live = train(*range(0, 20, 2))  # every second worker joins, and its neighbour dies
        queue.left = {}
        made._tend(cluster)  # type: ignore[arg-type]
    queue.left = {}
    with pytest.raises(ClusterLost, match="3 Slurm jobs of pool 'train' ended before their work"):
        made._tend(cluster)  # type: ignore[arg-type]
