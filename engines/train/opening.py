"""What trains, as the settings say: a gang of ranks, or what another engine has in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from engines.train.contract import TrainEngine
from engines.train.trainer import Trainer, TrainerSettings
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.gang import E, Gang

if TYPE_CHECKING:
    from configs.cluster import Role
    from configs.grpo import GRPOConfig
    from engines.train.contract import TrainSpec
    from storage.runs.run_store import RunStore

T = TypeVar("T", bound=Trainer)

# Other values of train.engine, and where their `Opener` for the actor is.
OPENERS: Mapping[str, str] = {
    "elastic": "engines.elastic.trainer:elastic_trainer",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What a trainer is opened with."""

    cluster: Cluster
    config: GRPOConfig
    files: RunStore
    spec: TrainSpec
    name: str  # of its engines on the workers
    settings: TrainerSettings

    def gang(
        self, engine: EngineSpec[E], pool: str | None = None, world: int | None = None
    ) -> Gang[E]:
        """Workers of a pool as one gang; pool: None: of the role. world: None: all of them."""
        role, config = self.spec.role, self.config
        return Gang(
            self.cluster,
            config.cluster.roles.pool_of(role) if pool is None else pool,
            self.name,
            engine,
            config.train_of(role).deadline,
            start_timeout=config.cluster.start_timeout,
            world=world,
        )


Opener: TypeAlias = Callable[[Opening], T]  # builds nothing yet


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
    on_rounding: Callable[[int, int], None] | None = None,
) -> T:
    """A trainer, or what is frozen, on the pools of a cluster; nothing is built yet.

    name: of its engines on the workers; opener: see `opener_of`; the rest as of Trainer.
    """
    settings = TrainerSettings(
        epoch=epoch,
        temperature=config.rollout.temperature,
        max_new_tokens=config.longest_response,
        cancel=cancel,
        on_replay=on_replay,
        on_rounding=on_rounding,
        caller=caller,
    )
    return opener(
        Opening(
            cluster=cluster, config=config, files=files, spec=spec, name=name, settings=settings
        )
    )


def opener_of(config: GRPOConfig, role: Role) -> Opener[Trainer]:
    """What makes the trainer of a policy, or of what is frozen."""
    path = OPENERS.get(config.train.engine)
    if path is None or role != "actor":
        return ranked_trainer
    module, _, function = path.partition(":")
    opener: Opener[Trainer] = getattr(import_module(module), function)
    return opener


def ranked_trainer(opening: Opening) -> Trainer:
    """Ranks that hold the model together."""
    spec = opening.spec
    engine = EngineSpec.of("engines.train.fsdp_engine:FSDPEngine", spec, TrainEngine)
    return Trainer(opening.gang(engine), opening.files, opening.settings)
