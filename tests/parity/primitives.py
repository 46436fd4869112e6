"""Adapters for primitives.json: sums, means and log-probs under a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.algorithms.aggregation import Rows, aggregate, cumulative_sums, masked_mean
from engines.algorithms.group_advantages import moments, whitened
from engines.train.logprobs import TokenStatistics, token_statistics
from tests.parity.answers import Adapter, Answer, leaf, mode_of, normaliser, shaped
from tests.parity.vectors import Case


def masked_sum_case(case: Case) -> Answer:
    rows, mask, values = case.rows("mask"), case.mask("mask"), case.flat("values")
    per_row = rows.masked_sum(values, mask)
    return {"out": per_row.sum() if case.params.get("axis") is None else per_row}


def masked_mean_case(case: Case) -> Answer:
    rows, mask, values = case.rows("mask"), case.mask("mask"), case.flat("values")
    if case.params.get("axis") is None:
        return {"out": masked_mean(values, mask)}
    return {"out": rows.masked_mean(values, mask)}


def masked_var_case(case: Case) -> Answer:
    counts = case.mask("mask").to(case.dtype)
    variance, count = moments(case.flat("values"), counts)[1], counts.sum()
    if not case.params.get("unbiased", True):
        variance = variance * (count - 1) / count
    return {"out": variance}


def masked_whiten_case(case: Case) -> Answer:
    values, counts = case.flat("values"), case.mask("mask").to(case.dtype)
    out = whitened(values, counts)
    if not case.params.get("shift_mean", True):
        out = out + moments(values, counts)[0]
    return {"out": shaped(out, case, "mask")}


def agg_loss_case(case: Case) -> Answer:
    rows, mask = case.rows("loss_mask"), case.mask("loss_mask")
    losses = leaf(case.flat("loss_mat"))
    counts = normaliser(mask, rows, case.params, mode_of(case))
    loss = aggregate(losses, mask, rows, counts, mode_of(case))
    loss.backward()
    assert losses.grad is not None
    return {"loss": loss, "grad_loss_mat": shaped(losses.grad, case, "loss_mask")}


def of_logits(logits: Tensor, labels: Tensor | None, **options: bool) -> TokenStatistics:
    """Our chunked statistics of given logits: the output head is the identity."""
    flat = logits.reshape(-1, logits.shape[-1])
    head = torch.eye(flat.shape[-1], dtype=flat.dtype)
    chosen = torch.zeros(flat.shape[0], dtype=torch.int64) if labels is None else labels.reshape(-1)
    return token_statistics(flat, head, chosen, chunk=3, **options)


def logprobs_case(case: Case) -> Answer:
    logits = leaf(case.tensor("logits"))
    labels = torch.tensor(case.inputs["labels"])
    logprobs = of_logits(logits, labels).logprobs
    logprobs.sum().backward()
    return {"log_prob": logprobs.view(labels.shape), "grad_logits_of_sum": logits.grad}


def entropy_case(case: Case) -> Answer:
    logits = leaf(case.tensor("logits"))
    entropy = of_logits(logits, None, entropy_gradient=True).entropy
    entropy.sum().backward()
    return {"entropy": entropy.view(logits.shape[:-1]), "grad_logits_of_sum": logits.grad}


def sum_pi_squared_case(case: Case) -> Answer:
    logits = case.tensor("logits")
    squares = of_logits(logits, None, squared=True).sum_pi_squared
    assert squares is not None
    return {"sum_pi_squared": squares.view(logits.shape[:-1])}


def entropy_loss_case(case: Case) -> Answer:
    logits = leaf(case.tensor("logits"))
    entropy = of_logits(logits, None, entropy_gradient=True).entropy
    rows, mask = case.rows(), case.mask()
    counts = normaliser(mask, rows, case.params, mode_of(case))
    loss = aggregate(entropy, mask, rows, counts, mode_of(case))
    loss.backward()
    return {"entropy_loss": loss, "grad_logits": logits.grad}


def response_mask_case(case: Case) -> Answer:
    ids = torch.tensor(case.inputs["response_id"])
    ends = torch.tensor(case.params["eos_token"]).reshape(-1)
    ended = torch.isin(ids, ends).reshape(-1).double()  # up to the first end, itself included
    kept = cumulative_sums(ended, Rows.padded(*ids.shape)) - ended == 0
    return {"mask": kept.view(ids.shape).long()}


ADAPTERS: dict[str, Adapter] = {
    "masked_sum": masked_sum_case,
    "masked_mean": masked_mean_case,
    "masked_var": masked_var_case,
    "masked_whiten": masked_whiten_case,
    "agg_loss": agg_loss_case,
    "logprobs_from_logits": logprobs_case,
    "entropy_from_logits": entropy_case,
    "calculate_sum_pi_squared_from_logits": sum_pi_squared_case,
    "get_response_mask": response_mask_case,
    "entropy_loss": entropy_loss_case,
}
