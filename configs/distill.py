"""The settings of a distillation run: those of GRPO, and teachers that score the samples."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from pydantic import Field, field_validator

from configs.algorithm.distillation import DistillAlgorithm
from configs.base import Settings
from configs.cluster import PoolConfig, Role
from configs.grpo import GRPOConfig
from configs.resolving import Decider, Decision, Machine
from configs.rewards import RewardsConfig
from configs.rules.rule import Rule, of_each
from configs.rules.tasks import no_tasks
from configs.teachers import TEACHER_NAME, TEACHER_POOL, TeacherConfig, VllmTeaching


class OffPolicyConfig(Settings):
    """GKD's mixture: some shards of a step are answers of the data, by a teacher or a person."""

    column: str = Field(
        description="Column of the data with them: a text, or a list of group_size texts."
    )
    student_data_fraction: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Probability that the student samples a shard (lambda in arXiv:2306.13649); 1: "
        "always, which is on-policy; 0: never, which is distillation on given answers.",
    )


def teachers_pool(config: "DistillConfig", _: Machine) -> Iterator[Decision]:
    """One of their own, like the actor's with one worker."""
    cluster = config.cluster
    if not config.own_teachers or cluster.roles.teacher is not None:
        return
    if TEACHER_POOL not in cluster.pools:
        like = cluster.pools[cluster.roles.actor].model_dump(exclude={"workers"})
        yield Decision(
            path=("cluster", "pools", TEACHER_POOL),
            value=PoolConfig(**like),
            because="like the actor's, with one worker",
        )
    yield Decision(
        path=("cluster", "roles", "teacher"),
        value=TEACHER_POOL,
        because="teachers have a pool of their own",
    )


def _in_vllm(config: "DistillConfig") -> Iterable[str]:
    return config.vllm_teachers


def _beside_vllm(config: "DistillConfig") -> Iterable[str]:
    """Teachers of the run's own workers, where some run in vLLM."""
    return config.own_teachers if config.vllm_teachers else []


# vLLM gives the log-probs of given tokens at temperature 1 alone, and keeps its devices.
VLLM_TEACHERS: tuple[Rule["DistillConfig"], ...] = (
    of_each(
        _in_vllm,
        needs=lambda config, name: config.rollout.temperature == 1,
        says=lambda config, name: (
            f"teachers.{name}.engine.kind = vllm scores at temperature 1 alone, and "
            f"rollout.temperature = {config.rollout.temperature:g}. Set teachers.{name}.engine.kind "
            "= fsdp, or rollout.temperature = 1."
        ),
    ),
    of_each(
        _in_vllm,
        needs=lambda config, name: not config.cluster.share_devices,
        says=lambda config, name: (
            f"cluster.share_devices = true, but a teacher with teachers.{name}.engine.kind = vllm "
            f"does not give its devices back. Set teachers.{name}.engine.kind = fsdp, or "
            "cluster.share_devices = false."
        ),
    ),
    of_each(
        _beside_vllm,
        needs=lambda config, name: name in config.vllm_teachers,
        says=lambda config, name: (
            f"teachers.{name}.engine.kind = fsdp, but teachers.{next(iter(config.vllm_teachers))} on "
            "the same workers runs in vLLM. Set both to the same engine.kind."
        ),
    ),
)


def _beside_answers_of_the_data(
    setting: str,
    value: Callable[["DistillConfig"], object],
    *,
    needs: Callable[["DistillConfig"], bool],
    set_to: str,
) -> Rule["DistillConfig"]:
    return Rule(
        needs=lambda config: config.off_policy is None or needs(config),
        says=lambda config: (
            f"With off_policy some samples are not the student's, and {setting} = {value(config)} "
            f"takes them for its own. Set {setting} to {set_to}, or off_policy = null."
        ),
    )


# A teacher's log-probs are of its whole distribution.
WHOLE_DISTRIBUTIONS: tuple[Rule["DistillConfig"], ...] = (
    Rule(
        needs=lambda config: not config.rollout.sampling_mask,
        says=lambda config: (
            "rollout.sampling_mask = true makes the student's log-probs those of a part of its "
            "distribution, and a teacher's are of the whole. Set rollout.sampling_mask = false."
        ),
    ),
)

# A loss by words alone learns from tokens that the student would not have written.
ANSWERS_OF_THE_DATA: tuple[Rule["DistillConfig"], ...] = (
    _beside_answers_of_the_data(
        "algorithm.distillation.loss.kind",
        lambda config: config.algorithm.distillation.loss.kind,
        needs=lambda config: bool(config.algorithm.distillation.top_k),
        set_to="a loss over the teacher's words, such as jsd_topk",
    ),
    _beside_answers_of_the_data(
        "algorithm.distillation.task_weight",
        lambda config: config.algorithm.distillation.task_weight,
        needs=lambda config: config.algorithm.distillation.task_weight <= 0,
        set_to="0",
    ),
    _beside_answers_of_the_data(
        "train.router_replay",
        lambda config: config.train.router_replay,
        needs=lambda config: not config.train.router_replay,
        set_to="false",
    ),
    _beside_answers_of_the_data(
        "episodes",
        lambda config: "given",
        needs=lambda config: config.episodes is None,
        set_to="null",
    ),
    _beside_answers_of_the_data(
        "rollout.over_sampling",
        lambda config: config.rollout.over_sampling,
        needs=lambda config: not config.over_samples,
        set_to="1",
    ),
)


def _suites_of_the_task(config: "DistillConfig") -> Iterable[str]:
    """Suites that are scored by the run's rewards."""
    return [name for name, suite in config.suites.items() if suite.rewards is None]


TEACHERS: tuple[Rule["DistillConfig"], ...] = (
    of_each(
        _suites_of_the_task,
        needs=lambda config, name: len(config.rewards.functions) > 0,
        says=lambda config, name: (
            f"evaluation.suites.{name} is tested by the task's rewards, and "
            f"rewards.functions is empty. Set evaluation.suites.{name}.rewards, or "
            "rewards.functions."
        ),
    ),
    Rule(
        needs=lambda config: len(config.teachers) <= 1 or config.teacher_column is not None,
        says=lambda config: (
            f"There are {len(config.teachers)} teachers ({', '.join(config.teachers)}), and "
            "teacher_column = null names none of them for a row. Set teacher_column to a column "
            "of the data with a teacher's name in each row."
        ),
    ),
    Rule(
        needs=lambda config: len(config.teachers) > 1 or config.teacher_column is None,
        says=lambda config: (
            f"teacher_column = {config.teacher_column} chooses between teachers, and there is one, "
            f"{next(iter(config.teachers))}. Set teacher_column = null, or name more teachers."
        ),
    ),
)


class DistillConfig(GRPOConfig):
    """On-policy distillation (arXiv:2306.13649): the student samples, a teacher scores its tokens."""

    rules: ClassVar[tuple[Rule[Any], ...]] = (
        *GRPOConfig.rules,
        no_tasks("distillation"),
        *VLLM_TEACHERS,
        *WHOLE_DISTRIBUTIONS,
        *ANSWERS_OF_THE_DATA,
        *TEACHERS,
    )
    deciders: ClassVar[tuple[Decider, ...]] = (*GRPOConfig.deciders, teachers_pool)
    may_change: ClassVar[tuple[str, ...]] = (
        *(f"teachers.*.{name}" for name in ("service", "key_variable", "patience")),
        *(
            f"teachers.*.engine.{name}"
            for name in ("max_sequences", "kv_cache_gib", "gpu_memory_utilization")
        ),
    )

    rewards: RewardsConfig = Field(
        default_factory=lambda: RewardsConfig(functions=()),
        description="Scoring by the task; no functions: the teacher alone teaches.",
    )
    algorithm: DistillAlgorithm = Field(
        default_factory=DistillAlgorithm,
        description="Distillation, and how the task's rewards are learned from beside it.",
    )
    teachers: dict[str, TeacherConfig] = Field(
        min_length=1,
        description="The teachers by name, each on all workers of their pool, or a service.",
    )
    teacher_column: str | None = Field(
        None, description="Column of the data that names each row's teacher; none: there is one."
    )

    off_policy: OffPolicyConfig | None = Field(
        None, description="Answers of the data among the samples; none: the student writes all."
    )

    @field_validator("teachers")
    @classmethod
    def _names_fit_keys(cls, teachers: dict[str, TeacherConfig]) -> dict[str, TeacherConfig]:
        for name in teachers:
            if not TEACHER_NAME.fullmatch(name):
                raise ValueError(
                    f"teachers has a teacher named {name!r}, which becomes part of names in the "
                    "store. Use letters, digits, '_' and '-'."
                )
        return teachers

    @property
    def needs_rewards(self) -> bool:
        """Whether a run has to have reward functions."""
        return self.algorithm.distillation.task_weight > 0

    @property
    def features(self) -> tuple[str, ...]:
        """Those of GRPO, and teachers."""
        return (*super().features, "teachers")

    @property
    def sharded_stages(self) -> int:
        """Those of GRPO, and the teachers' scores."""
        return super().sharded_stages + 1

    @property
    def frozen_roles(self) -> list[Role]:
        """Roles of the train engine without an optimizer."""
        teachers: list[Role] = ["teacher"] if self.own_teachers and not self.vllm_teachers else []
        return [*super().frozen_roles, *teachers]

    @property
    def engine_roles(self) -> list[Role]:
        """Teachers in vLLM are with what samples, since vLLM looks how much memory is free."""
        teachers: list[Role] = ["teacher"] if self.vllm_teachers else []
        return [*teachers, *super().engine_roles]

    @property
    def own_teachers(self) -> list[str]:
        """Names of the teachers that live on workers of the run."""
        return [name for name, teacher in self.teachers.items() if teacher.service is None]

    @property
    def vllm_teachers(self) -> dict[str, VllmTeaching]:
        """Those of them that run in vLLM, with its settings; all of them or none."""
        engines = {name: self.teachers[name].engine for name in self.own_teachers}
        return {
            name: engine for name, engine in engines.items() if isinstance(engine, VllmTeaching)
        }

    @property
    def services(self) -> dict[str, TeacherConfig]:
        """The teachers that are services, by name."""
        return {
            name: teacher for name, teacher in self.teachers.items() if teacher.service is not None
        }
