"""The engines of a run: which roles it needs, on which pools, and how they are started."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from configs.cluster.cluster import Role
from configs.cluster.kinds import TemporaryTls
from configs.episodes import EpisodesConfig
from configs.grpo import GRPOConfig
from configs.tree import TreeConfig
from engines.clusters.opening import open_cluster
from engines.processes.certificates import Certificates
from engines.rollout.contract import engine_class, worker_environment
from engines.rollout.rollout_pool import RolloutPool
from engines.train.planner import PlannerSpec
from engines.train.trainer import Trainer
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.gang import Gang
from engines.workers.pool import EnginePool
from storage.runs import snapshots
from storage.runs.origins import parent_of
from storage.runs.run_store import RunStore
from tasks.results import Metrics
from tasks.run.engine_specs import (
    TrainRole,
    data_spec,
    environment_spec,
    reward_model_spec,
    rollout_spec,
    train_spec,
)
from tasks.run.forking import parent_config
from tasks.run.store_usage import StoreUsage
from tasks.run.teachers import Teacher, resolved, teachers_of

if TYPE_CHECKING:
    from tasks.reporting.run_view import RunView

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
    teachers: Mapping[str, Trainer]  # by name
    rollouts: RolloutPool
    opponents: RolloutPool | None
    scorers: EnginePool
    planners: EnginePool
    environments: EnginePool | None
    reward_models: EnginePool | None


class Engines:
    """Builds every role's engines in the background, and closes them with the cluster."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="engines")
        self._handles: Future[Handles] | None = None
        self._started: dict[str, Future[None]] = {}
        self._usage = StoreUsage()
        self.roles = ["reward", *run.config.engine_roles]
        self.roles += [] if run.config.episodes is None else ["environment"]
        self.roles += ["reward_model"] if run.config.rewards.on_engines else []

    def launch(self) -> None:
        """Begin to start workers and engines; returns at once.

        All roles start at once, but for those that share devices: they start in the order of `roles`.
        So do the opponent's engines, which may be beside others on their devices.
        """
        self._run.terminal.doing("starting workers")
        self._handles = self._threads.submit(self._open)
        cluster = self._run.config.cluster
        before: dict[str, Future[None]] = {}  # by pool, the start of the role before
        for role in self._run.config.engine_roles:
            pool = cluster.roles.pool_of(role)
            in_order = cluster.share_devices or role == "opponent"
            after = before.get(pool) if in_order else None
            before[pool] = self._started[role] = self._threads.submit(self._start, role, after)
        for role in self.roles:
            if role not in self._started:
                self._started[role] = self._threads.submit(self._start, role)

    def workers(self) -> dict[str, list[str]]:
        """Pool -> names of its live workers; waits for them."""
        cluster = self._made().cluster
        return {pool: sorted(cluster.workers(pool)) for pool in sorted(self._run.config.used_pools)}

    def drawn_tokens(self) -> dict[str, int]:
        """Rollout worker -> tokens drawn since its engine was built; empty while workers start."""
        handles = self._handles
        if handles is None or not handles.done() or handles.exception() is not None:
            return {}
        return handles.result().rollouts.tokens()

    def wait(self, role: str) -> None:
        """Return when the role's engines stand; a failed start is tried again."""
        started = self._started[role]
        if started.done() and started.exception() is not None:
            started = self._started[role] = self._threads.submit(self._start, role)
        started.result()

    def _made(self) -> Handles:
        assert self._handles is not None, "the engines were not launched"
        return self._handles.result()

    def _start(self, role: str, after: Future[None] | None = None) -> None:
        """Start a role's engines; `after`: another start that ends first, well or badly."""
        handles = self._made()
        if after is not None:
            after.exception()
        start: dict[str, Callable[[], object]] = {
            "reward": handles.scorers.start,
            "environment": lambda: self.environments.start(),
            "reward_model": lambda: self.reward_models.start(),
            "actor": lambda: self._start_trained("actor", handles.actor),
            "critic": lambda: self._start_trained("critic", self.critic),
            "rollout": handles.rollouts.start,
            "opponent": lambda: self.opponents.start(),
            "ref": lambda: self.ref.at(0),
            "teacher": self._start_teachers,
        }
        start[role]()
        waiting = [name for name, future in self._started.items() if not future.done()]
        self._run.terminal.doing(f"starting engines: {', '.join(sorted(waiting)) or 'ready'}")

    def _start_trained(self, role: TrainRole, trainer: Trainer) -> None:
        """Bring a trainer to the run's head; a fork between its parent's snapshots replays first.

        The parent's settings made those steps, so they repeat them. The state is kept as the
        fork's own snapshot, since its settings may be others.
        """
        run, origin = self._run, self._run.origin
        if origin is not None and not snapshots.has_base(replace(run.files, role=role), run.head):
            files = parent_of(run.files, origin)
            settings = parent_config(run.files, origin)
            settings = settings.model_copy(update={"cluster": run.config.cluster})
            parent = self._trainer(self._made().cluster, role, files, settings)
            parent.snapshot(origin.step, run.name, origin.at)
        trainer.at(run.head)

    def _start_teachers(self) -> None:
        for teacher in self.teachers.values():
            teacher.at(0)

    def _open(self) -> Handles:
        config = self._run.config
        pools = {
            name: pool for name, pool in config.cluster.pools.items() if name in config.used_pools
        }
        environment = {
            config.cluster.roles.pool_of(role): worker_environment(config.rollout)
            for role in config.engine_roles
            if role in ("rollout", "opponent")
        }
        for judge in config.rewards.judges:
            pool = config.cluster.roles.pool_of("reward_model")
            environment[pool] = environment.get(pool, {}) | worker_environment(judge.rollout)
        settings = config.cluster.model_copy(update={"pools": pools})
        cluster = open_cluster(
            settings, environment, cancel=self._run.cancelled, preload=ENGINE_MODULES
        )
        return Handles(
            cluster=cluster,
            actor=self._trainer(cluster, "actor", self._run.files, config),
            ref=(
                self._trainer(cluster, "ref", self._run.files, config)
                if config.has_reference_engine
                else None
            ),
            critic=(
                self._trainer(cluster, "critic", self._run.files, config)
                if config.has_critic
                else None
            ),
            teachers={
                name: self._trainer(
                    cluster,
                    "teacher",
                    self._run.files,
                    config,
                    resolved(self._run.store, config, name),
                )
                for name in teachers_of(config)
            },
            rollouts=self._rollouts(cluster, "rollout"),
            opponents=None if config.opponent is None else self._rollouts(cluster, "opponent"),
            scorers=self._scorers(cluster),
            planners=self._planners(cluster),
            environments=(
                None if config.episodes is None else self._environments(cluster, config.episodes)
            ),
            reward_models=self._reward_models(cluster) if config.rewards.on_engines else None,
        )

    def _trainer(
        self,
        cluster: Cluster,
        role: TrainRole,
        files: RunStore,
        config: GRPOConfig,
        teacher: Teacher | None = None,
    ) -> Trainer:
        """A trainer of a role for a run: this one, or its parent under the parent's settings.

        teacher: which one, of that role.
        """
        run = self._run
        spec = train_spec(config, files, role, run.store.cache_bytes, teacher)
        gang = Gang(
            cluster,
            config.cluster.roles.pool_of(role),
            role if teacher is None else f"{role}-{teacher.name}",
            EngineSpec.of("engines.train.fsdp_engine:FSDPEngine", spec),
            config.train_of(role).deadline,
            start_timeout=config.cluster.start_timeout,
        )
        return Trainer(
            gang,
            replace(files, role=role),
            epoch=run.epoch,
            cancel=run.cancelled,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            on_replay=run.progress.replaying,
            caller=run.name,
        )

    def _rollouts(self, cluster: Cluster, role: Literal["rollout", "opponent"]) -> RolloutPool:
        run, config = self._run, self._run.config
        spec = rollout_spec(config, run.store, role)
        return RolloutPool(
            cluster,
            config.cluster.roles.pool_of(role),
            EngineSpec.of(engine_class(config.rollout), spec),
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

    def _scorers(self, cluster: Cluster) -> EnginePool:
        config = self._run.config
        spec = data_spec(config, self._run.files)
        trees = "engines.trees.growing:TreeEngine"
        plain = "engines.data.data_engine:DataEngine"
        engine = EngineSpec.of(trees if isinstance(config, TreeConfig) else plain, spec)
        return self._pool(cluster, "reward", "reward", engine, config.scoring_deadline)

    def _planners(self, cluster: Cluster) -> EnginePool:
        run, config = self._run, self._run.config
        spec = PlannerSpec(store_uri=run.store.uri, store_options=config.store.options)
        engine = EngineSpec.of("engines.train.planner:Planner", spec)
        return self._pool(cluster, "reward", "planner", engine)

    def _environments(self, cluster: Cluster, episodes: EpisodesConfig) -> EnginePool:
        spec = environment_spec(self._run.config, episodes, self._run.store)
        engine = EngineSpec.of("engines.data.environment_engine:EnvironmentEngine", spec)
        return self._pool(cluster, "environment", "environment", engine)

    def _reward_models(self, cluster: Cluster) -> EnginePool:
        spec = reward_model_spec(self._run.config, self._run.files)
        judging = "engines.judges.local_judge:JudgingEngine"
        plain = "engines.data.reward_model_engine:RewardModelEngine"
        engine = EngineSpec.of(judging if spec.judges else plain, spec)
        deadline = self._run.config.model_scoring_deadline
        return self._pool(cluster, "reward_model", "reward_model", engine, deadline)

    def _pool(
        self,
        cluster: Cluster,
        role: Role,
        name: str,
        engine: EngineSpec,
        deadline: float | None = None,
    ) -> EnginePool:
        """Engines on every worker of a role's pool, any of which takes a call."""
        config = self._run.config
        return EnginePool(
            cluster,
            config.cluster.roles.pool_of(role),
            name,
            engine,
            deadline=config.rollout.deadline if deadline is None else deadline,
            start_timeout=config.cluster.start_timeout,
            cancel=self._run.cancelled,
        )

    def store_usage(self) -> Metrics:
        """Requests and bytes that the flow and the workers asked of the store since the last look."""
        return self._usage.since_last(self.cluster.usage)

    def turns(self) -> Metrics:
        """Seconds and bytes of the turns on shared devices since the last look, by role."""
        return self.cluster.devices.metrics()

    @property
    def cluster(self) -> Cluster:
        """The workers."""
        return self._made().cluster

    @property
    def scheduler(self) -> str:
        """Address of the Dask scheduler."""
        return self._made().cluster.scheduler

    @property
    def temporary_certificates(self) -> Certificates | None:
        """Files of the certificates that were made for this cluster alone, if any were."""
        cluster = self._made().cluster
        made = isinstance(cluster.config.encryption, TemporaryTls)
        return cluster.certificate_files if made else None

    @property
    def actor(self) -> Trainer:
        """The policy that is trained."""
        return self._made().actor

    @property
    def rollouts(self) -> RolloutPool:
        """The engines that sample."""
        return self._made().rollouts

    @property
    def opponents(self) -> RolloutPool:
        """The engines of the frozen version that plays against the policy."""
        found = self._made().opponents
        assert found is not None, "the recipe has no opponent"
        return found

    @property
    def scorers(self) -> EnginePool:
        """The workers that make prompts, rewards and advantages."""
        return self._made().scorers

    @property
    def environments(self) -> EnginePool:
        """The workers that have the environments of episodes."""
        found = self._made().environments
        assert found is not None, "the run plays no episodes"
        return found

    @property
    def reward_models(self) -> EnginePool:
        """The workers that hold the reward models."""
        found = self._made().reward_models
        assert found is not None, "the recipe has no reward model"
        return found

    @property
    def prompters(self) -> EnginePool:
        """The workers that make prompts of rows."""
        return self.scorers if self._run.config.episodes is None else self.environments

    @property
    def planners(self) -> EnginePool:
        """The same workers, as those that plan large updates; built when the first one comes."""
        return self._made().planners

    @property
    def ref(self) -> Trainer:
        """The frozen reference."""
        found = self._made().ref
        assert found is not None, "no engines hold a reference"
        return found

    @property
    def critic(self) -> Trainer:
        """The critic, which is trained beside the policy."""
        found = self._made().critic
        assert found is not None, "the algorithm trains no critic"
        return found

    @property
    def teachers(self) -> Mapping[str, Trainer]:
        """The teachers of a distillation by name, which are frozen."""
        return self._made().teachers

    @property
    def trained(self) -> list[Trainer]:
        """What has a state to store; the policy last."""
        return [self.critic, self.actor] if self._run.config.has_critic else [self.actor]

    def close(self) -> None:
        """End every engine and worker."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._handles is not None:
            # Not cancelled by now means opening or open: wait for it, so that nothing is left.
            with contextlib.suppress(Exception, CancelledError):
                self._handles.result().cluster.close()
