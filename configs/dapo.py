"""The settings of a DAPO run: those of GRPO, dynamic sampling, and the paper's defaults."""

import math
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from configs.base import Settings
from configs.grpo import GRPOConfig
from configs.rollout import RolloutConfig
from configs.rules.rule import Rule

MOST_ROUNDS = 1000
SHARE = 5  # the last fifth of an answer is punished: 4,096 of 20,480 tokens in the paper


class DynamicSampling(Settings):
    """Groups that can teach nothing are replaced by new ones until the batch is full."""

    max_rounds: int = Field(
        10,
        ge=1,
        le=MOST_ROUNDS,
        description="Rounds of sampling in a step, at most. A round has new prompts in place of "
        "those whose groups were left out before.",
    )
    over_sampling: float = Field(
        1.5,
        ge=1,
        le=8,
        description="Prompts drawn in a round, as a multiple of the groups still missing, rounded "
        "up. Groups beyond prompts_per_step are dropped; with 1 there are none, and more rounds.",
    )
    on_shortage: Literal["train", "stop"] = Field(
        "train",
        description="With too few groups after max_rounds: train on those that there are (without "
        "any, the step has no update), or stop the run, which can be resumed.",
    )


ROUNDS: tuple[Rule[GRPOConfig], ...] = (
    Rule(
        needs=lambda config: config.rollout.over_sampling == 1,
        says=lambda config: (
            f"rollout.over_sampling = {config.rollout.over_sampling:g} leaves the slowest groups, "
            "and a round of dynamic sampling waits for all of its own. Set rollout.over_sampling "
            "= 1; more prompts for a round are dynamic_sampling.over_sampling."
        ),
    ),
    Rule(
        needs=lambda config: any(step.kind == "informative" for step in config.algorithm.selection),
        says=lambda config: (
            "algorithm.selection leaves no group out for equal rewards, and this flow replaces "
            "those. Add {kind: informative} to algorithm.selection, or run it with "
            "refrain grpo."
        ),
    ),
    Rule(
        needs=lambda config: config.smallest_group[1] > 1,
        says=lambda config: (
            f"{config.smallest_group[0]} = 1 has no group whose rewards could differ, and dynamic "
            f"sampling goes by that. Set {config.smallest_group[0]} to 2 or more."
        ),
    ),
    Rule(
        needs=lambda config: not config.algorithm.needs_baselines,
        says=lambda config: (
            f"algorithm.advantage.kind = {config.algorithm.advantage.kind} compares with greedy "
            "completions, which this flow does not sample. Set algorithm.advantage.kind = grpo, "
            "or run it with refrain grpo."
        ),
    ),
)


class DAPOConfig(GRPOConfig):
    """Decoupled clip and dynamic sampling policy optimisation (arXiv:2503.14476)."""

    unfit: ClassVar[tuple[str, ...]] = (*GRPOConfig.unfit, "remax")
    rules: ClassVar[tuple[Rule[Any], ...]] = (*GRPOConfig.rules, *ROUNDS)
    may_change: ClassVar[tuple[str, ...]] = (
        "dynamic_sampling.max_rounds",
        "dynamic_sampling.on_shortage",
    )

    dynamic_sampling: DynamicSampling = Field(
        default_factory=DynamicSampling, description="Rounds of sampling until a batch is full."
    )

    @property
    def groups_at_once(self) -> int:
        """Groups of a step's first round, which no other round exceeds."""
        return math.ceil(self.dynamic_sampling.over_sampling * self.prompts_per_step - 1e-9)

    @property
    def groups_numbered(self) -> int:
        """Numbers that a step has for its groups: enough for all rounds that can be set.

        So max_rounds may be changed in a run, and the samples of a step under way keep theirs.
        """
        return MOST_ROUNDS * self.groups_at_once

    @property
    def most_rounds(self) -> int:
        """How many times a step draws and samples, at most."""
        return self.dynamic_sampling.max_rounds

    @property
    def over_samples(self) -> bool:
        """Never: a step waits for all groups of a round."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _as_the_paper_by_default(cls, settings: Any) -> Any:
        """Clip-higher without dual clip, selection by reward, soft overlong punishment."""
        if not isinstance(settings, dict) or not isinstance(settings.get("algorithm", {}), dict):
            return settings
        algorithm = {
            "selection": [{"kind": "informative", "rewards": "given"}],
            **settings.get("algorithm", {}),
        }
        loss = algorithm.get("loss", {})
        if isinstance(loss, dict) and loss.get("kind", "clipped") == "clipped":
            algorithm["loss"] = {"kind": "clipped", "clip_high": 0.28, "dual_clip": None, **loss}
        shaping = algorithm.get("shaping", {})
        if isinstance(shaping, dict):
            buffer = max(1, _most_tokens(settings) // SHARE)
            algorithm["shaping"] = {"overlong": {"buffer": buffer}, **shaping}
        return {**settings, "algorithm": algorithm}


def _most_tokens(settings: dict[str, Any]) -> int:
    """rollout.max_new_tokens as given; its default where it is not, or is no number."""
    rollout = settings.get("rollout", {})
    tokens = rollout.get("max_new_tokens") if isinstance(rollout, dict) else rollout.max_new_tokens
    default = RolloutConfig.model_fields["max_new_tokens"].default
    return tokens if isinstance(tokens, int) else int(default)
