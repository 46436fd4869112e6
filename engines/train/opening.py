"""What trains, as the settings say: a gang of ranks, or what another engine has in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from engines.train.contract import TrainEngine
from engines.train.trainer import Trainer, TrainerSettings
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.gang import Gang

if TYPE_CHECKING:
    from configs.grpo import GRPOConfig
    from engines.train.spec import TrainSpec
    from storage.runs.run_store import RunStore

# Other values of train.engine, and where their `Opener` for the actor is.
OPENERS: Mapping[str, str] = {
    "elastic": "engines.elastic.opening:elastic_trainer",
}


class Opener(Protocol):
    """What makes a trainer; nothing is built yet."""

    def __call__(
        self,
        cluster: Cluster,
        config: GRPOConfig,
        files: RunStore,
        spec: TrainSpec,
        name: str,
        settings: TrainerSettings,
    ) -> Trainer:
        """On the pools of a cluster; name: of its engines on the workers."""


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
    settings = TrainerSettings(
        epoch=epoch,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        cancel=cancel,
        on_replay=on_replay,
        caller=caller,
    )
    return _opener(config, spec)(cluster, config, files, spec, name, settings)


def _opener(config: GRPOConfig, spec: TrainSpec) -> Opener:
    path = OPENERS.get(config.train.engine)
    if path is None or spec.role != "actor":
        return ranked_trainer
    module, _, function = path.partition(":")
    opener: Opener = getattr(import_module(module), function)
    return opener


def ranked_trainer(
    cluster: Cluster,
    config: GRPOConfig,
    files: RunStore,
    spec: TrainSpec,
    name: str,
    settings: TrainerSettings,
) -> Trainer:
    """Ranks that hold the model together."""
    engine = EngineSpec.of("engines.train.fsdp_engine:FSDPEngine", spec, TrainEngine)
    pool, deadline = config.cluster.roles.pool_of(spec.role), config.train_of(spec.role).deadline
    gang = Gang(cluster, pool, name, engine, deadline, start_timeout=config.cluster.start_timeout)
    return Trainer(gang, files, settings)
