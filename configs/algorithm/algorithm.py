"""The algorithm: advantages, policy loss, KL, entropy, correction, shaping and selection.

A choice is a model with the method's name as its `kind` and the method's parameters as its fields;
the functions of the same names are in engines/algorithms/, their equations in docs/algorithms.md.
"""

from typing import Literal

from pydantic import Field, model_validator

from configs.algorithm.advantages import Advantage, GRPOAdvantage
from configs.algorithm.corrections import (
    CorrectionStep,
    SelectionStep,
    ShapingConfig,
    WeightCorrection,
)
from configs.algorithm.losses import ClippedLoss, Loss
from configs.base import Settings

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "row-mean-token-mean",
    "row-mean-token-sum",
]

SEQUENCE_LOSSES = ("gspo", "luspo", "gmpo", "vespo")  # which look at a response as a whole
UNBOUNDED_LOSSES = ("gpg", "reinforce")  # without a ratio, and so without a bound on it


class KLConfig(Settings):
    """The penalty for leaving the reference policy."""

    coefficient: float = Field(
        0.0, ge=0, description="Weight of the KL term; 0 needs no reference."
    )
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = Field(
        "k3", description="Estimator per token; a + form has its value and the gradient of k2."
    )
    placement: Literal["loss", "reward"] = Field(
        "loss", description="Added to the loss, or taken off the token rewards."
    )
    unbiased: bool = Field(
        False, description="In the loss: multiply by the ratio to the old policy (DeepSeek-V3.2)."
    )
    controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="Whether the coefficient follows the measured KL (arXiv:1909.08593)."
    )
    target: float = Field(6.0, gt=0, description="KL the adaptive controller aims at, in nats.")
    horizon: int = Field(10000, gt=0, description="Adaptive controller's time scale, in samples.")

    @model_validator(mode="after")
    def _reward_has_no_gradient(self) -> "KLConfig":
        if self.placement == "reward" and self.estimator.endswith("+"):
            raise ValueError(
                f"kl.estimator = {self.estimator} changes only gradients, and a KL in the reward "
                f"has none. Set kl.estimator = {self.estimator.removesuffix('+')}."
            )
        return self


class EntropyConfig(Settings):
    """The bonus for keeping the policy undecided."""

    coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    floor: float | None = Field(
        None,
        gt=0,
        description="Only tokens whose entropy is below this, in nats, get the bonus; none: all.",
    )
    top_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the tokens, by entropy, whose policy loss counts (arXiv:2506.01939).",
    )


class CriticConfig(Settings):
    """The critic's loss, for advantages that need a critic."""

    clip: float | None = Field(
        0.2, gt=0, description="Bound on a value's change per step; none is off."
    )
    aggregation: Aggregation = Field(
        "token-mean", description="How the losses of tokens become one number."
    )


class AlgorithmConfig(Settings):
    """What is optimised. How (optimizer, precision, batching) is in `train`."""

    advantage: Advantage = Field(GRPOAdvantage(), description="How rewards become advantages.")
    loss: Loss = Field(ClippedLoss(), description="The policy loss.")
    aggregation: Aggregation = Field(
        "token-mean", description="How the losses of tokens become one number."
    )
    ratio_against: Literal["old_logprobs", "rollout_logprobs"] = Field(
        "old_logprobs",
        description="Policy in the ratio's denominator: the trainer's at the start of the step, or "
        "the rollout engine's (bypass: the ratio itself corrects, weights are not applied).",
    )
    proximal: Literal["recompute", "loglinear"] = Field(
        "recompute",
        description="Log-probs of the policy before the update: its own (when they are computed: "
        "train.recompute_old_logprobs), or interpolated between those of the policy that sampled a "
        "token and the one in training, by their versions, without a pass (needs max_staleness > 0).",
    )
    kl: KLConfig = Field(KLConfig(), description="KL to the reference policy.")
    entropy: EntropyConfig = Field(EntropyConfig(), description="Entropy bonus.")
    critic: CriticConfig = Field(CriticConfig(), description="Loss of the critic, where one is.")
    correction: tuple[CorrectionStep, ...] = Field(
        (), description="Corrections for the gap between rollout engine and trainer, in order."
    )
    shaping: ShapingConfig = Field(ShapingConfig(), description="Changes to the rewards.")
    selection: tuple[SelectionStep, ...] = Field(
        (), description="Which samples are trained on, by their rewards; applied in order."
    )

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages need a critic's values."""
        return self.advantage.kind == "gae"

    @property
    def needs_baselines(self) -> bool:
        """Whether each prompt's greedy completion must be sampled and scored too."""
        return self.advantage.kind == "remax"

    @property
    def compares_subtrees(self) -> bool:
        """Whether the advantages compare completions within the subtrees of a tree."""
        return self.advantage.kind in ("tree", "tree_segment", "tree_sibling")

    @property
    def chooses_tokens(self) -> bool:
        """Whether the loss chooses tokens over a whole mini-batch."""
        return self.entropy.top_share < 1 or self.loss.kind in ("clip_cov", "kl_cov", "m2po")

    @property
    def needs_squares(self) -> bool:
        """Whether sum_pi_squared must be a column before the advantages."""
        return self.advantage.kind.endswith("optimal_token_baseline")

    @property
    def corrects_for_behavior(self) -> bool:
        """Whether the loss takes account of the policy that sampled, where it is an older one."""
        if self.loss.kind in ("decoupled", "function"):  # a user's loss may do anything
            return True
        if self.ratio_against == "rollout_logprobs":
            return self.loss.kind not in UNBOUNDED_LOSSES
        return bool(self.correction)

    @property
    def needs_reference(self) -> bool:
        """Whether ref_logprobs are needed."""
        return self.kl.coefficient > 0

    @property
    def needs_stored_logprobs(self) -> bool:
        """Whether old_logprobs must be a column before the advantages, not those of the update."""
        in_reward = self.needs_reference and self.kl.placement == "reward"
        return self.needs_squares or self._normalizes or in_reward

    @property
    def _normalizes(self) -> bool:
        """Whether a correction is divided by its mean over the batch."""
        return any(isinstance(s, WeightCorrection) and s.normalize for s in self.correction)

    @model_validator(mode="after")
    def _mean_weight_exists(self) -> "AlgorithmConfig":
        if self._normalizes and self.ratio_against == "rollout_logprobs":
            raise ValueError(
                "algorithm.correction with normalize = true needs weights that are known before the "
                "update, but with algorithm.ratio_against = rollout_logprobs they change with every "
                "optimizer step. Set normalize = false, or ratio_against = old_logprobs."
            )
        return self

    @model_validator(mode="after")
    def _proximal_is_needed(self) -> "AlgorithmConfig":
        if self.proximal == "recompute":
            return self
        if self.ratio_against == "rollout_logprobs":
            raise ValueError(
                "algorithm.proximal = loglinear interpolates the proximal policy, which "
                "algorithm.ratio_against = rollout_logprobs does not use. Set proximal = recompute, "
                "or ratio_against = old_logprobs."
            )
        if self.needs_stored_logprobs:
            raise ValueError(
                "algorithm.proximal = loglinear spares the log-probs before the update, but the "
                "token baselines, a KL in the reward or of a teacher as an advantage, and normalised "
                "corrections need them, and then the exact ones are there. Set algorithm.proximal = "
                "recompute."
            )
        return self

    @model_validator(mode="after")
    def _shared_tokens_have_one_row(self) -> "AlgorithmConfig":
        if getattr(self.advantage, "prefix_weight", "per_leaf") == "per_leaf":
            return self
        chosen = "algorithm.advantage.prefix_weight = once trains a shared token in one completion"
        level = getattr(self.loss, "level", "token")
        if self.loss.kind in SEQUENCE_LOSSES or level == "sequence":
            raise ValueError(
                f"{chosen}, and algorithm.loss.kind = {self.loss.kind} takes the ratio of whole "
                "completions. Set prefix_weight = per_leaf, or algorithm.loss.kind = clipped."
            )
        if self.aggregation not in ("token-mean", "token-sum"):
            raise ValueError(
                f"{chosen}, and algorithm.aggregation = {self.aggregation} weighs tokens by the "
                "length of theirs. Set prefix_weight = per_leaf, or algorithm.aggregation = "
                "token-mean."
            )
        return self

    @model_validator(mode="after")
    def _penalties_reach_the_advantages(self) -> "AlgorithmConfig":
        if self.advantage.kind == "gdpo" and self.needs_reference and self.kl.placement == "reward":
            raise ValueError(
                "algorithm.advantage.kind = gdpo compares the reward functions one by one, and a KL "
                "in the reward belongs to none of them. Set algorithm.kl.placement = loss."
            )
        return self
