"""The proximal policy's log-probs, where they are interpolated instead of computed.

The proximal policy is the one whose ratio to the policy in training a loss bounds: version k - 1, out
of which the update of step k makes version k. Its log-probs are the column old_logprobs, or those of
the update's first pass. Neither is needed here: they are estimated from the two ends of a line that
are known anyway, the behaviour policy's (from the rollout engine) and those of the policy in training
(of each forward pass).
"""

from __future__ import annotations

import torch
from torch import Tensor


def loglinear(logprobs: Tensor, rollout_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """log pi_prox = log pi_b + alpha (log pi - log pi_b), alpha = (v_prox - v_b) / (v_theta - v_b).

    v_b is the version that wrote the token, v_prox = k - 1 the one before the update and v_theta = k
    the one that the update makes, so alpha = s / (s + 1) with the staleness s = k - 1 - v_b. pi is
    the policy as it is at the optimizer step: only after the last of them is it version k. At the
    first it still is version k - 1, so there the result is too near to the behaviour policy.

    A token of version k - 1 has alpha = 0: its proximal log-prob is what the rollout engine said,
    and the engine's rounding, or another number format, stays in the ratio.

    AReaL's prox_logp_method: loglinear (github.com/inclusionAI/AReaL, decoupled PPO of
    arXiv:2505.24298), described in A-3PO, arXiv:2512.06547. AReaL takes v_theta from its engine
    during the update, where it is k - 1: its alpha is this one for a staleness of s - 1.

    Args:
        logprobs: log pi [T] of the policy in training, nats.
        rollout_logprobs: log pi_b [T], nats; where one is not known (NaN), log pi stands for it.
        staleness: s [T], in versions; alpha is kept within [0, 1].

    Returns:
        log pi_prox [T], nats, detached.
    """
    policy, behaviour = logprobs.detach(), rollout_logprobs.detach()
    stale = staleness.to(policy.dtype).clamp(min=0)
    found = behaviour + stale / (stale + 1) * (policy - behaviour)
    return torch.where(behaviour.isnan(), policy, found)
