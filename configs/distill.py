"""The settings of a distillation run: those of GRPO, and teachers that score the samples."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from configs.algorithm.distillation import DistillAlgorithm
from configs.base import Settings
from configs.cluster.cluster import PoolConfig, Role
from configs.cluster.sharing import check_sharing
from configs.grpo import GRPOConfig
from configs.rewards import RewardsConfig
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


class DistillConfig(GRPOConfig):
    """On-policy distillation (arXiv:2306.13649): the student samples, a teacher scores its tokens."""

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
        own: list[Role] = ["teacher"] if self.own_teachers and not self.vllm_teachers else []
        return [*super().frozen_roles, *own]

    @property
    def engine_roles(self) -> list[Role]:
        """Teachers in vLLM are with what samples, since vLLM looks how much memory is free."""
        own: list[Role] = ["teacher"] if self.vllm_teachers else []
        return [*own, *super().engine_roles]

    @property
    def own_teachers(self) -> list[str]:
        """Names of the teachers that live on workers of the run."""
        return [name for name, teacher in self.teachers.items() if teacher.service is None]

    @property
    def vllm_teachers(self) -> dict[str, VllmTeaching]:
        """Those of them that run in vLLM, with its settings; all of them or none."""
        engines = {name: self.teachers[name].engine for name in self.own_teachers}
        return {name: one for name, one in engines.items() if isinstance(one, VllmTeaching)}

    @property
    def services(self) -> dict[str, TeacherConfig]:
        """The teachers that are services, by name."""
        return {name: one for name, one in self.teachers.items() if one.service is not None}

    @model_validator(mode="after")
    def _teachers_have_a_pool(self) -> Self:
        """A pool of their own, like the actor's with one worker, where the settings name none."""
        cluster = self.cluster
        if self.own_teachers and cluster.roles.teacher is None:
            like = cluster.pools[cluster.roles.actor].model_dump(exclude={"workers"})
            pools = {TEACHER_POOL: PoolConfig(**like), **cluster.pools}
            roles = cluster.roles.model_copy(update={"teacher": TEACHER_POOL})
            self.__dict__["cluster"] = cluster.model_copy(update={"pools": pools, "roles": roles})
            self.__pydantic_fields_set__.add("cluster")
            if cluster.share_devices:  # with this pool
                check_sharing(self.cluster, self.engine_roles, self.max_staleness)
        return self

    @model_validator(mode="after")
    def _vllm_can_teach(self) -> Self:
        """vLLM gives the log-probs of given tokens at temperature 1 alone, and keeps its devices."""
        in_vllm = self.vllm_teachers
        for name in in_vllm:
            where = f"teachers.{name}.engine.kind"
            if self.rollout.temperature != 1:
                raise ValueError(
                    f"{where} = vllm scores at temperature 1 alone, and rollout.temperature = "
                    f"{self.rollout.temperature:g}. Set {where} = fsdp, or rollout.temperature = 1."
                )
            if self.cluster.share_devices:
                raise ValueError(
                    f"cluster.share_devices = true, but a teacher with {where} = vllm does not give "
                    f"its devices back. Set {where} = fsdp, or cluster.share_devices = false."
                )
        for name in self.own_teachers:
            if in_vllm and name not in in_vllm:
                raise ValueError(
                    f"teachers.{name}.engine.kind = fsdp, but teachers.{next(iter(in_vllm))} on the "
                    "same workers runs in vLLM. Set both to the same engine.kind."
                )
        return self

    @model_validator(mode="after")
    def _answers_of_the_data_fit(self) -> Self:
        """A loss by words alone learns from tokens that the student would not have written."""
        if self.off_policy is None:
            return self
        distillation = self.algorithm.distillation
        unfit = {
            "algorithm.distillation.loss.kind": (distillation.loss.kind, not distillation.top_k),
            "algorithm.distillation.task_weight": (
                distillation.task_weight, distillation.task_weight > 0,
            ),
            "episodes": ("given", self.episodes is not None),
            "rollout.over_sampling": (self.rollout.over_sampling, self.over_samples),
        }  # fmt: skip
        wanted = {
            "algorithm.distillation.loss.kind": "a loss over the teacher's words, such as jsd_topk",
            "algorithm.distillation.task_weight": "0",
            "episodes": "null",
            "rollout.over_sampling": "1",
        }
        for setting, (value, wrong) in unfit.items():
            if wrong:
                raise ValueError(
                    f"With off_policy some samples are not the student's, and {setting} = {value} "
                    f"takes them for its own. Set {setting} to {wanted[setting]}, or off_policy = "
                    "null."
                )
        return self

    @model_validator(mode="after")
    def _a_test_has_rewards(self) -> Self:
        suites = {} if self.evaluation is None else self.evaluation.suites
        for name, suite in suites.items():
            if suite.rewards is None and not self.rewards.functions:
                raise ValueError(
                    f"evaluation.suites.{name} is tested by the task's rewards, and "
                    f"rewards.functions is empty. Set evaluation.suites.{name}.rewards, or "
                    "rewards.functions."
                )
        return self

    @model_validator(mode="after")
    def _rows_have_a_teacher(self) -> Self:
        several = len(self.teachers) > 1
        if several and self.teacher_column is None:
            raise ValueError(
                f"There are {len(self.teachers)} teachers ({', '.join(self.teachers)}), and "
                "teacher_column = null names none of them for a row. Set teacher_column to a column "
                "of the data with a teacher's name in each row."
            )
        if not several and self.teacher_column is not None:
            raise ValueError(
                f"teacher_column = {self.teacher_column} chooses between teachers, and there is one, "
                f"{next(iter(self.teachers))}. Set teacher_column = null, or name more teachers."
            )
        return self
