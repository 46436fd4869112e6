"""When the last policy version takes over an alias.

Every run.json has this section, so it is here; what is done by it is in tasks/promotion.
"""

from pydantic import Field, model_validator

from configs.base import Settings


class PromotionConfig(Settings):
    """When the last policy version takes over an alias of the model registry."""

    alias: str = Field(
        "champion",
        pattern=r"^[a-z][a-z0-9_-]*$",
        description="Alias that moves; the version that has it now is the one to beat.",
    )
    margin: float = Field(
        0.0,
        ge=0,
        description="Least gain in mean reward of the suite over the version that has it.",
    )
    suite: str | None = Field(
        None, description="Suite of evaluation.suites that decides; none: the only one."
    )
    significance: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Largest p-value at which a gain counts, of the paired permutation test over the "
        "suite's prompts (two-sided), such as 0.05; none: the margin alone decides.",
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
