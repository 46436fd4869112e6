"""What must hold for the smaller pieces: KL, entropy, value loss, corrections, shaping, selection.

Estimators and losses have theirs in test_advantages.py and test_losses.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.aggregation import Normaliser, Rows, aggregate
from engines.algorithms.from_config import (
    corrections_of,
    objective_of,
    selection_of,
    shaped_rewards,
)
from engines.algorithms.inputs import PolicyBatch
from engines.algorithms.kl import KL_ESTIMATORS
from engines.algorithms.losses import value_loss
from engines.algorithms.objective import Objective
from engines.algorithms.reward_shaping import repetition_penalty
from engines.algorithms.rollout_correction import (
    Mismatch,
    correct,
    correction_sums,
    gap_sums,
    sample_sizes,
)
from engines.algorithms.sample_selection import select
from tests.engines.algorithms.batches import (
    TOKEN_FIELDS,
    padded,
    policy_batch,
    rows_of,
    token_index,
)
from tests.engines.method_cases import AGGREGATIONS, PENALTIES, SELECTIONS, correction_recipes

EXAMPLES = settings(max_examples=6, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**31 - 1)
PARTS = ([0, 2], [1], [3, 4, 5])  # micro-batches of six rows
CORRECTED = dict(correction_recipes())


def counts_of(batch: PolicyBatch) -> Normaliser:
    return Normaliser.of(batch.mask, batch.rows, max_tokens=16)


def objective(**recipe: object) -> Objective:
    return objective_of(AlgorithmConfig.model_validate(recipe))


# --- aggregation ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AGGREGATIONS)
@EXAMPLES
@given(seed=SEEDS)
def test_an_aggregation_adds_up_and_ignores_padding(mode: str, seed: int) -> None:
    batch = policy_batch(seed)
    counts = counts_of(batch)
    whole = aggregate(batch.advantages, batch.mask, batch.rows, counts, mode)
    parts = [rows_of(batch, wanted) for wanted in PARTS]
    added = sum(aggregate(p.advantages, p.mask, p.rows, counts, mode) for p in parts)
    torch.testing.assert_close(added, whole)
    wide, _ = padded(batch, TOKEN_FIELDS, 9, float("nan"))
    torch.testing.assert_close(
        aggregate(wide.advantages, wide.mask, wide.rows, counts, mode), whole
    )


# --- KL and entropy ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in KL_ESTIMATORS if not name.endswith("+")])
def test_a_kls_gradient_agrees_with_finite_differences(name: str) -> None:
    batch = policy_batch(3)
    torch.autograd.gradcheck(
        lambda logprobs: KL_ESTIMATORS[name](logprobs, batch.ref_logprobs), batch.logprobs
    )


@pytest.mark.parametrize("name", [name for name in KL_ESTIMATORS if name.endswith("+")])
def test_a_straight_through_kl_has_its_value_and_the_gradient_of_k2(name: str) -> None:
    batch = policy_batch(4)
    plain = KL_ESTIMATORS[name.removesuffix("+")](batch.logprobs, batch.ref_logprobs)
    straight = KL_ESTIMATORS[name](batch.logprobs, batch.ref_logprobs)
    torch.testing.assert_close(straight, plain)
    slopes = [
        torch.autograd.grad(value.sum(), batch.logprobs)[0]
        for value in (straight, KL_ESTIMATORS["k2"](batch.logprobs, batch.ref_logprobs))
    ]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@EXAMPLES
@given(seed=SEEDS, order=st.permutations(range(6)))
def test_kl_and_entropy_terms_add_up_in_any_order(
    estimator: str, seed: int, order: list[int]
) -> None:
    term = objective(
        loss={"kind": "reinforce"},
        kl={"coefficient": 0.3, "estimator": estimator, "unbiased": True},
        entropy={"coefficient": 0.2, "floor": 0.7, "top_share": 0.4},
    )
    batch = policy_batch(seed)
    selected, counted = term.select(batch)
    batch = dataclasses.replace(batch, selected=selected, counted=counted)
    counts = counts_of(batch)
    whole, metrics = term(batch, counts)
    moved = rows_of(batch, list(order))
    pieces = [term(rows_of(moved, wanted), counts) for wanted in PARTS]
    torch.testing.assert_close(sum(loss for loss, _ in pieces), whole)
    total = pieces[0][1] + pieces[1][1] + pieces[2][1]
    assert total.values() == pytest.approx(metrics.values())


def test_the_gradients_of_kl_and_entropy_agree_with_finite_differences() -> None:
    term = objective(
        loss={"kind": "reinforce"},
        kl={"coefficient": 0.3, "unbiased": True},
        entropy={"coefficient": 0.2, "floor": 0.7},
    )
    batch = policy_batch(6)
    counts = counts_of(batch)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return term(dataclasses.replace(batch, logprobs=logprobs, entropy=entropy), counts)[0]

    torch.autograd.gradcheck(loss, (batch.logprobs, batch.entropy))


# --- the critic -------------------------------------------------------------------------------


def loss_of_values(
    batch: PolicyBatch, values: Tensor, counts: Normaliser, clip: float | None, mode: str
) -> Tensor:
    """The rows' columns stand in: advantages are the returns, old_logprobs the old values."""
    return value_loss(
        values,
        batch.advantages,
        batch.old_logprobs,
        batch.mask,
        batch.rows,
        counts,
        clip=clip,
        aggregation=mode,
    )[0]


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("mode", AGGREGATIONS)
@EXAMPLES
@given(seed=SEEDS, order=st.permutations(range(6)))
def test_the_value_loss_adds_up_in_any_order_and_ignores_padding(
    clip: float | None, mode: str, seed: int, order: list[int]
) -> None:
    batch = policy_batch(seed)
    counts = counts_of(batch)
    whole = loss_of_values(batch, batch.logprobs, counts, clip, mode)
    moved = rows_of(batch, list(order))
    parts = [rows_of(moved, wanted) for wanted in PARTS]
    added = sum(loss_of_values(p, p.logprobs, counts, clip, mode) for p in parts)
    torch.testing.assert_close(added, whole)
    for junk in (float("nan"), float("inf")):
        wide, _ = padded(batch, TOKEN_FIELDS, 9, junk)
        torch.testing.assert_close(loss_of_values(wide, wide.logprobs, counts, clip, mode), whole)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_value_losss_gradient_agrees_with_finite_differences(clip: float | None) -> None:
    batch = policy_batch(8)
    counts = counts_of(batch)
    torch.autograd.gradcheck(
        lambda values: loss_of_values(batch, values, counts, clip, "token-mean"), batch.logprobs
    )


# --- corrections ------------------------------------------------------------------------------


def mismatch_of(batch: PolicyBatch) -> Mismatch:
    return Mismatch(
        rows=batch.rows,
        mask=batch.mask,
        logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        advantages=batch.advantages,
    )


@pytest.mark.parametrize("name", CORRECTED)
@EXAMPLES
@given(seed=SEEDS, order=st.permutations(range(6)))
def test_a_correction_follows_the_rows_and_ignores_padding(
    name: str, seed: int, order: list[int]
) -> None:
    steps = corrections_of(AlgorithmConfig.model_validate(CORRECTED[name]))
    batch = policy_batch(seed)
    weights, kept = correct(mismatch_of(batch), steps)
    index = token_index(batch.rows, list(order))
    moved = correct(mismatch_of(rows_of(batch, list(order))), steps)
    torch.testing.assert_close(moved[0], weights[index])
    assert torch.equal(moved[1], kept[index])
    for junk in (float("nan"), float("inf")):
        dirty = dataclasses.replace(
            batch,
            old_logprobs=torch.where(batch.mask, batch.old_logprobs, junk),
            rollout_logprobs=torch.where(batch.mask, batch.rollout_logprobs, junk),
        )
        wide, place = padded(dirty, TOKEN_FIELDS, 9, junk)
        padded_weights, padded_kept = correct(mismatch_of(wide), steps)
        torch.testing.assert_close(padded_weights[place], weights)
        assert torch.equal(padded_kept[place], kept)
        assert int(padded_kept.sum()) == int(kept.sum())


@pytest.mark.parametrize("name", [name for name in CORRECTED if "normalized" not in name])
@EXAMPLES
@given(seed=SEEDS)
def test_a_correction_does_not_depend_on_micro_batches(name: str, seed: int) -> None:
    steps = corrections_of(AlgorithmConfig.model_validate(CORRECTED[name]))
    batch = policy_batch(seed)
    whole = correct(mismatch_of(batch), steps)
    for wanted in PARTS:
        part = correct(mismatch_of(rows_of(batch, wanted)), steps)
        index = token_index(batch.rows, wanted)
        torch.testing.assert_close(part[0], whole[0][index])
        assert torch.equal(part[1], whole[1][index])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "band"])
def test_normalised_weights_have_mean_one(kind: str, level: str) -> None:
    step = {"kind": kind, "level": level, "normalize": True}
    steps = corrections_of(AlgorithmConfig.model_validate({"correction": [step]}))
    batch = policy_batch(12)
    weights, _ = correct(mismatch_of(batch), steps)
    if level == "token":
        assert float(weights[batch.mask].mean()) == pytest.approx(1.0)
    else:
        filled = batch.rows.tokens(batch.mask) > 0
        means = batch.rows.masked_mean(weights, batch.mask)[filled]
        assert float(means.mean()) == pytest.approx(1.0)


def test_diagnostics_add_up_and_say_what_was_done() -> None:
    recipe = {"correction": [{"kind": "truncate", "upper": 1.2, "lower": 0.8}, {"kind": "veto"}]}
    steps = corrections_of(AlgorithmConfig.model_validate(recipe))
    batch = policy_batch(14)
    mismatch = mismatch_of(batch)
    weights, kept = correct(mismatch, steps)
    whole = (gap_sums(mismatch) + correction_sums(mismatch, weights, kept, steps)).values()
    total = None
    for wanted in PARTS:
        part = mismatch_of(rows_of(batch, wanted))
        sums = gap_sums(part) + correction_sums(part, *correct(part, steps), steps)
        total = sums if total is None else total + sums
    assert total is not None and total.values() == pytest.approx(whole)
    ratio = (batch.old_logprobs - batch.rollout_logprobs).exp()[batch.mask]
    share = float((ratio > 1.2).double().mean())
    assert whole["correction_clipped_high"] == pytest.approx(share) and share > 0
    assert whole["correction_clipped_low"] == pytest.approx(float((ratio < 0.8).double().mean()))
    factor = torch.where(kept, weights, 0.0)[batch.mask]
    size = sample_sizes(whole)["correction_effective_sample_size"]
    want = float(factor.mean().square() / factor.square().mean())
    assert size == pytest.approx(want, rel=1e-6) and 0 < size < 1
    assert sample_sizes({}) == {}


def test_weights_made_before_the_update_are_used_as_they_are() -> None:
    """The same loss from stored weights, and from weights made in the loss."""
    recipe = {"correction": [{"kind": "truncate", "upper": 1.1}, {"kind": "reject", "upper": 1.1}]}
    chosen = objective(loss={"kind": "clipped"}, **recipe)
    batch = policy_batch(15)
    weights, kept = correct(mismatch_of(batch), chosen.corrections)
    assert not torch.equal(kept, batch.mask)
    stored = dataclasses.replace(batch, weights=weights, kept=kept)
    (loss, metrics), (again, stored_metrics) = (
        chosen(one, counts_of(batch)) for one in (batch, stored)
    )
    torch.testing.assert_close(again, loss)
    assert stored_metrics.values() == pytest.approx(metrics.values())
    normalised = objective(correction=[{"kind": "truncate", "normalize": True}])
    assert normalised.needs == {"rollout_logprobs", "correction_weights"}


# --- shaping and selection --------------------------------------------------------------------


@pytest.mark.parametrize("name", PENALTIES)
@EXAMPLES
@given(seed=SEEDS, order=st.permutations(range(8)))
def test_a_penalty_follows_the_samples(name: str, seed: int, order: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (8,), generator=generator)
    rows = Rows.of_lengths(lengths)
    ids = torch.randint(0, 3, (int(lengths.sum()),), generator=generator)
    rewards = torch.rand(8, generator=generator)
    groups = torch.randint(0, 3, (8,), generator=generator)
    cut = lengths == 5
    recipe = AlgorithmConfig.model_validate({"shaping": {name: PENALTIES[name]}}).shaping

    def repeated(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        if recipe.repetition is None:
            return None
        return repetition_penalty(ids, Rows.of_lengths(lengths), **recipe.repetition.model_dump())

    plain = shaped_rewards(
        rewards, groups, lengths, cut, recipe, max_tokens=5, repetition=repeated(ids, lengths)
    ).rewards
    index, order_of_rows = token_index(rows, list(order)), torch.tensor(order)
    moved = shaped_rewards(
        rewards[order_of_rows],
        groups[order_of_rows],
        lengths[order_of_rows],
        cut[order_of_rows],
        recipe,
        max_tokens=5,
        repetition=repeated(ids[index], lengths[order_of_rows]),
    ).rewards
    torch.testing.assert_close(moved, plain[order_of_rows])
    assert torch.isfinite(plain).all()


@pytest.mark.parametrize("name", SELECTIONS)
@EXAMPLES
@given(seed=SEEDS, order=st.permutations(range(9)), scale=st.sampled_from([0.5, 4.0]))
def test_a_selection_follows_the_samples_and_not_their_scale(
    name: str, seed: int, order: list[int], scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randperm(9, generator=generator).float()  # no ties, which go by order
    groups = torch.arange(9) % 3 * 5
    steps = selection_of(AlgorithmConfig.model_validate({"selection": [SELECTIONS[name]]}))
    plain = select(rewards, groups, steps).keep
    index = torch.tensor(order)
    assert torch.equal(select(rewards[index], groups[index], steps).keep, plain[index])
    assert torch.equal(select(rewards * scale, groups, steps).keep, plain)
