"""The trainer with real workers: they die, hang, join and leave in the middle of a step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.cluster import ClusterConfig, PoolConfig, RolesConfig
from engines.clusters.opening import open_cluster
from engines.elastic.contract import GradientAggregator, GradientWorker
from engines.elastic.trainer import ElasticTrainer
from engines.failures import GangLost
from engines.train.contract import LogprobRequest, TrainEngine
from engines.train.trainer import TrainerSettings
from engines.workers.calls import status_of
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.gang import Gang
from engines.workers.pool import EnginePool
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.gradients import remove_gradients
from storage.runs.run_store import RunStore
from tests.engines.elastic.conftest import PLAIN, SETTINGS, Elastic
from tests.engines.train.train_ranks import (
    MAX_NEW_TOKENS,
    TEMPERATURE,
    samples,
    spec,
    stored,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 2
SEED = 11


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = ClusterConfig(
        pools={"sum": PoolConfig(), "train": PoolConfig(workers=3)},
        roles=RolesConfig(
            actor="train", aggregator="sum", ref="train", rollout="train", reward="sum"
        ),
        no_workers_timeout=60.0,
    )
    modules = ("engines.elastic.worker", "engines.elastic.aggregator")
    with open_cluster(config, preload=modules) as opened:
        yield opened


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights when one worker in this process has done it all."""
    folder = tmp_path_factory.mktemp("undisturbed")
    one = Elastic(spec(folder, **SETTINGS), 1)
    for step in range(1, STEPS + 1):
        one.update(stored(folder, samples(SEED, groups=8)), step)
    found = one.aggregator.digest("float32")
    one.close()
    return found


def trainer(cluster: Cluster, folder: Path, lease: float = 60.0, epoch: int = 1) -> ElasticTrainer:
    given = spec(folder, **SETTINGS)
    files = RunStore(Store(str(folder / "store")), "run")
    files.write_run({"config": {}})
    aggregator = EngineSpec.of("engines.elastic.aggregator:Aggregator", given, GradientAggregator)
    worker = EngineSpec.of("engines.elastic.worker:GradientEngine", given, GradientWorker)
    limits = {"deadline": 120.0, "start_timeout": 120.0}
    name = folder.name
    return ElasticTrainer(
        Gang(cluster, "sum", name, aggregator, 120.0, start_timeout=120.0, world=1),
        files,
        EnginePool(cluster, "train", f"{name}-gradients", worker, **limits),
        TrainerSettings(
            epoch=epoch,
            temperature=TEMPERATURE,
            max_new_tokens=MAX_NEW_TOKENS,
            caller=f"{name}-{epoch}",
        ),
        unit_tokens=64,
        lease=lease,
    )


def pid(cluster: Cluster, name: str) -> int:
    (pool,) = [pool for pool in ("train", "sum") if name.startswith(pool)]
    return status_of(cluster, cluster.wait(pool)[name]).pid


def marked(folder: Path) -> int:
    return len(list((folder / "store/run").glob("gradients/*/*/0*.json")))


def when_marked(folder: Path, count: int, then: threading.Event) -> threading.Thread:
    """Sets an event once so many units of the step are in the store."""

    def look() -> None:
        end = time.monotonic() + 120
        while marked(folder) < count and time.monotonic() < end:
            time.sleep(0.001)
        then.set()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


def finish(one: ElasticTrainer, batch: BatchRef, undisturbed: str) -> None:
    one.update(STEPS, batch, PLAIN)
    assert one.digest(STEPS, "float32") == undisturbed


def test_workers_and_aggregator_die_in_mid_step(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    batch, one = stored(tmp_path, samples(SEED, groups=8)), trainer(cluster, tmp_path)
    cluster.wait("train", 3)
    victim, there = pid(cluster, "train-1"), threading.Event()
    when_marked(tmp_path, 1, there)
    striker = threading.Thread(target=lambda: (there.wait(120), os.kill(victim, signal.SIGKILL)))
    striker.start()
    result = one.update(1, batch, PLAIN)
    striker.join()
    assert result.metrics["elastic/units"] >= 4
    os.kill(pid(cluster, "sum-0"), signal.SIGKILL)
    with pytest.raises(GangLost):
        while True:  # the scheduler may not have heard yet; once it has, the trainer forms it anew
            one._gang.call(TrainEngine.digest, dtype="float32")
    finish(one, batch, undisturbed)  # step 1 is made again on the way: its gradients are there


def test_a_hanging_workers_unit_is_taken_over(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    batch, one = stored(tmp_path, samples(SEED, groups=8)), trainer(cluster, tmp_path, lease=1.0)
    cluster.wait("train", 3)
    one.update(1, batch, PLAIN)
    remove_gradients(RunStore(Store(str(tmp_path / "store")), "run"), 1)
    stopped = pid(cluster, "train-0")
    os.kill(stopped, signal.SIGSTOP)
    try:
        result = one.update(2, batch, PLAIN)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert result.metrics["elastic/taken_over"] >= 1
    assert one.digest(2, "float32") == undisturbed


def test_what_a_flow_that_died_has_left_is_not_computed_again(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    batch, one = stored(tmp_path, samples(SEED, groups=8)), trainer(cluster, tmp_path)
    one.update(1, batch, PLAIN)
    again = trainer(cluster, tmp_path, epoch=2)
    result = again.update(1, batch, PLAIN)
    assert result.metrics["elastic/computed"] == 0
    assert result.metrics["elastic/units"] == marked(tmp_path)
    finish(again, batch, undisturbed)


def test_parts_of_log_probs_are_put_together_in_the_order_of_the_rows(
    cluster: Cluster, tmp_path: Path
) -> None:
    batch, one = stored(tmp_path, samples(SEED, groups=8)), trainer(cluster, tmp_path)
    found = one.logprobs(0, batch, "old_logprobs", "run/far.safetensors")
    assert len(found.objects) > 2
    alone = Elastic(spec(tmp_path, **SETTINGS), 0)
    own = alone.aggregator.logprobs(
        LogprobRequest(
            batch=batch,
            column="old_logprobs",
            out_key="run/own.safetensors",
            temperature=TEMPERATURE,
        )
    )
    alone.close()
    store = Store(str(tmp_path / "store"))
    far, near = (ref.fetch(store, ["old_logprobs"])["old_logprobs"] for ref in (found, own.batch))
    assert far.offsets().tolist() == near.offsets().tolist()
    assert (far.values() - near.values()).abs().max() < 1e-5
