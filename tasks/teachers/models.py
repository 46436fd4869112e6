"""The teachers of a distillation: which models they are, and which policy versions they keep."""

from __future__ import annotations

from configs.distill import DistillConfig
from configs.environment import given
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.storage import TrackingConfig
from configs.teachers import TeacherConfig
from engines.teachers.client import Address, check_digest, probed
from storage.objects.errors import StoreError
from storage.objects.store import Store
from storage.runs.forks import NoSuchOrigin, begin_at
from storage.runs.retention import pin_version
from storage.runs.run_store import Origin, RunStore
from tasks.run.beginning import place_of
from tasks.run.roles import FrozenModel
from tasks.run.run_record import parent_config


def distillation(config: GRPOConfig) -> DistillConfig:
    """The settings of a run that has teachers."""
    assert isinstance(config, DistillConfig), "only a distillation has teachers"
    return config


def resolved(store: Store, config: DistillConfig, name: str) -> FrozenModel:
    """A teacher with the version that its settings mean. ConfigError where there is none."""
    teacher = config.teachers[name]
    if teacher.version is None:
        assert teacher.model is not None, "the settings have one of the two"
        return FrozenModel(name=name, model=teacher.model)
    origin = origin_of_version(store, config.tracking, teacher.version, f"teachers.{name}.version")
    model = parent_config(RunStore(store, origin.run), origin).model
    return FrozenModel(name=name, model=model, weights=origin.weights)


def address_of(name: str, teacher: TeacherConfig) -> Address:
    """Where a service is and by what key it is asked. ConfigError where the key is not set."""
    assert teacher.service is not None, "this teacher is no service"
    key = given([teacher.key_variable]).get(teacher.key_variable)
    if not key:
        raise ConfigError(
            f"The teacher {name} is the service {teacher.service}, and the environment variable "
            f"{teacher.key_variable} with its key is not set. Set it, or "
            f"teachers.{name}.key_variable to the name of the one that has the key."
        )
    return Address(name=name, url=teacher.service, key=key)


def pinned(store: Store, config: GRPOConfig) -> GRPOConfig:
    """The settings of a new run, with what they mean now.

    RUN@STEP for an alias or a run's last step, and the digest of what a service holds.
    """
    own = distillation(config)
    found = dict(own.teachers)
    for name, teacher in own.teachers.items():
        if teacher.version is not None:
            setting = f"teachers.{name}.version"
            origin = origin_of_version(store, config.tracking, teacher.version, setting)
            found[name] = teacher.model_copy(update={"version": str(origin)})
        if teacher.service is not None:
            facts = probed(address_of(name, teacher), store, config.rollout.dtype)
            check_digest(address_of(name, teacher), facts, teacher.digest, config.rollout.dtype)
            found[name] = teacher.model_copy(update={"digest": facts.digest})
    return own.model_copy(update={"teachers": found})


def keep_versions(files: RunStore, config: GRPOConfig) -> None:
    """Have the runs whose policy versions teach this one keep them."""
    for name, teacher in distillation(config).teachers.items():
        if teacher.version is not None:
            setting = f"teachers.{name}.version"
            origin = origin_of_version(files.store, config.tracking, teacher.version, setting)
            owner = RunStore(files.store, origin.run)
            pin_version(files, owner, origin.weights.version, f"teacher-{name}")


def origin_of_version(store: Store, tracking: TrackingConfig, version: str, setting: str) -> Origin:
    """The step that a setting names by models:/NAME@ALIAS, RUN or RUN@STEP. ConfigError."""
    parent, step = place_of(store, tracking, version, setting)
    try:
        return begin_at(parent, step, fork=False, trainer_state=False, cursor=False)
    except (NoSuchOrigin, StoreError) as error:
        raise ConfigError(f"{setting} = {version}: {error}") from error
