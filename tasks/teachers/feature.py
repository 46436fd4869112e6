"""What a distillation's teachers add to a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from configs.grpo import GRPOConfig
from configs.model import Model
from configs.teachers import VllmTeaching
from engines.models.traced_shape import Shape
from engines.rollout.memory_plan import engine_bytes
from tasks.memory.holders import Holder, Ranks, Vllm, WorkerEngine, sizes_of
from tasks.results import Metrics
from tasks.run.contract import ByRole
from tasks.run.features import Feature, OwnVllm
from tasks.teachers.checks import check_teachers
from tasks.teachers.models import distillation, keep_versions, pinned
from tasks.teachers.off_policy import given_answers
from tasks.teachers.roles import SERVICES, TEACHERS


def _vllms(config: GRPOConfig) -> list[OwnVllm]:
    return [
        OwnVllm(
            role="teacher",
            name=f"teacher {name}",
            setting=f"teachers.{name}.engine",
            settings=engine.engine_of(config.rollout, 0),
        )
        for name, engine in distillation(config).vllm_teachers.items()
    ]


def _models(config: GRPOConfig) -> Mapping[str, Model]:
    return {
        f"teachers.{name}.model": teacher.model
        for name, teacher in distillation(config).teachers.items()
        if teacher.service is None and not isinstance(teacher.engine, VllmTeaching)
        if teacher.model is not None
    }


def _holders(config: GRPOConfig, shape: Shape) -> Iterator[Holder]:
    """Of teachers on the run's workers whose sizes are known; a policy version has the policy's."""
    own = distillation(config)
    pool = config.cluster.roles.pool_of("teacher")
    for name in own.own_teachers:
        model = own.teachers[name].model
        sizes = shape if model is None else sizes_of(model, config.longest_sequence)
        engine, whose = own.teachers[name].engine, f"teacher {name}"
        where = f"teachers.{name}.engine"
        remedy = f"Set {where}.kv_cache_gib, on a GPU gpu_memory_utilization, lower."
        if not isinstance(engine, VllmTeaching):
            if sizes is not None:
                larger = "Set cluster.roles.teacher to a pool with more workers."
                yield Ranks(role="teacher", name=whose, shape=sizes, remedy=larger)
        elif config.cluster.pools[pool].gpus:
            yield Vllm(
                role="teacher",
                whose=whose,
                pool=pool,
                settings=engine.engine_of(config.rollout, 0),
                named=where,
                shape=sizes,
                longest=config.longest_sequence,
                remedy=remedy,
            )
        elif sizes is not None:
            settings, most = engine.engine_of(config.rollout, 0), engine.max_sequences
            yield WorkerEngine(
                role="teacher",
                whose=whose,
                sizes=engine_bytes(settings, sizes, most, config.longest_sequence),
                line=f"{whose}, each engine",
                remedy=lambda what, said=remedy: said,  # type: ignore[misc]
            )


def _metrics(engines: ByRole) -> Metrics:
    """What services have done for the run."""
    return {
        f"teacher_service/{name}/{what}": number
        for name, service in (engines.get(SERVICES) or {}).items()
        for what, number in service.used().items()
    }


FEATURE = Feature(
    roles=(TEACHERS, SERVICES),
    vllms=_vllms,
    check=check_teachers,
    models=_models,
    holders=_holders,
    pin=pinned,
    begin=keep_versions,
    complete=given_answers,
    metrics=_metrics,
)
