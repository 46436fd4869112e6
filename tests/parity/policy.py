"""Adapters for policy_losses.json: verl's losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from configs.algorithm import losses as settings
from configs.base import Method
from engines.algorithms.aggregation import aggregate
from engines.algorithms.inputs import PolicyBatch
from engines.algorithms.losses import POLICY_LOSSES
from tests.parity.answers import Adapter, Answer, leaf, mode_of, normaliser, shaped
from tests.parity.corrections import rollout_corrected
from tests.parity.vectors import Case

CLIP = {"pg_clipfrac": "clip_share", "ppo_kl": "kl_old", "pg_clipfrac_lower": "dual_clip_share"}
CAPPED = CLIP | {"pg_clipfrac_lower": "ratio_cap_share"}
SIDES = CLIP | {"pg_clipfrac": "clip_share_high", "pg_clipfrac_lower": "clip_share_low"}
COVARIANCE = {"pg_clipfrac": "covariance_share", "ppo_kl": "kl_old"}
CHANGE = {"ppo_kl": "log_ratio_abs"}


def policy_batch(case: Case) -> PolicyBatch:
    return PolicyBatch(
        rows=case.rows(),
        mask=case.mask(),
        logprobs=leaf(case.flat("log_prob")),
        advantages=case.flat("advantages"),
        old_logprobs=case.flat("old_log_prob"),
        weights=case.optional("rollout_is_weights"),
    )


def weighed(case: Case, batch: PolicyBatch, choice: Method) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics of a recipe's choice, with weights and counts as the objective has them."""
    method = POLICY_LOSSES[choice.model_dump()["kind"]]
    result = method.loss(batch, **choice.arguments())
    values = result.values
    if batch.weights is not None and not method.own_weights:
        values = values * batch.under_mask(batch.weights)
    mode = method.aggregation or mode_of(case)
    counts = normaliser(batch.mask, batch.rows, case.params.get("global_batch_info") or {}, mode)
    return aggregate(values, batch.mask, batch.rows, counts, mode), result.metrics.values()


def adapter(make: Callable[[dict[str, Any]], Method], names: Mapping[str, str]) -> Adapter:
    """The adapter that makes a recipe's choice; names: the reference's metrics in our words."""

    def answer(case: Case) -> Answer:
        choice = make(case.params)
        batch = policy_batch(case)
        loss, metrics = weighed(case, batch, choice)
        return _answer(case, batch, loss, {n: metrics.get(o, 0.0) for n, o in names.items()})

    return answer


def _answer(case: Case, batch: PolicyBatch, loss: Tensor, metrics: Mapping[str, float]) -> Answer:
    loss.backward()
    assert batch.logprobs.grad is not None
    return {
        "loss": loss,
        "grad_log_prob": shaped(batch.logprobs.grad, case),
        "metrics": {f"actor/{name}": value for name, value in metrics.items()},
    }


def bypass_mode(case: Case) -> Answer:
    """Rejection and weights from the current policy, then PPO's loss without, or REINFORCE with."""
    batch = policy_batch(case)
    options = case.params["policy_loss"]["rollout_correction"]
    weights, kept, metrics = rollout_corrected(
        case.rows(), case.mask(), batch.logprobs.detach(), case.flat("old_log_prob"), options
    )
    reinforce = options.get("loss_type", "ppo_clip") == "reinforce"
    batch = dataclasses.replace(batch, mask=kept, weights=weights if reinforce else None)
    choice = settings.ReinforceLoss() if reinforce else _clipped(case.params)
    loss, own = weighed(case, batch, choice)
    names = {"ppo_kl": "kl_old"} if reinforce else CLIP
    answer = dict(_answer(case, batch, loss, {n: own[o] for n, o in names.items()}))
    answer["metrics"] |= metrics
    return answer


def _bounds(
    params: dict[str, Any], names: tuple[str, str] = ("clip_low", "clip_high")
) -> dict[str, Any]:
    default = params.get("clip_ratio", 0.2)
    given = (params.get("clip_ratio_low"), params.get("clip_ratio_high"))
    return {n: default if v is None else v for n, v in zip(names, given, strict=True)}


def _clipped(params: dict[str, Any]) -> Method:
    return settings.ClippedLoss(dual_clip=params.get("clip_ratio_c", 3.0), **_bounds(params))


def _divergences(params: dict[str, Any]) -> dict[str, float]:
    names = ("divergence_low", "divergence_high")
    return {"ratio_cap": params.get("clip_ratio_c", 20.0)} | _bounds(params, names)


def _clip_cov(params: dict[str, Any]) -> Method:
    own = params.get("policy_loss", {})
    return settings.ClipCovLoss(
        ratio=own.get("clip_cov_ratio", 2e-4),
        lower=own.get("clip_cov_lb", 1.0),
        upper=own.get("clip_cov_ub", 5.0),
        **_bounds(params),
    )


def _kl_cov(params: dict[str, Any]) -> Method:
    own = params.get("policy_loss", {})
    return settings.KLCovLoss(
        ratio=own.get("kl_cov_ratio", 2e-4), coefficient=own.get("ppo_kl_coef", 1.0)
    )


def _sapo(params: dict[str, Any]) -> Method:
    return settings.SAPOLoss(
        tau_positive=params.get("tau_pos", 1.0), tau_negative=params.get("tau_neg", 1.05)
    )


ADAPTERS: dict[str, Adapter] = {
    "vanilla": adapter(_clipped, CLIP),
    "gspo": adapter(lambda p: settings.GSPOLoss(**_bounds(p)), CLIP),
    "sapo": adapter(_sapo, CLIP),
    "gpg": adapter(lambda p: settings.GPGLoss(), {}),
    "clip_cov": adapter(_clip_cov, COVARIANCE),
    "kl_cov": adapter(_kl_cov, CHANGE),
    "geo_mean": adapter(lambda p: settings.GMPOLoss(**_bounds(p)), SIDES),
    "dppo_tv": adapter(lambda p: settings.DPPOTVLoss(**_divergences(p)), CAPPED),
    "dppo_kl": adapter(lambda p: settings.DPPOKLLoss(**_divergences(p)), CAPPED),
    "dro": adapter(
        lambda p: settings.DROLoss(beta=p.get("policy_loss", {}).get("dro_beta", 0.0)),
        {"ppo_kl": "kl_old"},
    ),
    "cispo": adapter(lambda p: settings.CISPOLoss(**_bounds(p)), CLIP),
    "reinforce": adapter(lambda p: settings.ReinforceLoss(), {"ppo_kl": "kl_old"}),
    "bypass_mode": bypass_mode,
}
