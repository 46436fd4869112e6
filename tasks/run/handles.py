"""The clients of a run's engines, made of its settings; making them builds nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from configs.cluster.cluster import Role
from configs.distill import DistillConfig
from configs.episodes import EpisodesConfig
from configs.grpo import GRPOConfig
from configs.srpo import SRPOConfig
from configs.teachers import TeacherConfig, VllmTeaching
from configs.tree import TreeConfig
from engines.clusters.opening import open_cluster
from engines.data.contract import EnvironmentHost, RewardModels, Scorer
from engines.elastic.opening import trainer_on
from engines.encoders.contract import EpisodeEncoder, ProgressScorer
from engines.rollout.contract import Sampler, engine_class, worker_environment
from engines.rollout.rollout_pool import RolloutPool
from engines.teachers.client import TeacherClient
from engines.teachers.pool import TeacherPool
from engines.train.batching.planner import Planner
from engines.train.trainer import Trainer
from engines.trees.contract import TreeGrower
from engines.workers.cluster import Cluster
from engines.workers.engine import E, EngineSpec
from engines.workers.pool import EnginePool
from engines.workers.store_spec import StoreSpec
from storage.runs.run_store import RunStore
from tasks.reporting.run_log import WORKERS, folder_of
from tasks.run.decay import decay_steps
from tasks.run.engine_specs import (
    TrainRole,
    data_spec,
    encoder_spec,
    environment_spec,
    reward_model_spec,
    rollout_spec,
    store_spec,
    train_spec,
    tree_spec,
    vllm_teacher_spec,
)
from tasks.run.teachers import Teacher, address_of, resolved, teachers_of

if TYPE_CHECKING:
    from tasks.reporting.run_view import Caller, RunView

# What workers import before their first call, and vLLM's do not.
ENGINE_MODULES = (
    "engines.train.fsdp_engine",
    "engines.rollout.hf_engine",
    "engines.data.data_engine",
    "engines.data.training_batch",
    "tensordict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Handles:
    """Clients of the engines; making them builds nothing."""

    cluster: Cluster
    actor: Trainer
    ref: Trainer | None
    critic: Trainer | None
    teachers: Mapping[str, Trainer | TeacherPool]  # by name, on the run's own workers
    services: Mapping[str, TeacherClient]  # teachers by name that are elsewhere
    rollouts: RolloutPool
    opponents: RolloutPool | None
    evaluations: RolloutPool | None  # of a pool of their own
    scorers: EnginePool[Scorer]
    planners: EnginePool[Planner]
    environments: EnginePool[EnvironmentHost] | None
    reward_models: EnginePool[RewardModels] | None
    encoders: EnginePool[EpisodeEncoder] | None  # of what episodes see
    progress: EnginePool[ProgressScorer] | None
    trees: EnginePool[TreeGrower] | None


def open_engines(run: RunView, cluster: Cluster | None = None) -> Handles:
    """Open the cluster, unless one is given, and make the clients of all engines of the run."""
    config = run.config
    pools = {name: pool for name, pool in config.cluster.pools.items() if name in config.used_pools}
    if cluster is None:
        settings = config.cluster.model_copy(update={"pools": pools})
        environment = environments_of(config)
        cluster = open_cluster(
            settings,
            environment,
            cancel=run.cancelled,
            preload=ENGINE_MODULES,
            output=folder_of(run.name) / WORKERS,
        )
    return Handles(
        cluster=cluster,
        actor=trainer_of(run, cluster, "actor", run.files, config),
        ref=(
            trainer_of(run, cluster, "ref", run.files, config)
            if config.has_reference_engine
            else None
        ),
        critic=(
            trainer_of(run, cluster, "critic", run.files, config) if config.has_critic else None
        ),
        teachers={
            name: _teacher(run, cluster, name, teacher)
            for name, teacher in teachers_of(config).items()
            if teacher.service is None
        },
        services={
            name: _service(run, name, teacher)
            for name, teacher in teachers_of(config).items()
            if teacher.service is not None
        },
        rollouts=rollouts_of(run, cluster, "rollout"),
        opponents=None if config.opponent is None else rollouts_of(run, cluster, "opponent"),
        evaluations=rollouts_of(run, cluster, "evaluation") if config.evaluates_aside else None,
        scorers=_scorers(run, cluster),
        planners=_planners(run, cluster),
        environments=(
            None if config.episodes is None else _environments(run, cluster, config.episodes)
        ),
        reward_models=_reward_models(run, cluster) if config.rewards.on_engines else None,
        encoders=_encoders(run, cluster, config) if isinstance(config, SRPOConfig) else None,
        progress=_progress(run, cluster) if isinstance(config, SRPOConfig) else None,
        trees=_trees(run, cluster) if isinstance(config, TreeConfig) else None,
    )


def environments_of(config: GRPOConfig) -> dict[str, dict[str, str]]:
    """Pool -> environment variables of its workers, which will hold engines that sample."""
    found = {
        config.cluster.roles.pool_of(role): worker_environment(config.rollout)
        for role in config.sampling_roles
    }
    judges = list(config.rewards.judges)
    for suite in () if config.evaluation is None else config.evaluation.suites.values():
        judges += [] if suite.rewards is None else suite.rewards.judges
    for judge in judges:
        pool = config.cluster.roles.pool_of("reward_model")
        found[pool] = found.get(pool, {}) | worker_environment(judge.rollout)
    for teacher in teachers_of(config).values():
        if isinstance(teacher.engine, VllmTeaching):
            pool = config.cluster.roles.pool_of("teacher")
            own = worker_environment(teacher.engine.engine_of(config.rollout, 0))
            found[pool] = found.get(pool, {}) | own
    return found


def trainer_of(
    run: RunView,
    cluster: Cluster,
    role: TrainRole,
    files: RunStore,
    config: GRPOConfig,
    teacher: Teacher | None = None,
) -> Trainer:
    """A trainer of a role for a run: this one, or its parent under the parent's settings.

    teacher: which one, of that role.
    """
    ends = decay_steps(config, files)
    spec = train_spec(config, files, role, run.store.cache_bytes, teacher, ends)
    return trainer_on(
        cluster,
        config,
        replace(files, role=role),
        spec,
        role if teacher is None else f"{role}-{teacher.name}",
        epoch=run.epoch,
        cancel=run.cancelled,
        on_replay=run.progress.replaying,
        caller=run.name,
    )


def _teacher(
    run: RunView, cluster: Cluster, name: str, teacher: TeacherConfig
) -> Trainer | TeacherPool:
    """A teacher on the run's own workers."""
    config, found = run.config, resolved(run.store, run.config, name)
    if not isinstance(teacher.engine, VllmTeaching):
        return trainer_of(run, cluster, "teacher", run.files, config, found)
    assert isinstance(config, DistillConfig), "only a distillation has teachers"
    return TeacherPool(
        cluster,
        config.cluster.roles.pool_of("teacher"),
        vllm_teacher_spec(config, run.files, found, teacher.engine),
        epoch=run.epoch,
        deadline=config.rollout.deadline,
        start_timeout=config.cluster.start_timeout,
        cancel=run.cancelled,
    )


def _service(run: RunView, name: str, teacher: TeacherConfig) -> TeacherClient:
    config = run.config
    return TeacherClient(
        address_of(name, teacher),
        store=run.store,
        run=run.name,
        epoch=run.epoch,
        temperature=config.rollout.temperature,
        dtype=config.rollout.dtype,
        digest=teacher.digest,
        patience=teacher.patience,
        cancel=run.cancelled,
    )


def rollouts_of(
    run: Caller, cluster: Cluster, role: Literal["rollout", "opponent", "evaluation"]
) -> RolloutPool:
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
    )


def _scorers(run: RunView, cluster: Cluster) -> EnginePool[Scorer]:
    engine, deadline = scoring_engine(run), run.config.scoring_deadline
    return pool_of(run, cluster, "reward", "reward", engine, deadline)


def scoring_engine(run: Caller) -> EngineSpec[Scorer]:
    """From what the data engines of the caller's settings are built."""
    spec = data_spec(run.config, run.files)
    return EngineSpec.of("engines.data.data_engine:DataEngine", spec, Scorer)


def _planners(run: RunView, cluster: Cluster) -> EnginePool[Planner]:
    spec = StoreSpec(store_uri=run.store.uri, store_options=run.config.store.options)
    engine = EngineSpec.of("engines.train.batching.planner:StoredPlanner", spec, Planner)
    return pool_of(run, cluster, "reward", "planner", engine)


def _progress(run: RunView, cluster: Cluster) -> EnginePool[ProgressScorer]:
    spec = store_spec(run.config, run.store)
    engine = EngineSpec.of("engines.encoders.progress:ProgressEngine", spec, ProgressScorer)
    return pool_of(run, cluster, "reward", "progress", engine, run.config.scoring_deadline)


def _trees(run: RunView, cluster: Cluster) -> EnginePool[TreeGrower]:
    spec = tree_spec(run.config, run.store)
    engine = EngineSpec.of("engines.trees.growing:TreeEngine", spec, TreeGrower)
    return pool_of(run, cluster, "reward", "trees", engine, run.config.scoring_deadline)


def _environments(
    run: RunView, cluster: Cluster, episodes: EpisodesConfig
) -> EnginePool[EnvironmentHost]:
    engine = environment_engine(run, episodes)
    return pool_of(run, cluster, "environment", "environment", engine)


def environment_engine(run: Caller, episodes: EpisodesConfig) -> EngineSpec[EnvironmentHost]:
    """From what the environments of the caller's settings are built."""
    spec = environment_spec(run.config, episodes, run.store)
    return EngineSpec.of("engines.data.environment_engine:EnvironmentEngine", spec, EnvironmentHost)


def _reward_models(run: RunView, cluster: Cluster) -> EnginePool[RewardModels]:
    engine, deadline = reward_model_engine(run), run.config.model_scoring_deadline
    return pool_of(run, cluster, "reward_model", "reward_model", engine, deadline)


def reward_model_engine(run: Caller) -> EngineSpec[RewardModels]:
    """From what the reward models and judges of the caller's settings are built."""
    spec = reward_model_spec(run.config, run.files)
    judging = "engines.judges.local_judge:JudgingEngine"
    plain = "engines.data.reward_model_engine:RewardModelEngine"
    return EngineSpec.of(judging if spec.judges else plain, spec, RewardModels)


def _encoders(run: RunView, cluster: Cluster, config: SRPOConfig) -> EnginePool[EpisodeEncoder]:
    spec = encoder_spec(config, run.store)
    engine = EngineSpec.of("engines.encoders.embedding:EncoderEngine", spec, EpisodeEncoder)
    return pool_of(run, cluster, "encoder", "encoder", engine)


def pool_of(
    run: Caller,
    cluster: Cluster,
    role: Role,
    name: str,
    engine: EngineSpec[E],
    deadline: float | None = None,
) -> EnginePool[E]:
    """Engines on every worker of a role's pool, any of which takes a call; `name`: theirs there."""
    config = run.config
    return EnginePool(
        cluster,
        config.cluster.roles.pool_of(role),
        name,
        engine,
        deadline=config.rollout.deadline if deadline is None else deadline,
        start_timeout=config.cluster.start_timeout,
        cancel=run.cancelled,
    )
