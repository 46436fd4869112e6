"""Which functions score completions, and what becomes of a sample whose scoring fails."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import FunctionPath, Settings
from configs.judge import JudgeReward
from configs.reward_model import RewardModelReward


class ReasoningGymReward(Settings):
    """The scorer of the reasoning-gym task that made the problem."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str = Field("reasoning_gym", description="Name under which the score is logged.")
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")
    extract: Literal["last_integer", "last_number", "answer_tag", "whole"] = Field(
        "last_number", description="Which part of the completion is handed to the scorer."
    )

    @property
    def label(self) -> str:
        """Name under which the score is logged."""
        return self.name


class MathReward(Settings):
    """1 if math-verify finds the completion's answer equal to the reference, else 0."""

    kind: Literal["math"] = "math"
    name: str = Field("math", description="Name under which the score is logged.")
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")
    answer_column: str = Field("answer", description="Column with the reference answer.")
    answer_after: str | None = Field(
        "####",
        description="Marker after which the reference answer stands (GSM8K); none takes the whole.",
    )

    @property
    def label(self) -> str:
        """Name under which the score is logged."""
        return self.name


class FunctionReward(Settings):
    """A user's function fn(prompts, completions, **columns) -> list[float], as TRL calls it."""

    kind: Literal["function"] = "function"
    path: FunctionPath
    name: str | None = Field(
        None, description="Name under which the score is logged; none takes the function's name."
    )
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")
    params: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="Keyword arguments passed on every call."
    )

    @property
    def label(self) -> str:
        """Name under which the score is logged."""
        return self.name or self.path.rpartition(":")[2]


class EnvironmentReward(Settings):
    """What an episode's environment gave: the sum of its turns' rewards."""

    kind: Literal["environment"] = "environment"
    name: str = Field("environment", description="Name under which the score is logged.")
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")

    @property
    def label(self) -> str:
        """Name under which the score is logged."""
        return self.name


# What is called in a process of its own; a reward model has engines.
CalledReward = ReasoningGymReward | MathReward | FunctionReward | EnvironmentReward | JudgeReward

Reward = Annotated[CalledReward | RewardModelReward, Field(discriminator="kind")]


class RewardsConfig(Settings):
    """How samples are scored."""

    functions: tuple[Reward, ...] = Field(
        min_length=1, description="Reward functions; a sample's reward is their weighted sum."
    )
    timeout: float = Field(
        30.0, gt=0, description="Deadline of one call of a reward function, in seconds."
    )
    on_failure: Literal["drop", "complete", "abort"] = Field(
        "drop",
        description="What becomes of a group in which a sample's scoring failed: drop leaves the "
        "whole group out, complete trains on its other samples, abort ends the step.",
    )

    @property
    def models(self) -> tuple[RewardModelReward, ...]:
        """The reward models among the functions, whose engines are a role of their own."""
        return tuple(one for one in self.functions if isinstance(one, RewardModelReward))

    @model_validator(mode="after")
    def _names_differ(self) -> "RewardsConfig":
        labels = [reward.label for reward in self.functions]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"rewards.functions has {labels.count(label)} rewards named {label}. "
                    "Give each a name of its own with rewards.functions[].name."
                )
        return self
