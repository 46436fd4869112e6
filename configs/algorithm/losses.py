"""Policy losses; their functions are listed in engines/algorithms/losses.py."""

from typing import Annotated, Literal

from pydantic import Field

from configs.base import Method, UserFunction

ClipLow = Annotated[float, Field(ge=0, description="The ratio is bounded below by 1 - this.")]
ClipHigh = Annotated[float, Field(ge=0, description="The ratio is bounded above by 1 + this.")]
Level = Annotated[
    Literal["token", "sequence"],
    Field(description="One ratio per token, or the geometric mean over the response."),
]


class ClippedLoss(Method):
    """PPO's clipped loss (arXiv:1707.06347), with clip-higher and dual clip."""

    kind: Literal["clipped"] = "clipped"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28
    dual_clip: float | None = Field(
        3.0, gt=1, description="Bound on the ratio where the advantage is negative; none is off."
    )
    ratio_cap: float | None = Field(
        None, gt=0, description="Bound from above on the ratio that is not clipped; none is off."
    )
    level: Level = "token"


class DecoupledLoss(Method):
    """Decoupled PPO: proximal and behaviour policy apart (arXiv:2110.00641, arXiv:2505.24298)."""

    kind: Literal["decoupled"] = "decoupled"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28
    dual_clip: float | None = Field(
        None, gt=1, description="Bound on the ratio where the advantage is negative; none is off."
    )
    weight_cap: float | None = Field(
        5.0, gt=0, description="Tokens whose behaviour weight is above this are left out."
    )


class GSPOLoss(Method):
    """PPO's clip on the geometric mean of a row's ratios (arXiv:2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class CISPOLoss(Method):
    """The clipped, detached ratio on the policy gradient (arXiv:2506.13585)."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(
        None, ge=0, description="The ratio is bounded below by 1 - this; none is off, as the paper."
    )
    clip_high: ClipHigh = 0.28
    level: Level = "token"


class SAPOLoss(Method):
    """A sigmoid gate instead of a clip (arXiv:2511.20347)."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0, description="Steepness where the advantage is positive.")
    tau_negative: float = Field(1.05, gt=0, description="Steepness where it is not.")
    level: Level = "token"


class GMPOLoss(Method):
    """The geometric mean of clipped ratios (arXiv:2507.20673)."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, ge=0, description="The log ratio is bounded below by minus this.")
    clip_high: float = Field(0.4, ge=0, description="The log ratio is bounded above by this.")


class LUSPOLoss(Method):
    """The clipped loss summed over each row's tokens (arXiv:2602.05261)."""

    kind: Literal["luspo"] = "luspo"
    clip_low: ClipLow = 2e-3
    clip_high: ClipHigh = 2.5e-3
    level: Level = "sequence"


class VESPOLoss(Method):
    """A gamma kernel on the row's importance weight (arXiv:2602.10693)."""

    kind: Literal["vespo"] = "vespo"
    k_positive: float = Field(2.0, gt=0, description="Kernel's shape where the advantage is >= 0.")
    lambda_positive: float = Field(3.0, gt=0, description="Kernel's rate where it is >= 0.")
    k_negative: float = Field(3.0, gt=0, description="Kernel's shape where it is negative.")
    lambda_negative: float = Field(2.0, gt=0, description="Kernel's rate where it is negative.")


class ClipCovLoss(Method):
    """Tokens of high covariance are left out (arXiv:2505.22617)."""

    kind: Literal["clip_cov"] = "clip_cov"
    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 1.0
    ratio: float = Field(2e-4, gt=0, le=1, description="Share of tokens that may be left out.")
    lower: float = Field(1.0, description="Covariance from which a token may be left out.")
    upper: float = Field(5.0, description="Covariance up to which it may.")


class KLCovLoss(Method):
    """Tokens of highest covariance are penalised for changing (arXiv:2505.22617)."""

    kind: Literal["kl_cov"] = "kl_cov"
    ratio: float = Field(2e-3, gt=0, le=1, description="Share of tokens that are penalised.")
    coefficient: float = Field(1.0, ge=0, description="Weight of the penalty.")


class DPPOTVLoss(Method):
    """Trust region by total variation of the token (arXiv:2602.04879)."""

    kind: Literal["dppo_tv"] = "dppo_tv"
    divergence_low: float = Field(0.15, ge=0, description="Largest loss of probability.")
    divergence_high: float = Field(0.15, ge=0, description="Largest gain of probability.")
    ratio_cap: float = Field(20.0, gt=1, description="Bound on the ratio from above.")


class DPPOKLLoss(Method):
    """Trust region by binary KL of the token (arXiv:2602.04879)."""

    kind: Literal["dppo_kl"] = "dppo_kl"
    divergence_low: float = Field(0.05, ge=0, description="Largest KL of a falling token, nats.")
    divergence_high: float = Field(0.05, ge=0, description="Largest KL of a rising token, nats.")
    ratio_cap: float = Field(20.0, gt=1, description="Bound on the ratio from above.")


class DROLoss(Method):
    """A quadratic penalty on the log ratio (arXiv:2405.19107)."""

    kind: Literal["dro"] = "dro"
    beta: float = Field(0.05, gt=0, description="Weight of the penalty.")


class CPGDLoss(Method):
    """A clipped log ratio and a drift term (arXiv:2505.12504)."""

    kind: Literal["cpgd"] = "cpgd"
    clip_low: float = Field(0.2, ge=0, lt=1, description="The ratio is bounded below by 1 - this.")
    clip_high: ClipHigh = 0.2
    drift_coefficient: float = Field(0.1, ge=0, description="Weight of the drift term.")
    drift_cap: float = Field(1.0, gt=0, description="Largest slope of the drift term.")


class M2POLoss(Method):
    """The second moment of the log ratio is bounded (arXiv:2510.01161)."""

    kind: Literal["m2po"] = "m2po"
    threshold: float = Field(0.04, gt=0, description="Bound on the mean of (log ratio)^2.")


class GPGLoss(Method):
    """Plain policy gradient (arXiv:2504.02546)."""

    kind: Literal["gpg"] = "gpg"


class ReinforceLoss(Method):
    """Plain policy gradient."""

    kind: Literal["reinforce"] = "reinforce"


Loss = Annotated[
    ClippedLoss
    | DecoupledLoss
    | GSPOLoss
    | CISPOLoss
    | SAPOLoss
    | GMPOLoss
    | LUSPOLoss
    | VESPOLoss
    | ClipCovLoss
    | KLCovLoss
    | DPPOTVLoss
    | DPPOKLLoss
    | DROLoss
    | CPGDLoss
    | M2POLoss
    | GPGLoss
    | ReinforceLoss
    | UserFunction,
    Field(discriminator="kind"),
]
