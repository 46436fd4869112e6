"""What trains, as the settings say: a gang of ranks, or what another engine has in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeVar

from engines.train.contract import TrainEngine
from engines.train.trainer import Trainer, TrainerSettings
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.gang import E, Gang

if TYPE_CHECKING:
    from configs.cluster.cluster import Role
    from configs.grpo import GRPOConfig
    from engines.train.spec import TrainSpec
    from storage.runs.run_store import RunStore

T = TypeVar("T", bound=Trainer, covariant=True)

# Other values of train.engine, and where their `Opener` for the actor is.
OPENERS: Mapping[str, str] = {
    "elastic": "engines.elastic.opening:elastic_trainer",
}


class Opener(Protocol[T]):
    """What makes a trainer; nothing is built yet."""

    def __call__(
        self,
        cluster: Cluster,
        config: GRPOConfig,
        files: RunStore,
        spec: TrainSpec,
        name: str,
        settings: TrainerSettings,
    ) -> T:
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
    opener: Opener[T],
    cancel: threading.Event | None = None,
) -> T:
    """A trainer, or what is frozen, on the pools of a cluster; nothing is built yet.

    name: of its engines on the workers; opener: see `opener_of`; the rest as of Trainer.
    """
    settings = TrainerSettings(
        epoch=epoch,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        cancel=cancel,
        on_replay=on_replay,
        caller=caller,
    )
    return opener(cluster, config, files, spec, name, settings)


def opener_of(config: GRPOConfig, role: Role) -> Opener[Trainer]:
    """What makes the trainer of a policy, or of what is frozen."""
    path = OPENERS.get(config.train.engine)
    if path is None or role != "actor":
        return ranked_trainer
    module, _, function = path.partition(":")
    opener: Opener[Trainer] = getattr(import_module(module), function)
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
    return Trainer(gang_of(cluster, config, spec, name, engine), files, settings)


def gang_of(
    cluster: Cluster, config: GRPOConfig, spec: TrainSpec, name: str, engine: EngineSpec[E]
) -> Gang[E]:
    """All workers of a role's pool, as one gang."""
    pool, deadline = config.cluster.roles.pool_of(spec.role), config.train_of(spec.role).deadline
    return Gang(cluster, pool, name, engine, deadline, start_timeout=config.cluster.start_timeout)
