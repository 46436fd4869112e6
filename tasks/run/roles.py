"""The roles of engines that any run may have, each a record (EngineRole) with what builds it.

ROLES is the table of them; those of a feature stand in its room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from configs.episodes import EpisodesConfig
from configs.grpo import GRPOConfig
from configs.model import Model
from configs.rollout import RolloutConfig
from engines.data.contract import DataSpec, PromptMaker, Scorer
from engines.rollout.contract import (
    NO_GRAMMAR_WITHOUT_MASK,
    RolloutSpec,
    Sampler,
    engine_class,
    worker_environment,
)
from engines.rollout.rollout_pool import RolloutPool
from engines.train.batching.packing import WHOLE
from engines.train.batching.stored_plan import Planner
from engines.train.contract import TrainSpec
from engines.train.trainer import Opener, Trainer, opener_of, trainer_on
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec, StoreSpec
from engines.workers.pool import EnginePool
from storage.objects.store import Store
from storage.runs import snapshots
from storage.runs.adapters import trained_base
from storage.runs.run_store import RunStore, parent_of
from storage.runs.weights import WeightsRef
from tasks.run.contract import (
    ByRole,
    EngineRole,
    PoolVariables,
    StartingEngines,
    pool_of,
    start_pool,
)
from tasks.run.events import RebuiltOtherwise, UpdateReplayed
from tasks.run.features import features_of
from tasks.run.run_record import decay_steps, lone_rank_plans, parent_config, version_names

if TYPE_CHECKING:
    from engines.episodes.contract import EnvironmentHost, EnvironmentSpec
    from tasks.run.contract import Caller, RunView


MODELS = Path(".refrain/models")


def store_spec(config: GRPOConfig, store: Store) -> StoreSpec:
    """From what an engine is built that reads and writes batches alone."""
    return StoreSpec(
        store_uri=store.uri, store_options=config.store.options, cache_bytes=store.cache_bytes
    )


def common(config: GRPOConfig, store: Store) -> dict[str, Any]:
    """Fields of every engine that has the model's tokens, and reads and writes batches."""
    return {
        "model": config.model,
        "model_cache": str(MODELS.absolute()),
        **store_spec(config, store).model_dump(),
    }


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


def environment_spec(config: GRPOConfig, episodes: EpisodesConfig, store: Store) -> EnvironmentSpec:
    """From what a run's environment engine is built."""
    from engines.episodes.contract import EnvironmentSpec  # only episodes need it

    return EnvironmentSpec(
        data=config.data,
        episodes=episodes,
        frames=config.keeps_frames,
        max_new_tokens=config.rollout.max_new_tokens,
        group_size=config.group_size,
        path_tokens=WHOLE * config.train.shared_micro_batch_tokens,
        no_grammars=_no_grammars(config.rollout),
        **common(config, store),
    )


def _no_grammars(rollout: RolloutConfig) -> str:
    """Why no turn is sampled by a grammar; empty: they are."""
    return "" if rollout.sampling_mask else NO_GRAMMAR_WITHOUT_MASK


def environment_engine(run: Caller, episodes: EpisodesConfig) -> EngineSpec[EnvironmentHost]:
    """From what the environments of the caller's settings are built."""
    from engines.episodes.contract import EnvironmentHost  # only episodes need it

    spec = environment_spec(run.config, episodes, run.store)
    return EngineSpec.of(
        "engines.episodes.environment_engine:EnvironmentEngine", spec, EnvironmentHost
    )


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


T = TypeVar("T", bound=Trainer)

TrainRole = Literal["actor", "ref", "critic", "teacher"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A model that is not the policy's and that a train engine holds as it is."""

    name: str
    model: Model
    weights: WeightsRef | None = None  # a policy version in place of the model's own weights


def train_spec(
    config: GRPOConfig,
    files: RunStore,
    role: TrainRole,
    cache_bytes: int = 0,
    frozen: FrozenModel | None = None,
    decay_steps: int | None = None,
) -> TrainSpec:
    """From what a run's train engine of a role is built; `frozen`: not of the policy's model.

    decay_steps: RL step at which a decaying learning rate ends; None: at `steps`.
    """
    pool, train = config.cluster.roles.pool_of(role), config.train_of(role)
    lora = config.lora if role == "actor" else None
    base = None if lora is None else trained_base(files)
    return TrainSpec(
        model=config.model if frozen is None else frozen.model,
        model_cache=str(MODELS.absolute()),
        train=train,
        lora=lora,
        base=base if frozen is None else frozen.weights,
        name="" if frozen is None else frozen.name,
        student=None if frozen is None else config.model,
        role=role,
        store_uri=files.store.uri,
        store_options=config.store.options,
        cache_bytes=cache_bytes,
        whole_every=config.store.whole_every,
        # Factors of an adapter are of the model's modules, so its base has the model's names.
        version_names="model" if config.lora is not None else version_names(files),
        lone_rank_plans=lone_rank_plans(files),
        node_cache_bytes=config.store.node_cache_bytes,
        run=files.run,
        threads=config.cluster.pools[pool].threads,
        seed=config.seed,
        total_steps=(decay_steps or config.steps) * train.epochs * train.mini_batches,
    )


def trainer_of(
    run: RunView,
    cluster: Cluster,
    role: TrainRole,
    files: RunStore,
    config: GRPOConfig,
    frozen: FrozenModel | None = None,
) -> Trainer:
    """A trainer of a role for a run: this one, or its parent under the parent's settings.

    frozen: which model, if not the policy's.
    """
    opener = opener_of(config, role)
    return trainer_by(opener, run, cluster, role, files, config, frozen)


def trainer_by(
    opener: Opener[T],
    run: RunView,
    cluster: Cluster,
    role: TrainRole,
    files: RunStore,
    config: GRPOConfig,
    frozen: FrozenModel | None = None,
) -> T:
    """The same, made by an opener of its own."""
    ends = decay_steps(config, files)
    spec = train_spec(config, files, role, run.store.cache_bytes, frozen, ends)

    def told(version: int, tensors: int) -> None:
        run.tell(RebuiltOtherwise(version=version, tensors=tensors))

    return trainer_on(
        cluster,
        config,
        replace(files, role=role),
        spec,
        role if frozen is None else f"{role}-{frozen.name}",
        opener=opener,
        epoch=run.epoch,
        cancel=run.cancelled,
        on_replay=lambda step, last: run.tell(UpdateReplayed(step=step, last=last)),
        on_rounding=told if role == "actor" else None,  # others publish no weights
        caller=run.name,
    )


def check_computed(trainer: Trainer, version: int, where: str) -> None:
    """ValueError where a trainer computes something else than its model is; for new runs alone."""
    mismatch = trainer.mismatch(version)
    if mismatch is not None:
        raise ValueError(f"{where}: {mismatch}. Set {where}.path to another model.")


def bring_to_head(
    engines: StartingEngines, role: TrainRole, trainer: T, make: Callable[[RunStore, GRPOConfig], T]
) -> None:
    """Bring what is trained to the run's head; a fork between its parent's snapshots replays first.

    The parent's settings made those steps, so they repeat them. The state is kept as the fork's own
    snapshot, since its settings may be others.
    """
    run, origin = engines.run, engines.run.origin
    if origin is not None and not snapshots.has_base(replace(run.files, role=role), run.head):
        files = parent_of(run.files, origin)
        settings = parent_config(run.files, origin)
        settings = settings.model_copy(update={"cluster": run.config.cluster})
        make(files, settings).snapshot(origin.step, run.name, origin.at)
    trainer.at(run.head)


def _start_actor(engines: StartingEngines, trainer: Trainer) -> None:
    run = engines.run

    def actor(files: RunStore, config: GRPOConfig) -> Trainer:
        return trainer_of(run, engines.cluster, "actor", files, config)

    bring_to_head(engines, "actor", trainer, actor)
    if run.head == run.start:
        check_computed(trainer, run.head, "model")


ACTOR: EngineRole[Trainer] = EngineRole(
    name="actor",
    client=lambda run, cluster: trainer_of(run, cluster, "actor", run.files, run.config),
    start=_start_actor,
)
REF: EngineRole[Trainer] = EngineRole(
    name="ref",
    needed=lambda config: config.has_reference_engine,
    client=lambda run, cluster: trainer_of(run, cluster, "ref", run.files, run.config),
    start=lambda engines, trainer: trainer.at(0),
)


ROLES: tuple[EngineRole[Any], ...] = (
    *(SCORER, PLANNER, ROLLOUT, OPPONENT, REF, ACTOR, ENVIRONMENT, EVALUATION),
)


def roles_of(config: GRPOConfig) -> list[EngineRole[Any]]:
    """The roles that a run has, in the order in which they start where that is free."""
    roles = [*ROLES, *(role for feature in features_of(config) for role in feature.roles)]
    return [role for role in roles if role.needed(config)]


def variables_of(config: GRPOConfig) -> dict[str, dict[str, str]]:
    """Pool -> environment variables of its workers, for the engines that they will hold."""
    variables: dict[str, dict[str, str]] = {}
    for role in roles_of(config):
        for pool, names in role.variables(config).items():
            variables[pool] = {**variables.get(pool, {}), **names}
    return variables


def prompters(engines: ByRole) -> EnginePool[PromptMaker]:
    """The workers that make prompts of rows."""
    environments, scorers = engines.get(ENVIRONMENT), engines[SCORER]
    return scorers if environments is None else environments
