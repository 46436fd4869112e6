"""The interpolated proximal policy: by hand, its gradient, and what a loss makes of it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nan, tensor

from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.aggregation import Normaliser, Rows
from engines.algorithms.from_config import objective_of
from engines.algorithms.inputs import PolicyBatch
from engines.algorithms.losses import POLICY_LOSSES
from engines.algorithms.objective import Objective, loglinear
from engines.algorithms.rollout_correction import sample_sizes
from tests.engines.algorithms.batches import policy_batch

CORRECTED = {"correction": [{"kind": "truncate", "upper": 1.5}]}


def objective(**recipe: object) -> Objective:
    return objective_of(AlgorithmConfig.model_validate(recipe))


def counts(batch: PolicyBatch) -> Normaliser:
    return Normaliser.of(batch.mask, batch.rows, max_tokens=16)


def stale_batch(seed: int) -> PolicyBatch:
    """As `policy_batch`, of tokens that are 0 to 3 versions old, and without old_logprobs."""
    batch = policy_batch(seed)
    staleness = (torch.arange(batch.mask.numel()) % 4).double()
    return dataclasses.replace(batch, staleness=staleness, old_logprobs=None)


def test_by_hand() -> None:
    """Version 6 trains; the tokens are of versions 6, 5, 3, one that is not known, and 7."""
    found = loglinear(
        tensor([-1.0, -1.0, -1.0, -1.0, -1.0]),
        tensor([-2.0, -2.0, -2.0, nan, -2.0]),
        tensor([0, 1, 3, 3, -1]),
    )
    torch.testing.assert_close(found, tensor([-2.0, -1.5, -1.25, -1.0, -2.0]))


def test_it_is_on_the_line_between_the_versions() -> None:
    """Where each update adds the same to a log-prob, it is the proximal policy's, to the rounding."""
    per_update = torch.linspace(-0.3, 0.3, 7, dtype=torch.float64)
    staleness = torch.arange(7)
    behaviour = torch.full((7,), -1.0, dtype=torch.float64)
    proximal = behaviour + staleness * per_update
    made = proximal + per_update  # version k, out of version k - 1
    torch.testing.assert_close(loglinear(made, behaviour, staleness), proximal)


def test_it_has_no_gradient() -> None:
    leaves = [torch.randn(3, requires_grad=True) for _ in range(2)]
    assert not loglinear(leaves[0], leaves[1], torch.ones(3)).requires_grad


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_a_loss_sees_it_as_old_logprobs(kind: str) -> None:
    """The same loss and gradient as with a column of these numbers, corrections included."""
    batch = stale_batch(3)
    assert batch.rollout_logprobs is not None and batch.staleness is not None
    proximal = loglinear(batch.logprobs, batch.rollout_logprobs, batch.staleness)
    stored = dataclasses.replace(batch, old_logprobs=proximal)
    recipe = {"loss": {"kind": kind}, **CORRECTED}
    chosen = objective(proximal="loglinear", **recipe)
    assert {"rollout_logprobs", "staleness"} <= chosen.needs
    results = [chosen(batch, counts(batch)), objective(**recipe)(stored, counts(batch))]
    losses = [loss for loss, _ in results]
    slopes: list[Tensor] = [torch.autograd.grad(loss, batch.logprobs)[0] for loss in losses]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(slopes[0], slopes[1])
    if chosen.selects:
        assert torch.equal(chosen.select(batch), objective(**recipe).select(stored))


def test_ratio_and_weight_make_up_the_ratio_to_the_behaviour_policy() -> None:
    """Decoupled PPO by hand: pi / pi_prox within the clip, times pi_prox / pi_b."""
    batch = PolicyBatch(
        rows=Rows.of_lengths(tensor([2])),
        mask=tensor([True, True]),
        logprobs=tensor([-1.0, -1.0], requires_grad=True),
        advantages=tensor([1.0, 1.0]),
        rollout_logprobs=tensor([-1.2, -1.1]),
        staleness=tensor([1.0, 0.0]),
    )
    chosen = objective(loss={"kind": "decoupled"}, proximal="loglinear")
    loss, metrics = chosen(batch, counts(batch))
    assert loss.item() == pytest.approx(-(math.exp(0.2) + math.exp(0.1)) / 2)
    assert metrics.values()["kl_old"] == pytest.approx(-(0.1 + 0.1) / 2)


def test_the_gap_to_the_rollout_engine_is_that_of_the_policy_itself() -> None:
    """The interpolated policy is nearer, and would hide a gap: of fresh tokens all of it."""
    batch = dataclasses.replace(stale_batch(4), staleness=torch.zeros(policy_batch(4).mask.numel()))
    _, metrics = objective(loss={"kind": "clipped"}, proximal="loglinear")(batch, counts(batch))
    itself = dataclasses.replace(batch, old_logprobs=batch.logprobs.detach())
    _, plain = objective(loss={"kind": "clipped"})(itself, counts(batch))
    for name in ("kl_rollout_k1", "kl_rollout_k3", "log_ppl_gap", "rollout_ratio_squared"):
        assert metrics.values()[name] == plain.values()[name] != 0


def test_the_effective_sample_size_of_the_ratio_needs_no_correction() -> None:
    """(mean rho)^2 / mean rho^2 of two tokens with rho = 1 and 3: 4 / 5."""
    batch = PolicyBatch(
        rows=Rows.of_lengths(tensor([2])),
        mask=tensor([True, True]),
        logprobs=tensor([-1.0, -1.0], requires_grad=True),
        advantages=tensor([1.0, 1.0]),
        rollout_logprobs=tensor([-1.0, -1.0 - math.log(3.0)]),
    )
    for recipe in ({}, {"ratio_against": "rollout_logprobs"}, {"loss": {"kind": "decoupled"}}):
        _, metrics = objective(**recipe)(batch, counts(batch))
        assert sample_sizes(metrics.values()) == {
            "rollout_effective_sample_size": pytest.approx(0.8)
        }
    empty = dataclasses.replace(batch, mask=tensor([False, False]))
    _, metrics = objective()(empty, counts(batch))
    assert sample_sizes(metrics.values()) == {}, "nothing is said of no token"
