"""The settings of a run with tree rollouts: those of GRPO, and how a prompt's completions branch."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from configs.base import Settings
from configs.grpo import OF_EVERY_FLOW, GRPOConfig
from configs.rules.every_run import BATCHES
from configs.rules.rule import Rule
from configs.rules.tasks import no_tasks


class FixedDivergence(Settings):
    """Every path goes on in the same number of ways."""

    kind: Literal["fixed"] = "fixed"
    width: int = Field(2, ge=1, description="Segments that follow a segment, or the prompt.")


class DrawnDivergence(Settings):
    """Each path goes on in a number of ways that is drawn, all numbers alike."""

    kind: Literal["drawn"] = "drawn"
    fewest: int = Field(1, ge=1, description="Fewest segments that follow one, or the prompt.")
    most: int = Field(3, ge=1, description="Most segments that follow one, or the prompt.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.fewest > self.most:
            raise ValueError(
                f"divergence.fewest = {self.fewest} is more than divergence.most = {self.most}. "
                "Swap them."
            )
        return self


def _fixed_by_default(settings: Any) -> Any:
    return {"kind": "fixed", **settings} if isinstance(settings, dict) else settings


Divergence = Annotated[
    FixedDivergence | DrawnDivergence,
    Field(discriminator="kind"),
    BeforeValidator(_fixed_by_default),
]


class RepetitionStop(Settings):
    """When a path is over because it repeats itself."""

    tokens: int = Field(16, ge=1, description="Longest run of tokens that counts as repeated.")
    times: int = Field(8, ge=2, description="How often in a row it stands at the path's end.")


class TreeStop(Settings):
    """What ends a path after a segment, beside an end of sequence and rollout.stop."""

    answer: str | None = Field(
        None,
        description="Regular expression; a path whose text holds it is over, as an answer given. "
        "None: off.",
    )
    repetition: RepetitionStop | None = Field(
        None, description="End a path that repeats itself, as one that was cut off; none: do not."
    )

    @field_validator("answer")
    @classmethod
    def _is_an_expression(cls, answer: str | None) -> str | None:
        try:
            re.compile(answer or "")
        except re.error as error:
            raise ValueError(f"'{answer}' is no regular expression: {error}.") from None
        return answer


class TreeSettings(Settings):
    """How a prompt's completions branch. group_size is the number of leaves, exactly."""

    segment_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens of a segment; the last one of a path goes on to its end. None: "
        "rollout.max_new_tokens / depth.",
    )
    depth: int = Field(
        4, ge=1, description="Segments of the longest path; 1: independent completions."
    )
    divergence: Divergence = Field(
        FixedDivergence(), description="In how many ways a path goes on after a segment."
    )
    by: Literal["even", "logprob"] = Field(
        "even",
        description="How the leaves that are still to come are shared among the paths of a prompt: "
        "evenly, or by the log-probs of their last segments.",
    )
    logprob_weight: float = Field(
        1.0,
        description="With by = logprob: shares go by exp(weight x mean log-prob of the segment); "
        "below 0 unlikely segments get more.",
    )
    fall_back: bool = Field(
        True,
        description="A path that ends before it has branched is one leaf, and the leaves that it "
        "leaves over go to other paths; once none goes on, branch again after an earlier segment. "
        "Off: it stands for all of its leaves, which is unbiased.",
    )
    stop: TreeStop = Field(TreeStop(), description="What ends a path early.")

    @model_validator(mode="after")
    def _weight_is_used(self) -> Self:
        if self.by == "even" and "logprob_weight" in self.model_fields_set:
            default = type(self).model_fields["logprob_weight"].default
            if self.logprob_weight != default:
                raise ValueError(
                    f"tree.logprob_weight = {self.logprob_weight:g} weighs log-probs, which tree.by "
                    "= even does not look at. Set tree.by = logprob, or leave it out."
                )
        return self


ESTIMATOR: tuple[Rule[GRPOConfig], ...] = (
    Rule(
        needs=lambda config: (
            not (config.algorithm.needs_critic or config.algorithm.needs_baselines)
        ),
        says=lambda config: (
            f"algorithm.advantage.kind = {config.algorithm.advantage.kind} needs what this flow "
            "does not make (a critic, or greedy completions). Set algorithm.advantage.kind = tree."
        ),
    ),
)

TREES: tuple[Rule["TreeConfig"], ...] = (
    Rule(
        needs=lambda config: config.rollout.thinking is None,
        says=lambda config: (
            "rollout.thinking ends thoughts in completions that are sampled whole, and this flow "
            "samples segments. Set rollout.thinking = null."
        ),
    ),
    Rule(
        needs=lambda config: (
            config.segment_tokens * (config.tree.depth - 1) < config.rollout.max_new_tokens
        ),
        says=lambda config: (
            f"tree.depth = {config.tree.depth} segments of {config.segment_tokens} tokens are more "
            f"than rollout.max_new_tokens = {config.rollout.max_new_tokens}. Set tree.depth to at "
            f"most {-(-config.rollout.max_new_tokens // config.segment_tokens)}, or "
            "tree.segment_tokens lower."
        ),
    ),
    Rule(
        needs=lambda config: config.episodes is None,
        says=lambda config: (
            "episodes.environment answers turns, and this flow samples trees of one-turn "
            "completions. Set episodes = null, or run it with refrain grpo."
        ),
    ),
    Rule(
        needs=lambda config: not (config.over_samples or config.rollout.partial_rollout == "carry"),
        says=lambda config: (
            f"rollout.over_sampling = {config.rollout.over_sampling:g} with "
            f"rollout.partial_rollout = {config.rollout.partial_rollout} leaves groups "
            "unfinished, and a tree is trained on as a whole. Set rollout.over_sampling = 1 and "
            "rollout.partial_rollout = off."
        ),
    ),
)


class TreeConfig(GRPOConfig):
    """Tree rollouts (TreePO, arXiv:2508.17445): completions of a prompt share their beginnings."""

    unfit: ClassVar[tuple[str, ...]] = ("gae", "remax")
    rules: ClassVar[tuple[Rule[Any], ...]] = (
        *BATCHES,
        *ESTIMATOR,
        *OF_EVERY_FLOW,
        no_tasks("refrain tree"),
        *TREES,
    )

    tree: TreeSettings = Field(
        default_factory=TreeSettings, description="Segments, and how paths branch."
    )

    @model_validator(mode="before")
    @classmethod
    def _tree_by_default(cls, settings: Any) -> Any:
        if not isinstance(settings, dict) or not isinstance(settings.get("algorithm", {}), dict):
            return settings
        algorithm = settings.get("algorithm", {})
        advantage = algorithm.get("advantage", {})
        if isinstance(advantage, dict):
            advantage = {"kind": "tree", **advantage}
        return {**settings, "algorithm": {**algorithm, "advantage": advantage}}

    @property
    def features(self) -> tuple[str, ...]:
        """Those of GRPO, and trees."""
        return (*super().features, "trees")

    @property
    def segment_tokens(self) -> int:
        """Tokens of a segment."""
        return self.tree.segment_tokens or max(1, self.rollout.max_new_tokens // self.tree.depth)
