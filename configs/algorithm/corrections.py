"""Behaviour-policy corrections, reward shaping and selection of samples.

The functions of these names are listed in engines/algorithms/rollout_correction.py,
engines/algorithms/reward_shaping.py, engines/algorithms/sample_selection.py.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from configs.base import Method, Settings, UserFunction

Bound = Annotated[float, Strict(), Field(gt=0)]


class WeightCorrection(Method):
    """Importance weights between the policy that generated and the policy that trains."""

    level: Literal["token", "sequence"] = Field(
        "token", description="The token's ratio, or the product over the response."
    )
    lower: Bound | None = Field(None, description="Smallest weight; none is off.")
    upper: Bound | None = Field(2.0, description="Largest weight; none is off.")
    normalize: bool = Field(
        False, description="Divide by the mean weight; needs stored old_logprobs."
    )

    @model_validator(mode="after")
    def _ordered(self) -> "WeightCorrection":
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(
                f"a correction's lower = {self.lower} is above upper = {self.upper}. Swap them."
            )
        return self


class TruncateCorrection(WeightCorrection):
    """Truncated importance sampling: weights outside the bounds are set to the bound."""

    kind: Literal["truncate"] = "truncate"


class BandCorrection(WeightCorrection):
    """IcePop: weights outside the bounds are set to 0 (arXiv:2510.18855)."""

    kind: Literal["band"] = "band"
    lower: Bound | None = Field(0.5, description="Smallest weight that counts; none is off.")
    upper: Bound | None = Field(5.0, description="Largest weight that counts; none is off.")


class RejectCorrection(Method):
    """Tokens or responses whose divergence is out of bounds are left out."""

    kind: Literal["reject"] = "reject"
    statistic: Literal[
        "token_k1",
        "token_k2",
        "token_k3",
        "token_binary_kl",
        "seq_sum_k1",
        "seq_sum_k2",
        "seq_sum_k3",
        "seq_mean_k1",
        "seq_mean_k2",
        "seq_mean_k3",
        "seq_max_k2",
        "seq_max_k3",
    ] = Field("seq_mean_k1", description="Over what, and which estimator of the divergence.")
    lower: Bound | None = Field(
        None, description="k1 only: smallest generating / training probability; none: 1 / upper."
    )
    upper: Bound = Field(
        1.001,
        description="Largest divergence in nats; for k1 largest generating / training probability.",
    )

    @model_validator(mode="after")
    def _lower_is_for_k1(self) -> "RejectCorrection":
        if self.lower is not None and not self.statistic.endswith("k1"):
            raise ValueError(
                f"statistic = {self.statistic} has no lower bound, but lower = {self.lower}. "
                "Leave lower out."
            )
        return self


class VetoCorrection(Method):
    """Responses with a token that the trained policy would hardly have written are left out."""

    kind: Literal["veto"] = "veto"
    floor: float = Field(
        1e-4, gt=0, lt=1, description="Smallest training / generating probability."
    )


class DPPOCorrection(Method):
    """Tokens that moved too far from the generating policy are left out (arXiv:2602.04879)."""

    kind: Literal["dppo"] = "dppo"
    measure: Literal["tv", "kl"] = Field("tv", description="Total variation or binary KL.")
    low: float = Field(0.15, ge=0, description="Bound where the advantage is not positive.")
    high: float = Field(0.15, ge=0, description="Bound where the advantage is positive.")


class OffPolicySequenceCorrection(Method):
    """Responses with negative advantage that drifted are left out (arXiv:2512.02556)."""

    kind: Literal["off_policy_sequence"] = "off_policy_sequence"
    threshold: float = Field(0.05, gt=0, description="Mean log ratio over the response, in nats.")


CorrectionStep = Annotated[
    TruncateCorrection
    | BandCorrection
    | RejectCorrection
    | VetoCorrection
    | DPPOCorrection
    | OffPolicySequenceCorrection
    | UserFunction,
    Field(discriminator="kind"),
]


class OverlongPenalty(Settings):
    """DAPO's soft overlong punishment (arXiv:2503.14476)."""

    max_tokens: int | None = Field(
        None, ge=1, description="Longest response in tokens; none: rollout.max_new_tokens."
    )
    buffer: int = Field(
        ge=1, description="Length of the zone in which the penalty grows, in tokens."
    )
    factor: float = Field(1.0, ge=0, description="Penalty at the zone's end.")
    floor: float | None = Field(
        -1.0, le=0, description="Penalty that is not exceeded beyond the zone; none: no bound."
    )

    @model_validator(mode="after")
    def _zone_fits(self) -> "OverlongPenalty":
        if self.max_tokens is not None and self.max_tokens < self.buffer:
            raise ValueError(
                f"overlong.buffer = {self.buffer} is longer than the longest response of "
                f"{self.max_tokens} tokens. Set overlong.buffer below it."
            )
        return self


class LengthPenalty(Settings):
    """Kimi k1.5's length reward: shorter than the group is better (arXiv:2501.12599)."""

    factor: float = Field(1.0, ge=0, description="Weight in the reward.")
    threshold: float = Field(
        0.0, description="Reward above which an answer counts as right and may gain by brevity."
    )


class RepetitionPenalty(Settings):
    """Penalty for repeated n-grams (arXiv:2502.03373)."""

    ngram: int = Field(3, ge=1, description="Length of the n-grams, in tokens.")
    factor: float = Field(1.0, ge=0, description="Penalty if every n-gram is the same.")


class ShapingConfig(Settings):
    """What is added to a sample's reward before the advantages."""

    overlong: OverlongPenalty | None = Field(None, description="Penalty for overlong responses.")
    length: LengthPenalty | None = Field(None, description="Reward for brevity in the group.")
    repetition: RepetitionPenalty | None = Field(None, description="Penalty for repetition.")
    truncated: Literal["keep", "mask", "zero"] = Field(
        "keep",
        description="A response that was cut off: train on it as it is, leave its tokens out of "
        "the loss, or give it reward 0.",
    )


class InformativeSelection(Method):
    """Dynamic sampling: groups whose rewards are all equal are left out (arXiv:2503.14476)."""

    kind: Literal["informative"] = "informative"
    keep_lone: bool = Field(True, description="Keep a group of one.")
    rewards: Literal["shaped", "given"] = Field(
        "shaped",
        description="Rewards that are compared: after shaping, or as the reward functions gave them.",
    )

    def arguments(self) -> dict[str, Any]:
        """Those of the rule; which rewards it sees is not its own affair."""
        return {"keep_lone": self.keep_lone}


class BestOfSelection(Method):
    """The best and the worst samples of each group."""

    kind: Literal["best_of"] = "best_of"
    best: int = Field(ge=0, description="Samples with the highest reward that are kept, per group.")
    worst: int = Field(0, ge=0, description="Samples with the lowest reward that are kept.")

    @model_validator(mode="after")
    def _keeps_some(self) -> "BestOfSelection":
        if not self.best + self.worst:
            raise ValueError("best_of with best = 0 and worst = 0 keeps no sample. Set best = 1.")
        return self


class TopPGroupsSelection(Method):
    """The groups that hold most of the rewards' deviation (arXiv:2504.20073)."""

    kind: Literal["top_p_groups"] = "top_p_groups"
    share: float = Field(0.9, gt=0, le=1, description="Share of all deviation that is kept.")


class SuccessRateSelection(Method):
    """Groups of which nearly all fail or nearly all succeed are left out (arXiv:2511.15605)."""

    kind: Literal["success_rate"] = "success_rate"
    low: float = Field(0.1, ge=0, le=1, description="Least share of successes of a kept group.")
    high: float = Field(0.9, ge=0, le=1, description="Largest share of successes of a kept group.")
    success: float = Field(
        1.0, description="Reward, before shaping, from which on a sample is a success."
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "SuccessRateSelection":
        if self.low > self.high:
            raise ValueError(
                f"success_rate.low = {self.low:g} is above success_rate.high = {self.high:g}, so no "
                "group is kept. Set low below high."
            )
        return self


SelectionStep = Annotated[
    InformativeSelection
    | BestOfSelection
    | TopPGroupsSelection
    | SuccessRateSelection
    | UserFunction,
    Field(discriminator="kind"),
]
