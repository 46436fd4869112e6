"""Guards: which metric of a run's steps is watched, within which bound, and what is done beyond it.

Every run.json has this section, so it is here; what a guard does is in tasks/guards.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from configs.base import Settings

Action = Literal["warn", "synchronous", "stop", "rollback"]
Value = bool | int | float | str | None  # of a setting that a rollback changes
Preset = Literal[
    "kl",
    "entropy",
    "reward_collapse",
    "length_explosion",
    "engine_mismatch",
    "gradient_norm",
    "failed_samples",
    "truncated",
    "repetition",
    "evaluation_drop",
]
BOUNDS = ("above", "below", "above_mean", "below_mean")

# What each preset stands for, where the guard does not say otherwise. KL and entropy in nats.
PRESETS: Mapping[Preset, Mapping[str, str | int | float]] = {
    "kl": {"metric": "train/kl_ref", "above": 1.0},
    "entropy": {"metric": "train/entropy", "below": 0.05},
    "reward_collapse": {"metric": "reward/mean", "below_mean": 0.5},
    "length_explosion": {"metric": "response/tokens_mean", "above_mean": 2.0},
    "engine_mismatch": {"metric": "train/rollout_mismatch", "above": 0.1},
    "gradient_norm": {"metric": "train/grad_norm", "above_mean": 10.0},
    "failed_samples": {"metric": "samples/failed_fraction", "above": 0.2},
    "truncated": {"metric": "response/truncated_fraction", "above": 0.5},
    "repetition": {"metric": "response/repeated_ngrams", "above": 0.5},
    "evaluation_drop": {"below_mean": 0.8, "window": 3, "patience": 1},
}


class RollbackConfig(Settings):
    """Where a run goes back to, and what is different from there on."""

    steps: int = Field(
        5, ge=1, description="Steps to go back, from the one after which it is done."
    )
    change: dict[str, Value] = Field(
        default_factory=dict,
        description="Settings of the run that goes on from there, by their dotted names: a value, or "
        "x and a factor, as in {train.learning_rate: x0.1}.",
    )


class GuardConfig(Settings):
    """A metric, the bound that it must keep to, and what is done where it does not."""

    name: str = Field(
        "", description="By which messages and commits name it; none: the preset, or the metric."
    )
    preset: Preset | None = Field(
        None, description="Metric and bound by one word; what is given beside it goes before."
    )
    metric: str = Field(
        "",
        description="Metric of each step that is watched, by its name in MLflow. A step without it "
        "says nothing; a value that is no number is beyond every bound.",
    )
    above: float | None = Field(None, description="Largest value, in the metric's unit.")
    below: float | None = Field(None, description="Least value, in the metric's unit.")
    above_mean: float | None = Field(
        None,
        gt=1,
        description="Largest value, as a multiple of the running mean m; of a negative mean the same "
        "distance, m + (f - 1) |m|.",
    )
    below_mean: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Least value, as a share of the running mean; m - (1 - f) |m|.",
    )
    window: int = Field(
        10,
        ge=1,
        description="Steps of the running mean, of those within the bound. Before there were so many "
        "a bound by the mean is not known, and nothing is beyond it.",
    )
    patience: int = Field(
        3,
        ge=1,
        description="Steps in a row beyond the bound before anything is done; as many within it "
        "before a warning is given again.",
    )
    action: Action = Field(
        "warn",
        description="warn; synchronous: max_staleness = 0 for the rest of the run; stop: the run "
        "ends with an error and can be resumed; rollback: it goes on from an earlier step.",
    )
    rollback: RollbackConfig = Field(
        default_factory=RollbackConfig, description="Where to, and what changes (action: rollback)."
    )

    @property
    def label(self) -> str:
        """What messages and commits call it."""
        return self.name or self.preset or self.metric

    @property
    def bound(self) -> tuple[str, float]:
        """The setting that is its bound, and the value."""
        (bound,) = [(name, value) for name, value in self._bounds().items() if value is not None]
        return bound

    @property
    def by_mean(self) -> bool:
        """Whether the bound is a multiple of the running mean."""
        return self.bound[0].endswith("_mean")

    def threshold(self, mean: float | None) -> float | None:
        """The bound in the metric's unit; None for one by a mean that is not known."""
        name, value = self.bound
        if not self.by_mean:
            return value
        if mean is None:
            return None
        sign = 1.0 if name == "above_mean" else -1.0
        return mean + sign * abs(value - 1.0) * abs(mean)

    def crossed_by(self, value: float, threshold: float) -> bool:
        """Whether a value is beyond the threshold; one that is not a number is."""
        good = value <= threshold if self.bound[0].startswith("above") else value >= threshold
        return not good

    def _bounds(self) -> dict[str, float | None]:
        return {
            "above": self.above,
            "below": self.below,
            "above_mean": self.above_mean,
            "below_mean": self.below_mean,
        }

    @model_validator(mode="before")
    @classmethod
    def _as_the_preset_says(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping) or settings.get("preset") not in PRESETS:
            return settings
        preset = dict(PRESETS[settings["preset"]])
        changes = {name: value for name, value in settings.items() if value not in (None, "")}
        if not changes.keys().isdisjoint(BOUNDS):
            preset = {name: value for name, value in preset.items() if name not in BOUNDS}
        return {**preset, **changes}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not self.metric:
            example = "eval/SUITE/reward" if self.preset else "reward/mean, or its preset"
            raise ValueError(
                f"guards: {self.preset or 'a guard'} names no metric. Set its metric, such as "
                f"{example}."
            )
        bounds = [name for name, value in self._bounds().items() if value is not None]
        if len(bounds) != 1:
            raise ValueError(
                f"guards: {self.label} has {' and '.join(bounds) or 'no bound'}, and a guard has one "
                f"bound. Set one of {', '.join(BOUNDS)}."
            )
        if self.rollback != RollbackConfig() and self.action != "rollback":
            raise ValueError(
                f"guards: {self.label} says where to roll back to, and its action is {self.action}. "
                "Set its action to rollback, or remove its rollback."
            )
        return self
