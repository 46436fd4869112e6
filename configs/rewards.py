"""Which functions score completions, and what becomes of a sample whose scoring fails."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.base import FunctionPath, Settings
from configs.judge import JudgeReward, LocalJudgeReward
from configs.reward_model import RewardModelReward
from configs.sandbox import ProcessSandbox, SandboxConfig


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


class ChoiceReward(Settings):
    """1 if the letter that the completion gives as its answer is the row's, else 0."""

    kind: Literal["choice"] = "choice"
    name: str = Field("choice", description="Name under which the score is logged.")
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")
    answer_column: str = Field("answer", description="Column with the letter of the right answer.")

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


class UnitTestsReward(Settings):
    """The completion's program, run against the unit tests of its row in a sandbox."""

    kind: Literal["unit_tests"] = "unit_tests"
    name: str = Field("unit_tests", description="Name under which the score is logged.")
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")
    tests_column: str = Field(
        "test_list",
        description="Column with the tests: assert statements, a script with check(candidate) or "
        "test_… functions, or pairs of input and output.",
    )
    setup_column: str | None = Field(
        None, description="Column with statements that the tests need before them, such as imports."
    )
    function_column: str = Field(
        "entry_point", description="Column that names the function which check(candidate) is given."
    )
    extract: Literal["last_block", "whole"] = Field(
        "last_block", description="The program: the last fenced block of Python, or all of it."
    )
    score: Literal["share", "all"] = Field(
        "all", description="The share of the tests that pass, or 1 if all do and else 0."
    )
    test_timeout: float = Field(
        5.0,
        gt=0,
        description="Deadline of one test, in seconds. Unless set, at most sandbox.timeout.",
    )
    max_tests: int = Field(
        50, ge=1, le=100, description="Tests of a row that are run; the first ones."
    )
    at_once: int = Field(4, ge=1, description="Samples that are run at once on a reward worker.")
    sandbox: SandboxConfig = Field(
        default_factory=ProcessSandbox, description="Where the program runs, and what it may use."
    )

    @property
    def columns(self) -> list[str]:
        """Columns that every row must have."""
        return [self.tests_column, *([self.setup_column] if self.setup_column else [])]

    def seconds(self, samples: int, others: Iterable[SandboxConfig] = ()) -> float:
        """Longest time for so many samples, of which each program may hang until it is stopped.

        others: sandboxes that some tasks have in the place of this one.
        """
        longest = max(one.timeout + one.longest_start for one in (self.sandbox, *others))
        return -(-samples // self.at_once) * longest

    @model_validator(mode="before")
    @classmethod
    def _a_test_ends_with_its_sandbox(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "test_timeout" in given:
            return given
        sandbox = given.get("sandbox")
        limits = dict(sandbox) if isinstance(sandbox, Mapping | Settings) else {}
        try:
            seconds = float(limits.get("timeout", math.inf))
        except (TypeError, ValueError):  # the sandbox's settings say what is wrong
            return given
        usual = cls.model_fields["test_timeout"].default
        return {**given, "test_timeout": seconds} if 0 < seconds < usual else given

    @model_validator(mode="after")
    def _tests_fit(self) -> "UnitTestsReward":
        if self.test_timeout > self.sandbox.timeout:
            raise ValueError(
                f"One test may take {self.test_timeout:g} s (test_timeout) and all of a sample "
                f"{self.sandbox.timeout:g} s (sandbox.timeout). Set sandbox.timeout higher."
            )
        return self

    @property
    def label(self) -> str:
        """Name under which the score is logged."""
        return self.name


# What is called in a process of its own; reward models and judges of the run's own have engines.
CalledReward = (
    ReasoningGymReward
    | MathReward
    | ChoiceReward
    | FunctionReward
    | EnvironmentReward
    | UnitTestsReward
    | JudgeReward
)

EngineReward = RewardModelReward | LocalJudgeReward

Reward = Annotated[CalledReward | EngineReward, Field(discriminator="kind")]


class RewardsConfig(Settings):
    """How samples are scored."""

    functions: tuple[Reward, ...] = Field(
        description="Reward functions; a sample's reward is their weighted sum."
    )
    timeout: float = Field(
        30.0,
        gt=0,
        description="Deadline of one call of a reward function, in seconds. Unit tests have those of "
        "their sandbox.",
    )
    on_failure: Literal["drop", "complete", "abort"] = Field(
        "drop",
        description="What becomes of a group in which a sample's scoring failed: drop leaves the "
        "whole group out, complete trains on its other samples, abort ends the step.",
    )

    def named(
        self, labels: Collection[str] | None, sandbox: SandboxConfig | None = None
    ) -> "RewardsConfig":
        """Those of these names alone, None: all; with another sandbox of unit tests, if given."""
        own = (one for one in self.functions if labels is None or one.label in labels)
        found = (
            one.model_copy(update={"sandbox": sandbox})
            if sandbox is not None and isinstance(one, UnitTestsReward)
            else one
            for one in own
        )
        return self.model_copy(update={"functions": tuple(found)})

    @property
    def on_engines(self) -> tuple[EngineReward, ...]:
        """The functions that are models, whose engines are a role of their own."""
        return tuple(one for one in self.functions if isinstance(one, EngineReward))

    @property
    def models(self) -> tuple[RewardModelReward, ...]:
        """The reward models among them."""
        return tuple(one for one in self.functions if isinstance(one, RewardModelReward))

    @property
    def judges(self) -> tuple[LocalJudgeReward, ...]:
        """The judges among them."""
        return tuple(one for one in self.functions if isinstance(one, LocalJudgeReward))

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
