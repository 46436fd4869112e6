"""The engines that sample: the policy's, a frozen opponent's, and those of evaluations alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from configs.grpo import GRPOConfig
from engines.rollout.contract import RolloutSpec, Sampler, engine_class, worker_environment
from engines.rollout.rollout_pool import RolloutPool
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from storage.objects.store import Store
from tasks.run.roles.role import EngineRole, PoolVariables, start_pool
from tasks.run.roles.specs import MODELS

if TYPE_CHECKING:
    from tasks.run.run_view import Caller

SamplingRole = Literal["rollout", "opponent", "evaluation"]


def rollout_spec(config: GRPOConfig, store: Store, name: str = "rollout") -> RolloutSpec:
    """From what a run's rollout engines are built, and the opponent's, which have another name."""
    lora = config.lora
    return RolloutSpec(
        name=name,
        model=config.model,
        model_cache=str(MODELS.absolute()),
        rollout=config.rollout,
        store_uri=store.uri,
        store_options=config.store.options,
        node_cache_bytes=config.store.node_cache_bytes,
        routed_experts=config.train.router_replay,
        measured=config.tracking.metrics_every > 0 or config.plays_apart,
        lora=lora if lora is not None and lora.serving == "adapter" else None,
        sleeps=config.cluster.share_devices,
        max_model_len=config.longest_sequence,
    )


def rollouts_of(run: Caller, cluster: Cluster, role: SamplingRole) -> RolloutPool:
    """The engines of a role that samples, under the settings of the caller."""
    config = run.config
    spec = rollout_spec(config, run.store, role)
    return RolloutPool(
        cluster,
        config.cluster.roles.pool_of(role),
        EngineSpec.of(engine_class(config.rollout), spec, Sampler),
        run=run.name,
        epoch=run.epoch,
        deadline=config.rollout.deadline,
        start_timeout=config.cluster.start_timeout,
        tolerance=config.rollout.probe_tolerance,
        mode=config.rollout.kv_on_update if config.max_staleness else "idle",
        sleep_level=config.rollout.sleep_level,
        cancel=run.cancelled,
        role=role,
        at_once=config.rollout.max_sequences if config.plays_apart else None,
    )


def _role(name: SamplingRole) -> EngineRole[RolloutPool]:
    def needed(config: GRPOConfig) -> bool:
        return name in config.sampling_roles

    def variables(config: GRPOConfig) -> PoolVariables:
        if not needed(config):
            return {}
        return {config.cluster.roles.pool_of(name): worker_environment(config.rollout)}

    return EngineRole(
        name=name,
        needed=needed,
        client=lambda run, cluster: rollouts_of(run, cluster, name),
        start=start_pool,
        variables=variables,
    )


ROLLOUT, OPPONENT, EVALUATION = _role("rollout"), _role("opponent"), _role("evaluation")
