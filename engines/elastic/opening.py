"""The trainer of train.engine = elastic: an aggregator and its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines.elastic.contract import GradientAggregator, GradientWorker
from engines.elastic.trainer import ElasticTrainer
from engines.train.trainer import TrainerSettings
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.gang import Gang
from engines.workers.pool import EnginePool

if TYPE_CHECKING:
    from configs.grpo import GRPOConfig
    from engines.train.spec import TrainSpec
    from storage.runs.run_store import RunStore


def elastic_trainer(
    cluster: Cluster,
    config: GRPOConfig,
    files: RunStore,
    spec: TrainSpec,
    name: str,
    settings: TrainerSettings,
) -> ElasticTrainer:
    """On the pools of a cluster; nothing is built yet. name: of its engines on the workers."""
    roles, deadline = config.cluster.roles, config.train_of(spec.role).deadline
    start_timeout = config.cluster.start_timeout
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
            cancel=settings.cancel,
        ),
        settings,
        unit_tokens=config.train.unit_tokens,
        lease=config.train.unit_lease,
    )
