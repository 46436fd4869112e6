"""The algorithm: advantages, policy loss, KL, entropy, correction, shaping and selection.

A choice is a model with the method's name as its `kind` and the method's parameters as its fields;
the functions of the same names are in engines/.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.base import Settings

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class Method(Settings):
    """A choice by name; `arguments` are the keyword arguments of the function of that name."""

    def arguments(self) -> dict[str, Any]:
        """Field name -> value, without the name of the method."""
        return self.model_dump(exclude={"kind"})


class UserFunction(Method):
    """A user's own function, by import path."""

    kind: Literal["function"] = "function"
    path: str = Field(
        pattern=r"^[\w.]+:[\w.]+$",
        description="Import path of the function, package.module:name.",
    )
    params: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="Keyword arguments passed on every call."
    )

    def arguments(self) -> dict[str, Any]:
        """The user's own keyword arguments."""
        return dict(self.params)


class GRPOAdvantage(Method):
    """Reward minus the group's mean (arXiv:2402.03300; Dr. GRPO with normalize = none)."""

    kind: Literal["grpo"] = "grpo"
    normalize: Literal["group", "batch", "none"] = Field(
        "group",
        description="Divide by the standard deviation of the group, the batch, or nothing.",
    )
    epsilon: float = Field(1e-6, ge=0, description="Added to the standard deviation.")


class ClippedLoss(Method):
    """PPO's clipped loss (arXiv:1707.06347), with clip-higher and dual clip."""

    kind: Literal["clipped"] = "clipped"
    clip_low: float = Field(0.2, ge=0, le=1, description="Ratio is bounded below by 1 - this.")
    clip_high: float = Field(0.28, ge=0, description="Ratio is bounded above by 1 + this.")
    dual_clip: float | None = Field(
        3.0,
        gt=1,
        description="Bound on the ratio for negative advantages; none is off.",
    )


class ReinforceLoss(Method):
    """Plain policy gradient without a ratio."""

    kind: Literal["reinforce"] = "reinforce"


Advantage = Annotated[GRPOAdvantage | UserFunction, Field(discriminator="kind")]
Loss = Annotated[ClippedLoss | ReinforceLoss | UserFunction, Field(discriminator="kind")]


class KLConfig(Settings):
    """The penalty for leaving the reference policy."""

    coefficient: float = Field(
        0.0, ge=0, description="Weight of the KL term; 0 needs no reference."
    )
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = Field(
        "k3",
        description="Estimator per token; a + form has its value and the gradient of k2.",
    )
    placement: Literal["loss", "reward"] = Field(
        "loss", description="Added to the loss, or taken off the token rewards."
    )
    controller: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="Whether the coefficient follows the measured KL (arXiv:1909.08593).",
    )
    target: float = Field(
        6.0, gt=0, description="KL that the adaptive controller aims at, in nats."
    )
    horizon: int = Field(10000, gt=0, description="Adaptive controller's time scale, in samples.")


class EntropyConfig(Settings):
    """The bonus for keeping the policy undecided."""

    coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    floor: float | None = Field(
        None,
        gt=0,
        description="Only tokens whose entropy is below this, in nats, get the bonus; none: all.",
    )


class AlgorithmConfig(Settings):
    """What is optimised. How (optimizer, precision, batching) is in `train`."""

    advantage: Advantage = Field(GRPOAdvantage(), description="How rewards become advantages.")
    loss: Loss = Field(ClippedLoss(), description="The policy loss.")
    aggregation: Aggregation = Field(
        "token-mean", description="How the losses of tokens become one number."
    )
    kl: KLConfig = Field(KLConfig(), description="KL to the reference policy.")
    entropy: EntropyConfig = Field(EntropyConfig(), description="Entropy bonus.")

    @model_validator(mode="after")
    def _reward_kl_is_fixed_form(self) -> "AlgorithmConfig":
        if self.kl.placement == "reward" and self.kl.estimator.endswith("+"):
            raise ValueError(
                f"algorithm.kl.estimator = {self.kl.estimator} changes only gradients, and a KL in "
                "the reward has none. Set algorithm.kl.estimator = "
                f"{self.kl.estimator.removesuffix('+')}."
            )
        return self
