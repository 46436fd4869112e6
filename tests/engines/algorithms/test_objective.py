"""The objective: its terms, corrections, what a recipe changes."""

import dataclasses
import math

import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.aggregation import MetricSums, Normaliser, aggregate, largest_of, mean_over
from engines.algorithms.from_config import objective_of
from engines.algorithms.inputs import TokenLoss
from engines.algorithms.kl_controller import adapted_coefficient
from engines.algorithms.losses import POLICY_LOSSES, PolicyLoss, reinforce, value_loss
from engines.algorithms.objective import Objective, high_entropy
from tests.engines.algorithms.batches import policy_batch, vars_of


def objective(**recipe) -> Objective:
    return objective_of(AlgorithmConfig.model_validate(recipe))


def counts(batch) -> Normaliser:
    return Normaliser.of(batch.mask, batch.rows, max_tokens=16)


def test_terms_add_up():
    batch = policy_batch(1)
    plain, _ = objective(loss={"kind": "reinforce"})(batch, counts(batch))
    full = objective(
        loss={"kind": "reinforce"},
        kl={"coefficient": 0.3, "estimator": "k2"},
        entropy={"coefficient": 0.2},
    )
    loss, metrics = full(batch, counts(batch))
    gap = (batch.logprobs - batch.ref_logprobs)[batch.mask]
    expected = plain + 0.3 * (gap**2 / 2).mean() - 0.2 * batch.entropy[batch.mask].mean()
    torch.testing.assert_close(loss, expected)
    values = metrics.values()
    assert values["loss"] == pytest.approx(loss.item())
    assert values["policy_loss"] == pytest.approx(plain.item())
    assert values["kl_ref"] == pytest.approx((gap**2 / 2).mean().item())
    assert full.needs == {"ref_logprobs", "entropy"}
    louder, _ = dataclasses.replace(full, kl_coefficient=0.6)(batch, counts(batch))
    torch.testing.assert_close(louder - loss, 0.3 * (gap**2 / 2).mean())


def test_entropy_floor_lifts_only_what_is_below():
    batch = policy_batch(2)
    chosen = objective(loss={"kind": "reinforce"}, entropy={"coefficient": 1.0, "floor": 0.5})
    loss, _ = chosen(batch, counts(batch))
    slope = torch.autograd.grad(loss, batch.entropy)[0]
    below = batch.mask & (batch.entropy < 0.5)
    assert ((slope != 0) == below).all()
    assert below.any()
    assert not below.all()


def test_only_tokens_of_high_entropy_count():
    entropy = torch.tensor([5.0, 1.0, 2.0, 3.0, 4.0, 9.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 0]) > 0
    assert high_entropy(entropy, mask, 0.4).tolist() == [True, False, False, False, True, False]
    assert high_entropy(entropy, mask, 1.0).tolist() == mask.tolist()
    batch = policy_batch(3)
    narrow = objective(loss={"kind": "reinforce"}, entropy={"top_share": 0.3})
    loss, _ = narrow(batch, counts(batch))
    slope = torch.autograd.grad(loss, batch.logprobs)[0]
    assert int((slope != 0).sum()) == pytest.approx(0.3 * int(batch.mask.sum()), abs=1)


def test_truncated_weights_multiply_the_loss():
    batch = policy_batch(4)
    chosen = objective(loss={"kind": "reinforce"}, correction=[{"kind": "truncate", "upper": 1.1}])
    assert chosen.needs == {"rollout_logprobs"}
    loss, metrics = chosen(batch, counts(batch))
    weights = (batch.old_logprobs - batch.rollout_logprobs).exp().clamp(max=1.1)
    values = -batch.advantages * batch.logprobs * weights
    want = aggregate(values, batch.mask, batch.rows, counts(batch), "token-mean")
    torch.testing.assert_close(loss, want)
    assert metrics.values()["correction_weight"] == pytest.approx(weights[batch.mask].mean().item())
    given = dataclasses.replace(batch, weights=torch.full_like(weights, 2.0))
    double, _ = chosen(given, counts(batch))  # the batch's own weights come first
    torch.testing.assert_close(
        double, 2 * objective(loss={"kind": "reinforce"})(batch, counts(batch))[0]
    )


def test_rejected_tokens_are_left_out_and_still_counted():
    batch = policy_batch(5)
    chosen = objective(
        loss={"kind": "clipped"},
        correction=[{"kind": "reject", "statistic": "token_k1", "upper": 1.05}],
    )
    loss, metrics = chosen(batch, counts(batch))
    slope = torch.autograd.grad(loss, batch.logprobs)[0]
    gap = (batch.rollout_logprobs - batch.old_logprobs).abs()
    outside = batch.mask & (gap > math.log(1.05))
    assert outside.any()
    assert not slope[outside].any()
    share = metrics.values()["correction_left_out"]
    assert share == pytest.approx((outside.sum() / batch.mask.sum()).item())


NEVER = {"kind": "reject", "statistic": "token_k1", "lower": 5.0, "upper": 6.0}
BAND = {"kind": "band", "lower": 5.0, "upper": 6.0}


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        ({}, 1.0),
        ({"correction": [{"kind": "truncate"}]}, 1.0),
        ({"correction": [NEVER]}, 0.0),
        ({"correction": [NEVER], "kl": {"coefficient": 0.1}}, 0.0),
        ({"correction": [BAND]}, 0.0),
        ({"correction": [BAND], "kl": {"coefficient": 0.1}}, 1.0),
        # No weights are applied.
        ({"correction": [BAND], "ratio_against": "rollout_logprobs"}, 1.0),
    ],
)
def test_tokens_without_a_part_in_the_loss_are_not_counted_as_trained(recipe, share):
    batch = policy_batch(5)
    loss, metrics = objective(loss={"kind": "clipped"}, **recipe)(batch, counts(batch))
    assert metrics.values()["trained_tokens"] == share * batch.mask.sum()
    slope = torch.autograd.grad(loss, batch.logprobs, allow_unused=True)[0]
    assert (slope is not None and bool(slope.any())) == (share > 0)


def test_bypass_puts_the_rollout_policy_below_the_ratio():
    batch = policy_batch(6)
    recipe = {"loss": {"kind": "clipped"}, "correction": [{"kind": "truncate"}]}
    bypass, _ = objective(ratio_against="rollout_logprobs", **recipe)(batch, counts(batch))
    swapped = dataclasses.replace(batch, old_logprobs=batch.rollout_logprobs)
    plain, _ = objective(loss={"kind": "clipped"})(swapped, counts(batch))
    torch.testing.assert_close(bypass, plain)  # no weights on top of a ratio


def test_without_old_logprobs_the_ratio_is_one():
    batch = dataclasses.replace(policy_batch(7), old_logprobs=None)
    loss, metrics = objective(loss={"kind": "clipped"})(batch, counts(batch))
    slope = torch.autograd.grad(loss, batch.logprobs)[0]
    plain, _ = objective(loss={"kind": "reinforce"})(batch, counts(batch))
    torch.testing.assert_close(slope, torch.autograd.grad(plain, batch.logprobs)[0])
    assert metrics.values()["ratio_max"] == 1.0


def test_gradients_do_not_leak_into_other_columns():
    batch = policy_batch(8)
    names = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    leaves = {n: vars_of(policy_batch(8))[n].requires_grad_(True) for n in names}
    for kind in POLICY_LOSSES:
        chosen = objective(
            loss={"kind": kind}, correction=[{"kind": "truncate"}], kl={"coefficient": 0.1}
        )
        loss, _ = chosen(dataclasses.replace(batch, **leaves), counts(batch))
        slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        assert all(slope is None for slope in slopes), kind


def test_value_loss_by_hand():
    batch = policy_batch(9)
    one = torch.ones_like(batch.mask, dtype=torch.float64)
    values = (2.0 * one).requires_grad_(True)
    loss, metrics = value_loss(
        values,
        3.0 * one,
        1.0 * one,
        batch.mask,
        batch.rows,
        counts(batch),
        clip=0.5,
        aggregation="token-mean",
    )
    assert loss.item() == pytest.approx(0.5 * 1.5**2)  # V is held at 1.5
    assert metrics.values()["value_clip_share"] == 1.0
    loss.backward()
    assert not values.grad.any()
    free, _ = value_loss(
        values,
        3.0 * one,
        1.0 * one,
        batch.mask,
        batch.rows,
        counts(batch),
        clip=None,
        aggregation="token-mean",
    )
    assert free.item() == pytest.approx(0.5)


def test_adaptive_controller_moves_towards_its_target():
    options = {"target": 2.0, "horizon": 100, "samples": 10}
    assert adapted_coefficient(1.0, 3.0, **options) == pytest.approx(1.02)
    assert adapted_coefficient(1.0, 1.9, **options) == pytest.approx(0.995)
    assert adapted_coefficient(1.0, 0.0, **options) == pytest.approx(0.98)


def test_metrics_survive_a_sum_over_ranks():
    mask = torch.tensor([True, False, True])
    one = MetricSums(
        means={"a": mean_over(torch.tensor([1.0, 9.0, 3.0]), mask)},
        sums={"l": torch.tensor(0.5)},
        maxima={"m": largest_of(torch.tensor([1.0, 9.0, 3.0]), mask)},
    )
    none = MetricSums(
        means={"a": mean_over(torch.zeros(0), torch.zeros(0, dtype=torch.bool))},
        sums={"l": torch.tensor(0.0)},
        maxima={"m": largest_of(torch.zeros(0), torch.zeros(0, dtype=torch.bool))},
    )
    added = [m.stacked() for m in (one, none)]
    total = none.restored(added[0][0] + added[1][0], torch.maximum(added[0][1], added[1][1]))
    assert total.values() == {"a": 2.0, "l": 0.5, "m": 3.0}
    assert (one + none).values() == total.values()
    assert none.values() == {"a": 0.0, "l": 0.0}


def half(batch, *, scale):
    """A user's own loss."""
    return TokenLoss(values=scale * reinforce(batch).values)


QUARTER = PolicyLoss(loss=half, aggregation="token-sum")


def test_a_users_own_loss_by_import_path():
    batch = policy_batch(10)
    plain, _ = objective(loss={"kind": "reinforce"})(batch, counts(batch))
    own = {"kind": "function", "path": f"{__name__}:half", "params": {"scale": 0.5}}
    loss, _ = objective(loss=own)(batch, counts(batch))
    torch.testing.assert_close(loss, plain / 2)
    other = objective(loss=own | {"path": f"{__name__}:QUARTER"})
    assert other.aggregation == "token-sum"
