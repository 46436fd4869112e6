"""What trains, as the settings say: a gang of ranks, or an aggregator and its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from engines.elastic.trainer import ElasticTrainer
from engines.train.trainer import Trainer
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.gang import Gang
from engines.workers.pool import EnginePool

if TYPE_CHECKING:
    from configs.grpo import GRPOConfig
    from engines.train.spec import TrainSpec
    from storage.runs.run_store import RunStore

Kind = Literal["engines.train.fsdp_engine:FSDPEngine", "engines.elastic.aggregator:Aggregator"]


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
    elastic = config.train.engine == "elastic" and spec.role == "actor"
    roles, deadline = config.cluster.roles, config.train_of(spec.role).deadline
    kind: Kind = "engines.train.fsdp_engine:FSDPEngine"
    if elastic:
        kind = "engines.elastic.aggregator:Aggregator"
    start_timeout = config.cluster.start_timeout
    gang = Gang(
        cluster,
        roles.pool_of("aggregator" if elastic else spec.role),
        name,
        EngineSpec.of(kind, spec),
        deadline,
        start_timeout=start_timeout,
        world=1 if elastic else None,
    )
    temperature, max_new_tokens = config.rollout.temperature, config.rollout.max_new_tokens
    if not elastic:
        return Trainer(
            gang,
            files,
            epoch=epoch,
            cancel=cancel,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            on_replay=on_replay,
            caller=caller,
        )
    workers = EnginePool(
        cluster,
        roles.actor,
        f"{name}-gradients",
        EngineSpec.of("engines.elastic.worker:GradientEngine", spec),
        deadline=deadline,
        start_timeout=start_timeout,
        cancel=cancel,
    )
    return ElasticTrainer(
        gang,
        files,
        workers,
        unit_tokens=config.train.unit_tokens,
        lease=config.train.unit_lease,
        epoch=epoch,
        cancel=cancel,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        on_replay=on_replay,
        caller=caller,
    )
