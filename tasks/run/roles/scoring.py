"""The engines that make prompts, rewards and advantages, and those that plan large updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.grpo import GRPOConfig
from engines.data.contract import Scorer
from engines.data.data_engine import DataSpec
from engines.train.batching.stored_plan import Planner
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.pool import EnginePool
from engines.workers.store_spec import StoreSpec
from storage.runs.run_store import RunStore
from tasks.run.roles.role import EngineRole, pool_of, start_pool
from tasks.run.roles.specs import common

if TYPE_CHECKING:
    from tasks.run.run_view import Caller


def data_spec(config: GRPOConfig, files: RunStore) -> DataSpec:
    """From what a run's data engines are built."""
    return DataSpec(
        data=config.data,
        rewards=config.rewards,
        run=files.run,
        scorers=config.cluster.pools[config.cluster.roles.reward].workers,
        max_new_tokens=config.rollout.max_new_tokens,
        group_size=config.group_size,
        **common(config, files.store),
    )


def scoring_engine(run: Caller) -> EngineSpec[Scorer]:
    """From what the data engines of the caller's settings are built."""
    spec = data_spec(run.config, run.files)
    return EngineSpec.of("engines.data.data_engine:DataEngine", spec, Scorer)


def _scorers(run: Caller, cluster: Cluster) -> EnginePool[Scorer]:
    engine, deadline = scoring_engine(run), run.config.scoring_deadline
    return pool_of(run, cluster, "reward", "reward", engine, deadline)


def _planners(run: Caller, cluster: Cluster) -> EnginePool[Planner]:
    spec = StoreSpec(store_uri=run.store.uri, store_options=run.config.store.options)
    engine = EngineSpec.of("engines.train.batching.stored_plan:StoredPlanner", spec, Planner)
    return pool_of(run, cluster, "reward", "planner", engine)


SCORER = EngineRole(name="reward", needed=lambda config: True, client=_scorers, start=start_pool)
# On the same workers, by an engine of its own: engines.data, where the scorers are, knows no plans.
PLANNER = EngineRole(name="planner", needed=lambda config: True, client=_planners)
