"""What trains, as the settings say: a gang of ranks, or an aggregator and its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from engines.elastic.contract import GradientAggregator, GradientWorker
from engines.elastic.trainer import ElasticTrainer
from engines.train.contract import TrainEngine
from engines.train.trainer import Trainer, TrainerSettings
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.gang import Gang
from engines.workers.pool import EnginePool

if TYPE_CHECKING:
    from configs.grpo import GRPOConfig
    from engines.train.spec import TrainSpec
    from storage.runs.run_store import RunStore


def trainer_on(
    cluster: Cluster,
    config: GRPOConfig,
    files: RunStore,
    spec: TrainSpec,
    name: str,
    *,
    epoch: int,
    caller: str,
    on_replay: Callable[[int, int], None],
    cancel: threading.Event | None = None,
) -> Trainer:
    """A trainer, or what is frozen, on the pools of a cluster; nothing is built yet.

    name: of its engines on the workers; the rest as of Trainer.
    """
    roles, deadline = config.cluster.roles, config.train_of(spec.role).deadline
    start_timeout = config.cluster.start_timeout
    settings = TrainerSettings(
        epoch=epoch,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        cancel=cancel,
        on_replay=on_replay,
        caller=caller,
    )
    if config.train.engine != "elastic" or spec.role != "actor":
        engine = EngineSpec.of("engines.train.fsdp_engine:FSDPEngine", spec, TrainEngine)
        pool = roles.pool_of(spec.role)
        gang = Gang(cluster, pool, name, engine, deadline, start_timeout=start_timeout)
        return Trainer(gang, files, settings)
    aggregator = EngineSpec.of("engines.elastic.aggregator:Aggregator", spec, GradientAggregator)
    worker = EngineSpec.of("engines.elastic.worker:GradientEngine", spec, GradientWorker)
    pool = roles.pool_of("aggregator")
    return ElasticTrainer(
        Gang(cluster, pool, name, aggregator, deadline, start_timeout=start_timeout, world=1),
        files,
        EnginePool(
            cluster,
            roles.actor,
            f"{name}-gradients",
            worker,
            deadline=deadline,
            start_timeout=start_timeout,
            cancel=cancel,
        ),
        settings,
        unit_tokens=config.train.unit_tokens,
        lease=config.train.unit_lease,
    )
