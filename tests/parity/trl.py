"""Adapters for trl_grpo.json: TRL's GRPO trainer put together from our pieces."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from configs.algorithm import advantages as settings
from engines.algorithms.advantages import ADVANTAGES
from engines.algorithms.aggregation import Normaliser, Rows, aggregate
from engines.algorithms.inputs import AdvantageBatch, PolicyBatch, TokenLoss
from engines.algorithms.kl import KL_ESTIMATORS
from engines.algorithms.losses import cispo, clipped, luspo, sapo, vespo
from engines.algorithms.objective import high_entropy
from engines.algorithms.rollout_correction import CORRECTIONS, Mismatch, off_policy_sequence
from engines.data.sample_metrics import SampleValues, sample_metrics
from tests.parity.answers import Adapter, Answer, leaf, shaped
from tests.parity.vectors import Case

DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "use_bias_correction_kl": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "max_completion_length": 256,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "entropy_coef": 0.0,
    "training": True,
}
AGGREGATION = {
    "grpo": "row-mean-token-mean",
    "sapo": "row-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "row-mean-token-sum",
}


def trl_batch(case: Case) -> PolicyBatch:
    """The completions; tool output is masked, an advantage per row is spread over it."""
    rows, mask = case.rows("completion_mask"), case.mask("completion_mask")
    if "tool_mask" in case.inputs:
        mask = mask & case.mask("tool_mask")
    advantages = case.tensor("advantages")
    flat = rows.spread(advantages) if advantages.dim() == 1 else advantages.reshape(-1)
    ratio = case.inputs.get("importance_sampling_ratio")
    weights = None
    if ratio is not None:
        weights = case.tensor("importance_sampling_ratio").expand(rows.count, -1)
        weights = weights.expand(-1, mask.numel() // rows.count).reshape(-1)
    return PolicyBatch(
        rows=rows,
        mask=mask,
        logprobs=leaf(case.flat("per_token_logps")),
        advantages=flat,
        old_logprobs=case.optional("old_per_token_logps"),
        ref_logprobs=case.optional("ref_per_token_logps"),
        entropy=leaf(case.flat("entropies")),
        weights=weights,
    )


def token_loss(batch: PolicyBatch, p: dict[str, Any]) -> TokenLoss:
    """The loss of every token by TRL's loss_type."""
    low, high = p["epsilon_low"], p["epsilon_high"]
    level = p["importance_sampling_level"]
    match p["loss_type"]:
        case "cispo":
            return cispo(batch, clip_low=None, clip_high=high - 1, level=level)
        case "sapo":
            return sapo(
                batch,
                tau_positive=p["sapo_temperature_pos"],
                tau_negative=p["sapo_temperature_neg"],
                level=level,
            )
        case "vespo":
            return vespo(
                batch,
                k_positive=p["vespo_k_pos"],
                lambda_positive=p["vespo_lambda_pos"],
                k_negative=p["vespo_k_neg"],
                lambda_negative=p["vespo_lambda_neg"],
            )
        case "luspo":
            return luspo(batch, clip_low=low, clip_high=high, level=level)
    cap = p["delta"]
    return clipped(batch, clip_low=low, clip_high=high, dual_clip=None, ratio_cap=cap, level=level)


def trl_loss_case(case: Case) -> Answer:
    case = dataclasses.replace(case, params=DEFAULTS | case.params)
    p, batch = case.params, trl_batch(case)
    result = token_loss(batch, p)
    values = result.values
    sampling = case.optional("sampling_per_token_logps")
    if p["off_policy_mask_threshold"] is not None:
        assert sampling is not None
        kept = off_policy_sequence(
            mismatch(batch, sampling), threshold=p["off_policy_mask_threshold"]
        )
        values = torch.where(kept, values, 0.0)
    assert batch.entropy is not None
    if p["top_entropy_quantile"] < 1:
        kept = high_entropy(batch.entropy.detach(), batch.mask, p["top_entropy_quantile"])
        values = torch.where(kept, values, 0.0)
    if batch.weights is not None and p["loss_type"] != "vespo":
        values = values * batch.under_mask(batch.weights)
    kl = torch.zeros_like(values)
    if p["beta"]:
        assert batch.ref_logprobs is not None
        kl = KL_ESTIMATORS["k3"](batch.logprobs, batch.ref_logprobs)
        kl = kl * log_ratio(batch, p).exp() if p["use_bias_correction_kl"] else kl
        values = values + p["beta"] * kl
    counts = trl_counts(case, batch)
    loss = aggregate(
        values, batch.mask, batch.rows, counts, AGGREGATION.get(p["loss_type"], "token-mean")
    )
    metrics = trl_metrics(batch, result, p, kl)
    if p["entropy_coef"]:
        metrics |= {"policy_loss": float(loss.detach()), "entropy_coef": p["entropy_coef"]}
        every = dataclasses.replace(counts, tokens=accumulated(case) * float(batch.mask.sum()))
        bonus = aggregate(batch.entropy, batch.mask, batch.rows, every, "token-mean")
        loss = loss - p["entropy_coef"] * bonus
    loss.backward()
    answer = {
        "loss": loss,
        "grad_per_token_logps": shaped(gradient(batch.logprobs), case, "completion_mask"),
        "metrics": metrics,
    }
    if p["entropy_coef"]:
        answer["grad_entropies"] = shaped(gradient(batch.entropy), case, "completion_mask")
    return answer


def gradient(leaf_tensor: Tensor) -> Tensor:
    return torch.zeros_like(leaf_tensor) if leaf_tensor.grad is None else leaf_tensor.grad


def log_ratio(batch: PolicyBatch, p: dict[str, Any]) -> Tensor:
    """Log ratio of the tokens, or the mean of the row."""
    ratio = batch.log_ratio(bound=None)
    if p["importance_sampling_level"] == "sequence":
        return batch.rows.spread(batch.rows.masked_mean(ratio, batch.mask))
    return ratio


def mismatch(batch: PolicyBatch, sampling: Tensor) -> Mismatch:
    return Mismatch(
        rows=batch.rows,
        mask=batch.mask,
        logprobs=batch.logprobs,
        rollout_logprobs=sampling,
        advantages=batch.advantages,
    )


def accumulated(case: Case) -> float:
    """Batches whose gradients are added up."""
    return case.params["gradient_accumulation_steps"] if case.params["training"] else 1.0


def trl_counts(case: Case, batch: PolicyBatch) -> Normaliser:
    """TRL's denominators: its own batch times the accumulated ones, or the count it was given."""
    p, times = case.params, accumulated(case)
    tokens = times * max(float(batch.mask.sum()), 1.0)
    if p["loss_type"] in ("dapo", "cispo", "vespo"):
        tokens = float(case.inputs["num_items_in_batch"])
        if p["training"]:  # the count is of all batches of a generation
            tokens *= times / p["steps_per_generation"]
    return Normaliser(
        tokens=tokens,
        sequences=times * batch.rows.count,
        rows=times * batch.rows.count,
        max_tokens=p["max_completion_length"],
    )


def trl_metrics(
    batch: PolicyBatch, result: TokenLoss, p: dict[str, Any], kl: Tensor
) -> dict[str, float]:
    """TRL's log entries from our metrics; its extremes are over rows."""
    ours = result.metrics.values()
    assert batch.entropy is not None
    whole = Normaliser.of(batch.mask, batch.rows)

    def mean(values: Tensor) -> float:
        return float(aggregate(values.detach(), batch.mask, batch.rows, whole, "token-mean"))

    metrics = {"entropy": mean(batch.entropy)}
    if p["beta"]:
        metrics["kl"] = mean(kl)
    if p["loss_type"] == "cispo":
        return metrics | {"cispo_clip_ratio": ours["clip_share_high"]}
    if p["loss_type"] == "sapo":
        return metrics
    rows = [one_row(batch, row) for row in range(batch.rows.count)]
    each = [token_loss(row, p).metrics.values() for row in rows]
    filled = [share for share, row in zip(each, rows, strict=True) if bool(row.mask.any())]
    if p["loss_type"] == "vespo":  # TRL's mean is over rows; the kernel of an empty one is 1
        total = sum(share["kernel"] for share in filled) + len(rows) - len(filled)
        return metrics | {"vespo/phi_seq_mean": total / len(rows)}
    low, high = ours["clip_share_low"], ours["clip_share_high"]
    if p["importance_sampling_level"] == "sequence":  # shares of rows, not of tokens
        low = sum(share["clip_share_low"] for share in each) / len(rows)
        high = sum(share["clip_share_high"] for share in each) / len(rows)
    return metrics | {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "clip_ratio/low_min": min(share["clip_share_low"] for share in filled),
        "clip_ratio/high_max": max(share["clip_share_high"] for share in filled),
    }


def one_row(batch: PolicyBatch, row: int) -> PolicyBatch:
    """A micro-batch of one row."""
    part = slice(int(batch.rows.offsets[row]), int(batch.rows.offsets[row + 1]))
    old = None if batch.old_logprobs is None else batch.old_logprobs[part]
    return PolicyBatch(
        rows=Rows.of_lengths(torch.tensor([part.stop - part.start])),
        mask=batch.mask[part],
        logprobs=batch.logprobs[part],
        advantages=batch.advantages[part],
        old_logprobs=old,
    )


def trl_advantages(case: Case) -> tuple[Tensor, dict[str, float]]:
    """Advantages [N] and TRL's log entries."""
    p, per_function = case.params, case.tensor("rewards_per_func")
    weights = torch.tensor(p["reward_weights"], dtype=case.dtype)
    count = per_function.shape[0]
    none = per_function.isnan().all(-1)
    rewards = torch.where(none, torch.nan, (per_function * weights).nansum(-1))
    names = [f"rewards/r{i}" for i in range(per_function.shape[1])]
    components = dict(zip(names, per_function.unbind(-1), strict=True))
    batch = AdvantageBatch(
        rows=Rows.of_lengths(torch.ones(count)),
        mask=torch.ones(count, dtype=torch.bool),
        rewards=rewards,
        groups=torch.arange(count) // p["num_generations"],
        components=components,
    )
    choice: Any
    if p["multi_objective_aggregation"] == "normalize_then_sum":
        named = dict(zip(names, p["reward_weights"], strict=True))
        choice = settings.GDPOAdvantage(weights=named, epsilon=1e-4, over="samples")
    else:
        choice = settings.GRPOAdvantage(normalize=p["scale_rewards"], epsilon=1e-4, lone="zero")
    result = ADVANTAGES[choice.kind](batch, **choice.arguments())
    ours = trl_reward_metrics(rewards, batch.groups)
    metrics = {"reward": ours["reward/mean"], "reward_std": ours["reward/std"]}
    by_group = choice.kind == "grpo" and choice.normalize != "batch"
    none_varies = float(ours["reward/std"] == 0)
    metrics["frac_reward_zero_std"] = ours["groups/without_variance"] if by_group else none_varies
    for name, component in components.items():
        one = trl_reward_metrics(component, batch.groups)
        metrics |= {f"{name}/mean": one["reward/mean"], f"{name}/std": one["reward/std"]}
    return result.advantages, metrics


def trl_reward_metrics(rewards: Tensor, groups: Tensor) -> dict[str, float]:
    """Our metrics of rewards [N]; what has none (NaN) is left out as a sample that failed."""
    return sample_metrics(
        SampleValues(
            rewards=rewards.numpy(),
            components={},
            failed=rewards.isnan().numpy(),
            truncated=torch.zeros_like(groups, dtype=torch.bool).numpy(),
            lengths=torch.ones_like(groups).numpy(),
            groups=groups.numpy(),
        )
    )


def trl_advantages_case(case: Case) -> Answer:
    advantages, metrics = trl_advantages(case)
    return {"advantages": advantages, "metrics": metrics}


def sampling_correction_case(case: Case) -> Answer:
    p = case.params
    advantages, metrics = trl_advantages(case)
    old, sampling = case.tensor("old_per_token_logps"), case.tensor("sampling_per_token_logps")
    lengths = torch.tensor(case.inputs["completion_length"])
    mask = (torch.arange(old.shape[1]) < lengths[:, None]).reshape(-1)
    both = Mismatch(
        rows=Rows.padded(*old.shape),
        mask=mask,
        logprobs=old.reshape(-1),
        rollout_logprobs=sampling.reshape(-1),
    )
    level, _, kind = p["mode"].partition("_")
    function = CORRECTIONS["truncate" if kind == "truncate" else "band"]
    weights = function(both, level=level, lower=p["clip_min"], upper=p["clip_max"], normalize=False)
    gap = (old - sampling).reshape(-1).abs()[mask]
    gap = gap[~gap.isnan()]
    ratio = weights.view(old.shape)
    if level == "sequence":
        ratio = both.rows.masked_max(weights, mask, empty=1.0)[:, None]
        counted = ratio
    else:
        counted = weights[mask]
    metrics |= {
        "sampling/sampling_logp_difference/mean": float(gap.mean()),
        "sampling/sampling_logp_difference/max": float(gap.max()),
        "sampling/importance_sampling_ratio/min": float(counted.min()),
        "sampling/importance_sampling_ratio/mean": float(counted.mean()),
        "sampling/importance_sampling_ratio/max": float(counted.max()),
    }
    return {"advantages": advantages, "metrics": metrics, "importance_sampling_ratio": ratio}


ADAPTERS: dict[str, Adapter] = {
    "trl_grpo_loss": trl_loss_case,
    "trl_advantages": trl_advantages_case,
    "trl_sampling_correction": sampling_correction_case,
}
