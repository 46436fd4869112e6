"""How a teacher's scores move the student: the loss, its weight, and that of the task's rewards.

Here and not beside the teachers (configs/distill.py), because a commit records its algorithm, from
which a step is made again.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from configs.algorithm.algorithm import AlgorithmConfig
from configs.base import Method, Settings


class ReverseKL(Method):
    """KL(student, teacher): the log-ratio of each sampled token is its advantage."""

    kind: Literal["reverse_kl"] = "reverse_kl"


class ForwardKLTopK(Method):
    """KL(teacher, student) over the teacher's likeliest words and one bin for all others."""

    kind: Literal["forward_kl_topk"] = "forward_kl_topk"
    top_k: int = Field(64, ge=1, description="Words of the teacher that are stored for each token.")


class ReverseKLTopK(Method):
    """KL(student, teacher) over the teacher's likeliest words and one bin for all others."""

    kind: Literal["reverse_kl_topk"] = "reverse_kl_topk"
    top_k: int = Field(64, ge=1, description="Words of the teacher that are stored for each token.")


class JSDTopK(Method):
    """GKD's generalised Jensen-Shannon divergence between both, over the same bins."""

    kind: Literal["jsd_topk"] = "jsd_topk"
    top_k: int = Field(64, ge=1, description="Words of the teacher that are stored for each token.")
    beta: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Between KL(teacher, student), near 0, and KL(student, teacher), near 1; each "
        "times what is left of it there.",
    )


DistillationLoss = Annotated[
    ReverseKL | ForwardKLTopK | ReverseKLTopK | JSDTopK, Field(discriminator="kind")
]


class DistillationConfig(Settings):
    """What is learned from the teacher, and what from the task's rewards."""

    loss: DistillationLoss = Field(ReverseKL(), description="The divergence that is made smaller.")
    coefficient: float = Field(1.0, gt=0, description="Its weight, per nat.")
    task_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the advantages made of the task's rewards, which are added; 0: "
        "rewards, if there are any, are measured only.",
    )

    @property
    def top_k(self) -> int:
        """Words of the teacher that are stored for each token; 0: the log-prob of its own alone."""
        return 0 if isinstance(self.loss, ReverseKL) else self.loss.top_k


class DistillAlgorithm(AlgorithmConfig):
    """The algorithm of a run that has teachers."""

    distillation: DistillationConfig = Field(
        DistillationConfig(), description="What is learned from the teacher."
    )

    @property
    def needs_baselines(self) -> bool:
        """Whether each prompt's greedy completion must be sampled and scored too."""
        return super().needs_baselines and self.distillation.task_weight > 0

    @property
    def needs_squares(self) -> bool:
        """Whether sum_pi_squared must be a column before the advantages."""
        return super().needs_squares and self.distillation.task_weight > 0

    @property
    def needs_stored_logprobs(self) -> bool:
        """Whether old_logprobs must be a column before the advantages, not those of the update."""
        return super().needs_stored_logprobs or isinstance(self.distillation.loss, ReverseKL)


def recorded_algorithm(record: Mapping[str, object]) -> AlgorithmConfig:
    """The algorithm that a commit records."""
    kind = DistillAlgorithm if "distillation" in record else AlgorithmConfig
    return kind.model_validate(record)
