"""Policy losses: what must hold for each, and numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.aggregation import Normaliser, Rows, aggregate
from engines.algorithms.from_config import objective_of
from engines.algorithms.inputs import PolicyBatch
from engines.algorithms.losses import POLICY_LOSSES, select_m2po
from engines.algorithms.objective import Objective
from tests.engines.algorithms.batches import TOKEN_FIELDS, padded, policy_batch, rows_of, vars_of

EXAMPLES = settings(max_examples=6, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**31 - 1)
OVERRIDES = {  # wide enough that random batches meet every branch
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "luspo": {"clip_low": 0.1, "clip_high": 0.1},
    "clip_cov": {"clip_low": 0.3, "clip_high": 0.3, "ratio": 1.0, "lower": 0.1, "upper": 9.0},
    "kl_cov": {"ratio": 0.2},
    "m2po": {"threshold": 0.01},
    "vespo": {"k_positive": 0.5, "k_negative": 0.5},
}


def made(kind: str, aggregation: str = "token-mean", **more) -> Objective:
    loss = {"kind": kind} | OVERRIDES.get(kind, {})
    return objective_of(
        AlgorithmConfig.model_validate({"loss": loss, "aggregation": aggregation} | more)
    )


def whole(batch: PolicyBatch) -> Normaliser:
    return Normaliser.of(batch.mask, batch.rows, max_tokens=16)


def loss_and_gradient(objective: Objective, batch: PolicyBatch, normaliser: Normaliser):
    leaf = batch.logprobs.detach().clone().requires_grad_(True)
    loss, metrics = objective(dataclasses.replace(batch, logprobs=leaf), normaliser)
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return loss.detach(), torch.zeros_like(leaf) if gradient is None else gradient, metrics


def selected(objective: Objective, batch: PolicyBatch) -> PolicyBatch:
    if not objective.selects:
        return batch
    chosen, counted = objective.select(batch)
    return dataclasses.replace(batch, selected=chosen, counted=counted)


AGGREGATIONS = [
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@EXAMPLES
@given(seed=SEEDS, aggregation=st.sampled_from(AGGREGATIONS))
def test_micro_batches_and_ranks_add_up_to_the_whole(kind, seed, aggregation):
    more = {"kl": {"coefficient": 0.1}, "correction": [{"kind": "truncate"}, {"kind": "veto"}]}
    objective = made(kind, aggregation, **more)
    batch = selected(objective, policy_batch(seed))
    counts = whole(batch)
    loss, gradient, metrics = loss_and_gradient(objective, batch, counts)
    ranks = dataclasses.replace(counts, ranks=2)
    parts = [
        loss_and_gradient(objective, rows_of(batch, w), ranks) for w in ([0, 2], [1], [3, 4, 5])
    ]
    torch.testing.assert_close(sum(p[0] for p in parts) / 2, loss)  # the mean over two ranks
    torch.testing.assert_close(
        torch.cat([p[1] for p in parts]) / 2, gradient[_order(batch, [0, 2, 1, 3, 4, 5])]
    )
    total = parts[0][2] + parts[1][2] + parts[2][2]
    assert total.values() == pytest.approx(metrics.values())


def _order(batch, wanted):
    index = torch.arange(batch.mask.numel())
    return rows_of(dataclasses.replace(batch, advantages=index), wanted).advantages


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@EXAMPLES
@given(seed=SEEDS, order=st.permutations(range(6)))
def test_the_order_of_rows_does_not_matter(kind, seed, order):
    objective, batch = made(kind), policy_batch(seed)
    loss, gradient, _ = loss_and_gradient(objective, batch, whole(batch))
    moved = rows_of(batch, list(order))
    loss2, gradient2, _ = loss_and_gradient(objective, moved, whole(moved))
    torch.testing.assert_close(loss2, loss)
    torch.testing.assert_close(gradient2, gradient[_order(batch, list(order))])


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("junk", [0.0, float("nan"), float("inf"), -float("inf")])
def test_padding_and_what_stands_in_it_do_not_matter(kind, junk):
    more = {
        "kl": {"coefficient": 0.1, "estimator": "k3"},
        "correction": [{"kind": "band"}, {"kind": "reject", "upper": 2.0}, {"kind": "dppo"}],
        "entropy": {"coefficient": 0.1, "floor": 0.5, "top_share": 0.5},
    }
    objective, batch = made(kind, "seq-mean-token-mean", **more), policy_batch(5)
    loss, gradient, metrics = loss_and_gradient(objective, batch, whole(batch))
    dirty = {
        name: torch.where(batch.mask, value, junk)
        for name in TOKEN_FIELDS
        if (value := vars_of(batch)[name]) is not None and value.is_floating_point()
    }
    wide, place = padded(dataclasses.replace(batch, **dirty), TOKEN_FIELDS, 9, junk)
    counts = whole(batch)  # max_tokens is a constant, rows are the same
    loss2, gradient2, metrics2 = loss_and_gradient(objective, wide, counts)
    torch.testing.assert_close(loss2, loss)
    torch.testing.assert_close(gradient2[place], gradient)
    assert float(gradient2.abs().sum()) == pytest.approx(float(gradient.abs().sum()))
    assert metrics2.values() == pytest.approx(metrics.values())


# The others hold detached factors, or (cpgd) a slope bounded apart from its value.
DETACHED = ("dppo_tv", "dppo_kl", "cispo", "vespo", "gspo", "cpgd")
SMOOTH = [kind for kind in POLICY_LOSSES if kind not in DETACHED]


@pytest.mark.parametrize("kind", SMOOTH)
def test_gradients_agree_with_finite_differences(kind):
    objective = made(kind)
    batch = selected(objective, policy_batch(11))
    counts = whole(batch)

    def function(logprobs):
        return objective(dataclasses.replace(batch, logprobs=logprobs), counts)[0]

    torch.autograd.gradcheck(function, batch.logprobs)


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl", "cispo", "vespo"])
def test_detached_factors_leave_the_policy_gradient(kind):
    objective, batch = made(kind, "token-sum"), policy_batch(7)
    result = objective.method.loss(batch, **objective.params)
    slope = torch.autograd.grad(result.values.sum(), batch.logprobs)[0]
    own = torch.where(batch.mask, batch.logprobs.detach(), 1.0)
    torch.testing.assert_close(
        slope[batch.mask] * own[batch.mask], result.values.detach()[batch.mask]
    )


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_nothing_to_learn_from_gives_zero_and_no_nan(kind):
    objective = made(kind, kl={"coefficient": 0.1})
    full = policy_batch(3)
    masked = dataclasses.replace(full, mask=torch.zeros_like(full.mask))
    empty = rows_of(full, [])
    hollow = rows_of(full, [3])  # one row without tokens
    for batch in (masked, empty, hollow):
        loss, gradient, metrics = loss_and_gradient(objective, batch, whole(batch))
        assert loss.item() == 0.0
        assert float(gradient.abs().sum()) == 0.0
        assert all(math.isfinite(value) for value in metrics.values().values())


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_extreme_ratios_stay_finite(kind):
    objective, batch = made(kind), policy_batch(2, dtype=torch.float32)
    far = dataclasses.replace(batch, old_logprobs=batch.old_logprobs - 60.0)
    loss, gradient, _ = loss_and_gradient(objective, far, whole(far))
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


# The others have a term without the advantage, or a bound on advantage times log-prob.
LINEAR = [kind for kind in POLICY_LOSSES if kind not in ("kl_cov", "clip_cov", "dro", "cpgd")]


@pytest.mark.parametrize("kind", LINEAR)
def test_twice_the_advantage_is_twice_the_policy_gradient(kind):
    objective, batch = made(kind), policy_batch(9)
    _, gradient, _ = loss_and_gradient(objective, batch, whole(batch))
    doubled = dataclasses.replace(batch, advantages=2 * batch.advantages)
    _, gradient2, _ = loss_and_gradient(objective, doubled, whole(batch))
    torch.testing.assert_close(gradient2, 2 * gradient)


def one_token(advantage: float, ratio: float, **more) -> PolicyBatch:
    old = torch.tensor([-1.0], dtype=torch.float64)
    return PolicyBatch(
        rows=Rows.of_lengths(torch.tensor([1])),
        mask=torch.ones(1, dtype=torch.bool),
        logprobs=(old + math.log(ratio)).requires_grad_(True),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        old_logprobs=old,
        **more,
    )


@pytest.mark.parametrize(
    ("kind", "params", "advantage", "ratio", "value", "slope"),
    [
        ("clipped", {"clip_high": 0.28}, 1.0, 1.1, -1.1, -1.1),
        ("clipped", {"clip_high": 0.28}, 1.0, 1.5, -1.28, 0.0),
        ("clipped", {"clip_low": 0.2}, -1.0, 0.5, 0.8, 0.0),
        ("clipped", {"dual_clip": 3.0}, -1.0, 4.0, 3.0, 0.0),
        ("clipped", {"dual_clip": None}, -1.0, 4.0, 4.0, 4.0),
        ("clipped", {"dual_clip": None, "ratio_cap": 2.0}, -1.0, 4.0, 2.0, 0.0),
        ("cispo", {"clip_high": 0.5}, 2.0, 2.0, -2 * 1.5 * (math.log(2) - 1), -3.0),
        ("dro", {"beta": 0.5}, 1.0, math.e, -0.0 + 0.25, -1.0 + 0.5),
        ("dppo_tv", {"divergence_high": 0.1}, 1.0, 2.0, 0.0, 0.0),
        ("cpgd", {"drift_coefficient": 0.0}, 1.0, 1.1, -math.log(1.1), -1.0),
        ("cpgd", {"drift_coefficient": 0.0}, 1.0, 1.5, -math.log(1.2), 0.0),
        (
            "cpgd",
            {"drift_coefficient": 0.5},
            1.0,
            1.5,
            -math.log(1.2) + 0.5 * (0.5 - math.log(1.5)),
            0.5 * 0.5,
        ),
        (
            "cpgd",
            {"drift_coefficient": 0.5},
            1.0,
            4.0,
            -math.log(1.2) + 0.5 * (3 - math.log(4)),
            0.5,
        ),
        ("m2po", {"threshold": 0.04}, 1.0, 1.1, -1.1, -1.1),
        ("m2po", {"threshold": 0.04}, 1.0, 1.5, 0.0, 0.0),  # log(1.5)^2 = 0.16
        ("m2po", {"threshold": 0.04}, -1.0, 1.5, 1.5, 1.5),  # pushes the ratio back
    ],
)
def test_numbers_worked_out_by_hand(kind, params, advantage, ratio, value, slope):
    algorithm = AlgorithmConfig.model_validate({"loss": {"kind": kind} | params})
    batch = one_token(advantage, ratio)
    loss, _ = objective_of(algorithm)(batch, whole(batch))
    loss.backward()
    assert loss.item() == pytest.approx(value)
    assert float(batch.logprobs.grad) == pytest.approx(slope)


@pytest.mark.parametrize(
    ("cap", "advantage", "ratio", "low", "high"),
    [
        (None, 1.0, 1.5, 0.0, 1.0),
        (1.4, 1.0, 1.5, 0.0, 1.0),  # the cap is beyond the clip, which binds
        (1.1, 1.0, 1.5, 0.0, 0.0),  # the cap holds the ratio within the clip's bounds
        (1.1, -1.0, 1.5, 0.0, 0.0),  # the loss is the clip's, but the ratio is not out of bounds
        (0.7, -1.0, 1.5, 1.0, 0.0),  # a cap below the clip brings every ratio under its bound
        (1.1, -1.0, 0.5, 1.0, 0.0),
    ],
)
def test_clip_shares_are_of_the_capped_ratio_as_in_trl(cap, advantage, ratio, low, high):
    """TRL's clip_ratio metrics compare the ratio after delta with both bounds."""
    loss = {"kind": "clipped", "clip_low": 0.2, "clip_high": 0.2, "ratio_cap": cap}
    batch = one_token(advantage, ratio)
    chosen = objective_of(AlgorithmConfig.model_validate({"loss": loss | {"dual_clip": None}}))
    metrics = chosen(batch, whole(batch))[1].values()
    assert (metrics["clip_share_low"], metrics["clip_share_high"]) == (low, high)
    assert metrics["clip_share"] == low + high


def test_an_unknown_rollout_logprob_weighs_one():
    batch = one_token(1.0, 1.1, rollout_logprobs=torch.full((1,), float("nan")).double())
    algorithm = AlgorithmConfig.model_validate({"loss": {"kind": "decoupled"}})
    assert objective_of(algorithm)(batch, whole(batch))[0].item() == pytest.approx(-1.1)


def test_decoupled_ppo_weighs_by_the_behaviour_policy_and_drops_what_is_too_heavy():
    rollout = torch.tensor([-1.0 - math.log(2.0)], dtype=torch.float64)  # pi_old / pi_rollout = 2
    batch = one_token(1.0, 1.1, rollout_logprobs=rollout)
    for cap, expected in ((5.0, -2.2), (1.5, 0.0)):
        algorithm = AlgorithmConfig.model_validate(
            {"loss": {"kind": "decoupled", "weight_cap": cap}}
        )
        loss, _ = objective_of(algorithm)(batch, whole(batch))
        assert loss.item() == pytest.approx(expected)


def test_m2po_leaves_out_as_few_tokens_as_it_must():
    logs = torch.tensor([0.5, 0.4, 0.1, 0.1, -0.9], dtype=torch.float64)
    batch = PolicyBatch(
        rows=Rows.of_lengths(torch.tensor([5])),
        mask=torch.ones(5, dtype=torch.bool),
        logprobs=logs,
        advantages=torch.ones(5, dtype=torch.float64),
        old_logprobs=torch.zeros(5, dtype=torch.float64),
    )
    # Pushing: the first four. Means of the squares left: .1075, .06, .01. The last pushes back.
    assert select_m2po(batch, threshold=0.07).tolist() == [True, False, False, False, False]
    assert select_m2po(batch, threshold=0.04).tolist() == [True, True, False, False, False]
    assert not select_m2po(batch, threshold=0.2).any()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregations_by_hand(mode):
    rows, mask = Rows.of_lengths(torch.tensor([2, 0, 3])), torch.tensor([1, 1, 1, 0, 1]) > 0
    losses = torch.tensor([1.0, 3.0, 10.0, float("nan"), 2.0])
    expected = {
        "token-mean": 16 / 4,
        "seq-mean-token-sum": 16 / 2,
        "seq-mean-token-mean": (2 + 6) / 2,
        "seq-mean-token-sum-norm": 16 / 2 / 10,
    }
    counts = Normaliser.of(mask, rows, max_tokens=10)
    assert float(aggregate(losses, mask, rows, counts, mode)) == pytest.approx(expected[mode])


def test_an_unknown_aggregation_is_refused():
    batch = policy_batch(0)
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(batch.advantages, batch.mask, batch.rows, whole(batch), "mean")
