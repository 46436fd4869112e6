"""Runs that go on from earlier ones: where they begin, how they are judged, what becomes of them."""

from typing import Literal

from pydantic import Field, model_validator

from configs.base import Settings
from configs.data import Source

CONTINUE_FROM = r"^(models:/[^@/\s]+@[^@/\s]+|[A-Za-z0-9][A-Za-z0-9._-]*(@[1-9][0-9]*)?)$"

ContinueState = Literal["weights", "trainer"]
ContinueData = Literal["unseen", "cursor", "restart"]


class EvaluationConfig(Settings):
    """The test of the last policy version on rows that are not trained on."""

    source: Source = Field(description="Where the held-out rows come from.")
    rows: int = Field(64, ge=1, description="Rows taken from the beginning of the source.")
    samples: int = Field(1, ge=1, description="Completions of each row.")
    greedy: bool = Field(
        True,
        description="Always the likeliest token, which needs samples = 1; else as rollout samples.",
    )

    @model_validator(mode="after")
    def _greedy_is_one(self) -> "EvaluationConfig":
        if self.greedy and self.samples > 1:
            raise ValueError(
                f"evaluation.samples = {self.samples} greedy completions would all be the same. "
                "Set evaluation.greedy = false, or evaluation.samples = 1."
            )
        return self


class PromotionConfig(Settings):
    """When the last policy version takes over an alias of the model registry."""

    alias: str = Field(
        "champion",
        pattern=r"^[a-z][a-z0-9_-]*$",
        description="Alias that moves; the version that has it now is the one to beat.",
    )
    margin: float = Field(
        0.0, ge=0, description="Least gain in mean held-out reward over the version that has it."
    )
    approval: bool = Field(
        False, description="Ask a person on the dashboard before the alias moves."
    )
    approval_hours: float = Field(
        24.0, gt=0, description="Longest wait for the answer, in hours; none in time means no."
    )

    @model_validator(mode="after")
    def _alias_is_free(self) -> "PromotionConfig":
        if self.alias == "latest":
            raise ValueError(
                "promotion.alias = latest is MLflow's own alias. Set another name, such as champion."
            )
        return self
