"""The trainer of train.engine = elastic: an aggregator and its workers."""

from __future__ import annotations

from engines.elastic.contract import GradientAggregator, GradientWorker
from engines.elastic.trainer import ElasticTrainer
from engines.train.opening import Opening
from engines.workers.engine import EngineSpec
from engines.workers.pool import EnginePool


def elastic_trainer(opening: Opening) -> ElasticTrainer:
    """On the pools of a cluster; nothing is built yet."""
    config, spec, roles = opening.config, opening.spec, opening.config.cluster.roles
    aggregator = EngineSpec.of("engines.elastic.aggregator:Aggregator", spec, GradientAggregator)
    worker = EngineSpec.of("engines.elastic.worker:GradientEngine", spec, GradientWorker)
    return ElasticTrainer(
        opening.gang(aggregator, roles.pool_of("aggregator"), world=1),
        opening.files,
        EnginePool(
            opening.cluster,
            roles.actor,
            f"{opening.name}-gradients",
            worker,
            deadline=config.train_of(spec.role).deadline,
            start_timeout=config.cluster.start_timeout,
            cancel=opening.settings.cancel,
        ),
        opening.settings,
        unit_tokens=config.train.unit_tokens,
        lease=config.train.unit_lease,
    )
