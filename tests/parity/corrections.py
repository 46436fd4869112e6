"""Adapters for rollout_correction.json: verl's rollout correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from configs.algorithm.corrections import BandCorrection, RejectCorrection, TruncateCorrection
from engines.algorithms.aggregation import Rows
from engines.algorithms.rollout_correction import CORRECTIONS, Mismatch, correct, correction_metrics
from tests.parity.answers import Adapter, Answer, shaped
from tests.parity.vectors import Case


def weight_choice(params: dict[str, Any]) -> TruncateCorrection | BandCorrection:
    """verl's threshold: a number truncates, "lower_upper" leaves out what is outside."""
    spec = params.get("rollout_is_threshold", 2.0)
    if isinstance(spec, bool):
        raise ValueError(f"a threshold is a number, not {spec}")
    parts = [float(part) for part in str(spec).split("_", 1)]
    common = {
        "level": params.get("rollout_is", "token"),
        "normalize": params.get("rollout_is_batch_normalize", False),
    }
    if len(parts) == 2:
        return BandCorrection(lower=parts[0], upper=parts[1], **common)
    return TruncateCorrection(upper=parts[0], **common)


def reject_choices(params: dict[str, Any]) -> list[RejectCorrection]:
    """verl's comma-separated options and thresholds."""
    options = list(dict.fromkeys(o.strip() for o in params["rollout_rs"].split(",") if o.strip()))
    spec = params.get("rollout_rs_threshold")
    if spec is None:
        raise ValueError("a rejection needs a threshold")
    thresholds = [part.strip() for part in str(spec).split(",") if part.strip()]
    if len(thresholds) == 1:
        thresholds = thresholds * len(options)
    choices = []
    for option, threshold in zip(options, thresholds, strict=True):
        parts = [float(part) for part in threshold.split("_", 1)]
        name = "token_binary_kl" if option == "binary_kl" else option
        lower = parts[0] if len(parts) == 2 else None
        choices.append(
            RejectCorrection.model_validate({"statistic": name, "lower": lower, "upper": parts[-1]})
        )
    return choices


def weights_and_metrics(
    mismatch: Mismatch, choice: TruncateCorrection | BandCorrection
) -> tuple[Tensor, dict[str, float]]:
    """Weights, and their metrics under the reference's names."""
    step = (CORRECTIONS[choice.kind], choice.arguments())
    metrics = correction_metrics(mismatch, [step])
    if choice.kind != "band":
        metrics.pop("weight_oob_ratio", None)
    if not choice.normalize:
        metrics.pop("weight_batch_norm_factor", None)
    function, arguments = step
    return function(mismatch, **arguments), renamed(metrics, "weight_", "rollout_is_")


def kept_and_metrics(
    mismatch: Mismatch, choices: list[RejectCorrection]
) -> tuple[Tensor, dict[str, float]]:
    """Mask after rejection, and its metrics under the reference's names."""
    steps = [(CORRECTIONS["reject"], choice.arguments()) for choice in choices]
    _, kept = correct(mismatch, steps)
    return kept, renamed(correction_metrics(mismatch, steps), "reject_", "rollout_rs_")


def renamed(metrics: dict[str, float], ours: str, theirs: str) -> dict[str, float]:
    """Those whose name begins with `ours`, under the reference's names."""
    return {
        name.replace(ours, theirs, 1): value
        for name, value in metrics.items()
        if name.startswith(ours)
    }


def rollout_corrected(
    rows: Rows, mask: Tensor, logprobs: Tensor, rollout: Tensor, params: dict[str, Any]
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Weights (None: not asked for), mask, metrics with the reference's prefix."""
    mismatch = Mismatch(rows=rows, mask=mask, logprobs=logprobs, rollout_logprobs=rollout)
    weights, kept, metrics = None, mask, correction_metrics(mismatch, [])
    if params.get("rollout_is") and params.get("rollout_is_threshold", 2.0) is not None:
        weights, more = weights_and_metrics(mismatch, weight_choice(params))
        metrics |= more
    if params.get("rollout_rs"):
        kept, more = kept_and_metrics(mismatch, reject_choices(params))
        metrics |= more
    return weights, kept, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def ratio_mismatch(case: Case) -> Mismatch:
    """The mismatch of a given log ratio."""
    ratio = case.flat("log_ratio")
    return Mismatch(
        rows=case.rows(),
        mask=case.mask(),
        logprobs=ratio,
        rollout_logprobs=torch.zeros_like(ratio),
    )


def weights_case(case: Case) -> Answer:
    weights, metrics = weights_and_metrics(ratio_mismatch(case), weight_choice(case.params))
    return {"rollout_is_weights": shaped(weights, case), "metrics": metrics}


def rejection_case(case: Case) -> Answer:
    kept, metrics = kept_and_metrics(ratio_mismatch(case), reject_choices(case.params))
    return {"modified_response_mask": shaped(kept, case), "metrics": metrics}


def combined_case(case: Case) -> Answer:
    weights, kept, metrics = rollout_corrected(
        case.rows(),
        case.mask(),
        case.flat("old_log_prob"),
        case.flat("rollout_log_prob"),
        case.params,
    )
    return {
        "rollout_is_weights": None if weights is None else shaped(weights, case),
        "modified_response_mask": shaped(kept, case),
        "metrics": metrics,
    }


def offpolicy_case(case: Case) -> Answer:
    mismatch = Mismatch(
        rows=case.rows(),
        mask=case.mask(),
        logprobs=case.flat("old_log_prob"),
        rollout_logprobs=case.flat("rollout_log_prob"),
    )
    return {"metrics": correction_metrics(mismatch, [])}


ADAPTERS: dict[str, Adapter] = {
    "rollout_correction_weights": weights_case,
    "rollout_rejection_mask": rejection_case,
    "rollout_correction_and_rejection_mask": combined_case,
    "offpolicy_metrics": offpolicy_case,
}
