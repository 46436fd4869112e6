"""Advantage estimators; their functions are listed in engines/algorithms/advantages.py."""

from typing import Annotated, Literal

from pydantic import Field

from configs.base import Method, UserFunction

Lone = Annotated[
    Literal["reward", "zero"],
    Field(description="Advantage of a sample alone in its group: its reward, or zero."),
]
Epsilon = Annotated[float, Field(ge=0, description="Added to the standard deviation.")]
Whiten = Annotated[bool, Field(description="Scale to mean 0 and variance 1 over all tokens.")]
PrefixWeight = Annotated[
    Literal["per_leaf", "once"],
    Field(
        description="How often the tokens of a shared segment train: in each completion that has "
        "them, or in one, with the mean advantage of all of these."
    ),
]


class GAEAdvantage(Method):
    """Generalised advantage estimation with a critic (arXiv:1506.02438)."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")
    lam: float = Field(1.0, ge=0, le=1, description="Weight of longer estimates (lambda).")
    whiten: bool = Field(True, description="Scale to mean 0 and variance 1 over all tokens.")


class GRPOAdvantage(Method):
    """Reward relative to the group (arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    baseline: Literal["group", "batch", "task", "none"] = Field(
        "group",
        description="Mean that is taken off: the group's, the batch's, that of the task's samples in "
        "the batch (several tasks), or nothing.",
    )
    leave_one_out: bool = Field(False, description="The mean is over the other samples only.")
    normalize: Literal["group", "batch", "task", "none"] = Field(
        "group",
        description="Divide by the standard deviation of the group, the batch, the task, or nothing.",
    )
    epsilon: Epsilon = 1e-6
    lone: Lone = "reward"


class DrGRPOAdvantage(Method):
    """Reward minus the group's mean, not divided (arXiv:2503.20783)."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    lone: Lone = "reward"


class PassKAdvantage(Method):
    """Only the group's best sample, by its lead over the second (arXiv:2503.19595)."""

    kind: Literal["grpo_passk"] = "grpo_passk"
    normalize: bool = Field(True, description="Divide by the group's standard deviation.")
    epsilon: Epsilon = 1e-6


class RLOOAdvantage(Method):
    """Reward minus the mean of the group's other samples (arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"
    lone: Lone = "reward"


class OPOAdvantage(Method):
    """Reward minus the group's length-weighted mean (arXiv:2505.23585)."""

    kind: Literal["opo"] = "opo"
    lone: Lone = "reward"


class ReinforcePlusPlusAdvantage(Method):
    """Discounted returns, whitened over all tokens (arXiv:2501.03262)."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")


class ReinforcePlusPlusBaselineAdvantage(Method):
    """Reward minus the group's mean, whitened over all tokens (arXiv:2501.03262)."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    lone: Lone = "reward"


class ReinforceAdvantage(Method):
    """Discounted returns without a baseline."""

    kind: Literal["reinforce"] = "reinforce"
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")


class ReMaxAdvantage(Method):
    """Return minus the reward of the greedy completion (arXiv:2310.10505)."""

    kind: Literal["remax"] = "remax"


class GPGAdvantage(Method):
    """Reward minus the group's mean, scaled up for samples without reward (arXiv:2504.02546)."""

    kind: Literal["gpg"] = "gpg"
    scale: float = Field(1.0, gt=0, description="Divisor of the advantages.")
    lone: Lone = "reward"


class CPGDAdvantage(Method):
    """Reward minus the group's mean, weighted by prompt (arXiv:2505.12504)."""

    kind: Literal["cpgd"] = "cpgd"
    weight: Literal["equal", "std", "filter"] = Field(
        "filter",
        description="1; one over the group's standard deviation; or samples over samples in "
        "groups with variance.",
    )
    cap: float = Field(2.0, ge=1, description="Largest weight of `filter`.")
    epsilon: Epsilon = 1e-6


class GDPOAdvantage(Method):
    """Each reward component relative to its group, then added (arXiv:2601.05242)."""

    kind: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] = Field(
        default_factory=dict, description="Weight of each reward component by name; 1 if not named."
    )
    normalize: bool = Field(True, description="Divide by the group's standard deviation.")
    epsilon: Epsilon = 1e-6
    over: Literal["tokens", "samples"] = Field(
        "tokens", description="The sum is scaled over all tokens (as verl) or samples (as TRL)."
    )
    lone: Lone = "reward"


class MaxRLAdvantage(Method):
    """Reward minus the group's mean, divided by it (arXiv:2602.02710); for rewards >= 0."""

    kind: Literal["maxrl"] = "maxrl"
    epsilon: float = Field(1e-6, ge=0, description="Added to the mean.")


class GiGPOAdvantage(Method):
    """The episode in its group plus the turn among equal states (arXiv:2505.10978)."""

    kind: Literal["gigpo"] = "gigpo"
    gamma: float = Field(0.95, ge=0, le=1, description="Discount per turn.")
    step_weight: float = Field(1.0, ge=0, description="Weight of the turn's advantage.")
    normalize: bool = Field(False, description="Divide by the standard deviations.")
    epsilon: Epsilon = 1e-6
    among: Literal["group", "batch"] = Field(
        "group",
        description="Turns are compared with those of the group that began in an equal state (the "
        "paper), or with those of the whole batch.",
    )


class OptimalTokenBaselineAdvantage(Method):
    """Return minus a baseline for each position (arXiv:2602.07078)."""

    kind: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    zero_tail: bool = Field(
        True, description="No baseline where one response is longer than all others of its group."
    )
    epsilon: float = Field(1e-8, ge=0, description="Added to the weights' sum.")


class MultiTurnOptimalTokenBaselineAdvantage(Method):
    """As optimal_token_baseline, with positions that skip tool output (arXiv:2602.07078)."""

    kind: Literal["multi_turn_optimal_token_baseline"] = "multi_turn_optimal_token_baseline"
    zero_tail: bool = Field(
        True, description="No baseline where one response is longer than all others of its group."
    )
    epsilon: float = Field(1e-8, ge=0, description="Added to the weights' sum.")


class TreeAdvantage(Method):
    """Reward against the mean of each subtree that the completion is in (arXiv:2508.17445)."""

    kind: Literal["tree"] = "tree"
    weight: Literal["group_size", "average"] = Field(
        "group_size", description="Subtrees count by their completions, or all alike."
    )
    drop_equal_subgroups: bool = Field(
        False, description="Leave out subtrees below the group whose rewards are all equal."
    )
    scale: Literal["none", "prompt_std"] = Field(
        "none", description="Divide by the standard deviation of the group's rewards, or not."
    )
    epsilon: Epsilon = 1e-6
    lone: Lone = "reward"
    whiten: Whiten = True
    prefix_weight: PrefixWeight = "per_leaf"


class TreeSegmentAdvantage(Method):
    """What each segment adds to the value of the node before it (arXiv:2508.17445)."""

    kind: Literal["tree_segment"] = "tree_segment"
    discount: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Of the value before, for each segment from there to the path's end.",
    )
    whiten: Whiten = True
    prefix_weight: PrefixWeight = "per_leaf"


class TreeSiblingAdvantage(Method):
    """Each segment against the others that follow the same node (arXiv:2505.23564)."""

    kind: Literal["tree_sibling"] = "tree_sibling"
    lone: Lone = "reward"
    whiten: Whiten = False
    prefix_weight: PrefixWeight = "per_leaf"


Advantage = Annotated[
    GRPOAdvantage
    | DrGRPOAdvantage
    | GAEAdvantage
    | PassKAdvantage
    | RLOOAdvantage
    | OPOAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | ReinforceAdvantage
    | ReMaxAdvantage
    | GPGAdvantage
    | CPGDAdvantage
    | GDPOAdvantage
    | MaxRLAdvantage
    | GiGPOAdvantage
    | OptimalTokenBaselineAdvantage
    | MultiTurnOptimalTokenBaselineAdvantage
    | TreeAdvantage
    | TreeSegmentAdvantage
    | TreeSiblingAdvantage
    | UserFunction,
    Field(discriminator="kind"),
]
