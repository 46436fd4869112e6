"""The engines of reward models, and of judges that the run starts itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from configs.grpo import GRPOConfig
from engines.reward_models.contract import RewardModels, RewardModelSpec
from engines.rollout.contract import worker_environment
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.pool import EnginePool
from storage.runs.run_store import RunStore
from tasks.run.contract import EngineRole, PoolVariables, pool_of, start_pool
from tasks.run.roles import common

if TYPE_CHECKING:
    from tasks.run.contract import Caller


def reward_model_spec(config: GRPOConfig, files: RunStore) -> RewardModelSpec:
    """From what a run's reward models and judges are built."""
    return RewardModelSpec(
        data=config.data,
        reward_models=config.rewards.models,
        judges=config.rewards.judges,
        run=files.run,
        max_new_tokens=config.rollout.max_new_tokens,
        **common(config, files.store),
    )


def reward_model_engine(run: Caller) -> EngineSpec[RewardModels]:
    """From what the reward models and judges of the caller's settings are built."""
    spec = reward_model_spec(run.config, run.files)
    judging = "engines.reward_models.local_judge:JudgingEngine"
    plain = "engines.reward_models.engine:RewardModelEngine"
    return EngineSpec.of(judging if spec.judges else plain, spec, RewardModels)


def _pool(run: Caller, cluster: Cluster, name: str) -> EnginePool[RewardModels]:
    engine, deadline = reward_model_engine(run), run.config.model_scoring_deadline
    return pool_of(run, cluster, "reward_model", name, engine, deadline)


def of_suite(caller: Caller, cluster: Cluster, name: str) -> Mapping[EngineRole[Any], object]:
    """The engines of a suite with rewards of its own, if some of these are models."""
    if not caller.config.rewards.on_engines:
        return {}
    return {REWARD_MODEL: _pool(caller, cluster, f"{name}-models")}


def _variables(config: GRPOConfig) -> PoolVariables:
    """Of judges, those of suites too."""
    judges = [judge for rewards in config.all_rewards for judge in rewards.judges]
    variables: dict[str, str] = {}
    for judge in judges:
        variables |= worker_environment(judge.rollout)
    return {config.cluster.roles.pool_of("reward_model"): variables} if judges else {}


REWARD_MODEL: EngineRole[EnginePool[RewardModels]] = EngineRole(
    name="reward_model",
    needed=lambda config: bool(config.rewards.on_engines),
    client=lambda run, cluster: _pool(run, cluster, "reward_model"),
    start=start_pool,
    variables=_variables,
)
