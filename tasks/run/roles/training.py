"""The engines that train, and the frozen reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from configs.grpo import GRPOConfig
from configs.model import Model
from engines.train.opening import Opener, opener_of, trainer_on
from engines.train.spec import TrainSpec
from engines.train.trainer import Trainer
from engines.workers.cluster import Cluster
from storage.runs import snapshots
from storage.runs.adapters import trained_base
from storage.runs.run_store import RunStore, parent_of
from storage.runs.weights import WeightsRef
from tasks.run.decay import decay_steps
from tasks.run.events import RebuiltOtherwise, UpdateReplayed
from tasks.run.forking import parent_config
from tasks.run.roles.role import EngineRole, StartingEngines
from tasks.run.roles.specs import MODELS
from tasks.run.version_names import version_names

if TYPE_CHECKING:
    from tasks.run.run_view import RunView

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
        on_rounding=_telling(run) if role == "actor" else None,  # others publish no weights
        caller=run.name,
    )


def _telling(run: RunView) -> Callable[[int, int], None]:
    return lambda version, tensors: run.tell(RebuiltOtherwise(version=version, tensors=tensors))


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
