"""The teachers of a distillation: on the run's own workers, or services elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from configs.distill import DistillConfig
from configs.grpo import GRPOConfig
from configs.teachers import TeacherConfig, VllmTeaching
from engines.rollout.contract import worker_environment
from engines.teachers.client import TeacherClient
from engines.teachers.pool import SPARE_WORDS, TeacherPool, VllmTeacherSpec
from engines.train.trainer import Trainer
from engines.workers.cluster import Cluster
from storage.runs.run_store import RunStore
from tasks.run.contract import ByRole, EngineRole, PoolVariables, StartingEngines
from tasks.run.roles import ACTOR, FrozenModel, check_computed, rollout_spec, trainer_of
from tasks.teachers.models import address_of, distillation, resolved

if TYPE_CHECKING:
    from tasks.run.contract import RunView

OwnTeachers: TypeAlias = Mapping[str, Trainer | TeacherPool]  # by name
Services: TypeAlias = Mapping[str, TeacherClient]  # by name


def vllm_teacher_spec(
    config: DistillConfig, files: RunStore, teacher: FrozenModel, engine: VllmTeaching
) -> VllmTeacherSpec:
    """From what a teacher in vLLM is built."""
    words = config.algorithm.distillation.top_k + SPARE_WORDS
    own = rollout_spec(config, files.store, teacher.name)
    return VllmTeacherSpec(
        engine=own.model_copy(
            update={
                "model": teacher.model,
                "rollout": engine.engine_of(config.rollout, words),
                "routed_experts": False,
                "max_model_len": own.max_model_len + 1,  # vLLM draws a token beyond those scored
            }
        ),
        weights=teacher.weights,
        student=config.model,
        run=files.run,
    )


def _own(run: RunView, cluster: Cluster) -> OwnTeachers:
    return {
        name: _teacher(run, cluster, name, teacher)
        for name, teacher in distillation(run.config).teachers.items()
        if teacher.service is None
    }


def _teacher(
    run: RunView, cluster: Cluster, name: str, teacher: TeacherConfig
) -> Trainer | TeacherPool:
    config = distillation(run.config)
    found = resolved(run.store, config, name)
    if not isinstance(teacher.engine, VllmTeaching):
        return trainer_of(run, cluster, "teacher", run.files, config, found)
    return TeacherPool(
        cluster,
        config.cluster.roles.pool_of("teacher"),
        vllm_teacher_spec(config, run.files, found, teacher.engine),
        epoch=run.epoch,
        deadline=config.rollout.deadline,
        start_timeout=config.cluster.start_timeout,
        cancel=run.cancelled,
    )


def _start(engines: StartingEngines, teachers: OwnTeachers) -> None:
    for name, teacher in teachers.items():
        teacher.at(0)
        if isinstance(teacher, Trainer) and engines.run.head == engines.run.start:
            check_computed(teacher, 0, f"teachers.{name}.model")


def _variables(config: GRPOConfig) -> PoolVariables:
    variables: dict[str, str] = {}
    for teacher in distillation(config).teachers.values():
        if isinstance(teacher.engine, VllmTeaching):
            variables |= worker_environment(teacher.engine.engine_of(config.rollout, 0))
    return {config.cluster.roles.pool_of("teacher"): variables} if variables else {}


def _services(run: RunView, cluster: Cluster) -> Services:
    config = run.config
    return {
        name: TeacherClient(
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
        for name, teacher in distillation(config).teachers.items()
        if teacher.service is not None
    }


def _attach(engines: StartingEngines, services: Services) -> None:
    """Take the run's places at services, once the student is there whose tokens they compare."""
    engines.wait(ACTOR.name)
    student = engines[ACTOR].tokens(engines.run.head)
    for service in services.values():
        service.attach(student)


def _close(services: Services) -> None:
    for service in services.values():
        service.close()


TEACHERS = EngineRole(
    name="teacher",
    needed=lambda config: bool(distillation(config).own_teachers),
    client=_own,
    start=_start,
    variables=_variables,
)
SERVICES = EngineRole(
    name="teacher_service",
    needed=lambda config: bool(distillation(config).services),
    client=_services,
    start=_attach,
    close=_close,
)


def teacher_of_name(engines: ByRole, name: str) -> Trainer | TeacherPool | TeacherClient:
    """A teacher, wherever it is."""
    services = engines.get(SERVICES) or {}
    return services[name] if name in services else engines[TEACHERS][name]
