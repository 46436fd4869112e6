"""The engines that train, and the frozen reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from configs.grpo import GRPOConfig
from configs.model import Model
from engines.train.opening import trainer_on
from engines.train.spec import TrainSpec
from engines.train.trainer import Trainer
from engines.workers.cluster import Cluster
from storage.runs import snapshots
from storage.runs.adapters import trained_base
from storage.runs.origins import parent_of
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef
from tasks.run.decay import decay_steps
from tasks.run.events import UpdateReplayed
from tasks.run.forking import parent_config
from tasks.run.roles.role import EngineRole, Started
from tasks.run.roles.specs import MODELS

if TYPE_CHECKING:
    from tasks.run.run_view import RunView

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
    ends = decay_steps(config, files)
    spec = train_spec(config, files, role, run.store.cache_bytes, frozen, ends)
    return trainer_on(
        cluster,
        config,
        replace(files, role=role),
        spec,
        role if frozen is None else f"{role}-{frozen.name}",
        epoch=run.epoch,
        cancel=run.cancelled,
        on_replay=lambda step, last: run.tell(UpdateReplayed(step=step, last=last)),
        caller=run.name,
    )


def check_computed(trainer: Trainer, version: int, where: str) -> None:
    """ValueError where a trainer computes something else than its model is; for new runs alone."""
    mismatch = trainer.mismatch(version)
    if mismatch is not None:
        raise ValueError(f"{where}: {mismatch}. Set {where}.path to another model.")


def _start(engines: Started, role: Literal["actor", "critic"], trainer: Trainer) -> None:
    """Bring a trainer to the run's head; a fork between its parent's snapshots replays first.

    The parent's settings made those steps, so they repeat them. The state is kept as the fork's own
    snapshot, since its settings may be others.
    """
    run, origin = engines.run, engines.run.origin
    if origin is not None and not snapshots.has_base(replace(run.files, role=role), run.head):
        files = parent_of(run.files, origin)
        settings = parent_config(run.files, origin)
        settings = settings.model_copy(update={"cluster": run.config.cluster})
        parent = trainer_of(run, engines.cluster, role, files, settings)
        parent.snapshot(origin.step, run.name, origin.at)
    trainer.at(run.head)
    if role == "actor" and run.head == run.start:
        check_computed(trainer, run.head, "model")


def _trained(role: Literal["actor", "critic"]) -> EngineRole[Trainer]:
    return EngineRole(
        name=role,
        needed=lambda config: role in config.trained_roles,
        client=lambda run, cluster: trainer_of(run, cluster, role, run.files, run.config),
        start=lambda engines, trainer: _start(engines, role, trainer),
    )


ACTOR, CRITIC = _trained("actor"), _trained("critic")
REF: EngineRole[Trainer] = EngineRole(
    name="ref",
    needed=lambda config: config.has_reference_engine,
    client=lambda run, cluster: trainer_of(run, cluster, "ref", run.files, run.config),
    start=lambda engines, trainer: trainer.at(0),
)
