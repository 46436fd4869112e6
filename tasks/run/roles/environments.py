"""The engines that have the environments of episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.episodes import EpisodesConfig
from configs.grpo import GRPOConfig
from engines.data.contract import EnvironmentHost
from engines.data.environment_engine import EnvironmentSpec
from engines.train.batching.packing import WHOLE
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.pool import EnginePool
from storage.objects.store import Store
from tasks.run.roles.role import EngineRole, pool_of, start_pool
from tasks.run.roles.specs import common

if TYPE_CHECKING:
    from tasks.run.run_view import Caller


def environment_spec(config: GRPOConfig, episodes: EpisodesConfig, store: Store) -> EnvironmentSpec:
    """From what a run's environment engine is built."""
    return EnvironmentSpec(
        data=config.data,
        episodes=episodes,
        frames=config.keeps_frames,
        max_new_tokens=config.rollout.max_new_tokens,
        group_size=config.group_size,
        path_tokens=WHOLE * config.train.shared_micro_batch_tokens,
        **common(config, store),
    )


def environment_engine(run: Caller, episodes: EpisodesConfig) -> EngineSpec[EnvironmentHost]:
    """From what the environments of the caller's settings are built."""
    spec = environment_spec(run.config, episodes, run.store)
    return EngineSpec.of("engines.data.environment_engine:EnvironmentEngine", spec, EnvironmentHost)


def _environments(run: Caller, cluster: Cluster) -> EnginePool[EnvironmentHost]:
    assert run.config.episodes is not None, "who needs environments plays episodes"
    engine = environment_engine(run, run.config.episodes)
    config = run.config
    return pool_of(
        *(run, cluster, "environment", "environment", engine),
        deadline=config.environment_deadline,
        at_once=config.episodes_at_once if config.plays_apart else None,
    )


ENVIRONMENT = EngineRole(
    name="environment",
    needed=lambda config: config.episodes is not None,
    client=_environments,
    start=start_pool,
)
