"""The guard of runs whose steps overlap: which metric it watches, and what it does beyond a bound.

The decision is in tasks/run/staleness_guard.py, the metrics in docs/algorithms.md.
"""

from typing import Literal

from pydantic import Field, model_validator

from configs.base import Settings

GuardMetric = Literal[
    "train/rollout_effective_sample_size",
    "train/correction_effective_sample_size",
    "train/rollout_mismatch",
    "train/rollout_mismatch_max",
    "train/kl_rollout_k3",
]


class StalenessGuardConfig(Settings):
    """What ends the overlap of steps, or the run, where samples are too far off the policy."""

    metric: GuardMetric = Field(
        description="Metric of each step that is watched: an effective sample size (a share of the "
        "tokens), or a distance between rollout engine and trainer (nats)."
    )
    bound: float = Field(
        gt=0,
        description="Least effective sample size, or largest distance, in the metric's unit.",
    )
    action: Literal["synchronous", "stop"] = Field(
        "synchronous",
        description="Beyond the bound: max_staleness = 0 for the rest of the run, or the run ends "
        "with an error and can be resumed.",
    )
    patience: int = Field(
        3, ge=1, description="Steps in a row beyond the bound before anything is done."
    )

    @property
    def is_least(self) -> bool:
        """Whether the bound is the least value that is good, and not the largest."""
        return self.metric.endswith("effective_sample_size")

    def crossed_by(self, value: float) -> bool:
        """Whether a value of the metric is beyond the bound; one that is not a number is."""
        good = value >= self.bound if self.is_least else value <= self.bound
        return not good

    @model_validator(mode="after")
    def _a_share_is_at_most_one(self) -> "StalenessGuardConfig":
        if self.is_least and self.bound > 1:
            raise ValueError(
                f"staleness_guard.bound = {self.bound:g} is above 1, and {self.metric} is a share. "
                "Set staleness_guard.bound to at most 1."
            )
        return self
