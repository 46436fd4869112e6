"""Advantage estimators: what must hold for each, and numbers worked out by hand."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from configs.algorithm.advantages import Advantage
from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.advantages import ADVANTAGES
from engines.algorithms.aggregation import Rows
from engines.algorithms.from_config import advantages_of
from engines.algorithms.inputs import AdvantageBatch
from engines.algorithms.kl import KL_ESTIMATORS
from tests.engines.algorithms.batches import (
    ADVANTAGE_ROW_FIELDS,
    ADVANTAGE_TOKEN_FIELDS,
    advantage_batch,
    padded,
    token_index,
    vars_of,
)

EXAMPLES = settings(max_examples=8, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**31 - 1)


def estimated(batch: AdvantageBatch, kind: str, **params):
    choice = TypeAdapter(Advantage).validate_python({"kind": kind} | params)
    return ADVANTAGES[kind](batch, **choice.arguments())


def reordered(batch: AdvantageBatch, order: list[int]) -> AdvantageBatch:
    index, rows = token_index(batch.rows, order), torch.tensor(order)
    values = vars_of(batch)
    tokens = {n: values[n][index] for n in ADVANTAGE_TOKEN_FIELDS if values[n] is not None}
    per_row = {n: values[n][rows] for n in ADVANTAGE_ROW_FIELDS if values[n] is not None}
    components = {name: value[rows] for name, value in batch.components.items()}
    lengths = Rows.of_lengths(batch.rows.lengths[rows])
    return dataclasses.replace(batch, rows=lengths, components=components, **tokens, **per_row)


@pytest.mark.parametrize("kind", ADVANTAGES)
@EXAMPLES
@given(seed=SEEDS, order=st.permutations(range(8)))
def test_permuting_samples_permutes_results(kind, seed, order):
    batch = advantage_batch(seed)
    plain = estimated(batch, kind).advantages
    moved = estimated(reordered(batch, list(order)), kind).advantages
    torch.testing.assert_close(moved, plain[token_index(batch.rows, list(order))])


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("junk", [0.0, float("nan"), float("inf")])
def test_padding_and_what_stands_in_it_do_not_matter(kind, junk):
    batch = advantage_batch(4)
    plain = estimated(batch, kind)
    values = vars_of(batch)
    dirty = {
        name: torch.where(batch.mask, values[name], junk)
        for name in ADVANTAGE_TOKEN_FIELDS
        if values[name] is not None and values[name].is_floating_point()
    }
    wide, place = padded(dataclasses.replace(batch, **dirty), ADVANTAGE_TOKEN_FIELDS, 11, junk)
    result = estimated(wide, kind)
    torch.testing.assert_close(result.advantages[place], plain.advantages)
    assert float(result.advantages.abs().sum()) == pytest.approx(
        float(plain.advantages.abs().sum())
    )
    assert not result.advantages[place][~batch.mask].any()
    if plain.returns is not None:
        torch.testing.assert_close(result.returns[place], plain.returns)


SCALED = {  # kind -> what twice the rewards do to the advantages
    **dict.fromkeys(("dr_grpo", "rloo", "opo", "gpg", "reinforce"), 2.0),
    "grpo": 1.0,
    "grpo_passk": 1.0,
    "maxrl": 1.0,
    "reinforce_plus_plus": 1.0,
    "reinforce_plus_plus_baseline": 1.0,
    "gigpo": 2.0,
    "optimal_token_baseline": 2.0,
    "multi_turn_optimal_token_baseline": 2.0,
    "cpgd": 2.0,
    "gdpo": 1.0,
}


@pytest.mark.parametrize("kind", SCALED)
@EXAMPLES
@given(seed=SEEDS)
def test_scaling_rewards_scales_what_should_scale(kind, seed):
    batch = dataclasses.replace(advantage_batch(seed, groups=2), components={})
    exact = {"epsilon": 0.0} if kind in ("grpo", "grpo_passk", "maxrl") else {}
    if "lone" in TypeAdapter(Advantage).validate_python({"kind": kind}).arguments():
        exact["lone"] = "zero"
    plain = estimated(batch, kind, **exact).advantages
    double = estimated(dataclasses.replace(batch, rewards=2 * batch.rewards), kind, **exact)
    torch.testing.assert_close(double.advantages, SCALED[kind] * plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["gae", "remax"])
@EXAMPLES
@given(seed=SEEDS)
def test_scaling_rewards_and_what_they_are_compared_with(kind, seed):
    """A critic's values and the greedy completion's reward scale with the rewards."""
    batch = advantage_batch(seed)
    raw = {"whiten": False} if kind == "gae" else {}
    double = dataclasses.replace(
        batch, rewards=2 * batch.rewards, values=2 * batch.values, baselines=2 * batch.baselines
    )
    plain = estimated(batch, kind, **raw).advantages
    torch.testing.assert_close(estimated(double, kind, **raw).advantages, 2 * plain)


@pytest.mark.parametrize("kind", ["dr_grpo", "rloo", "grpo", "gigpo"])
def test_a_common_offset_changes_nothing(kind):
    batch = advantage_batch(21, groups=2)
    lifted = dataclasses.replace(batch, rewards=batch.rewards + 5.0)
    lone = {} if kind == "gigpo" else {"lone": "zero"}
    if kind == "gigpo":  # a turn's return is discounted: without discount only
        lone = {"gamma": 1.0}
    torch.testing.assert_close(
        estimated(lifted, kind, **lone).advantages, estimated(batch, kind, **lone).advantages
    )


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("epsilon", [None, 0.0])
def test_degenerate_batches_give_finite_numbers(kind, epsilon):
    batch = advantage_batch(8)
    names = TypeAdapter(Advantage).validate_python({"kind": kind}).arguments()
    params = {"epsilon": epsilon} if epsilon is not None and "epsilon" in names else {}
    cases = [
        dataclasses.replace(batch, mask=torch.zeros_like(batch.mask)),  # every token masked
        dataclasses.replace(batch, groups=torch.arange(8)),  # groups of one
        dataclasses.replace(batch, rewards=torch.zeros(8, dtype=torch.float64)),
        dataclasses.replace(batch, rewards=torch.full((8,), 0.9, dtype=torch.float64)),
        dataclasses.replace(batch, rewards=torch.full((8,), float("nan"), dtype=torch.float64)),
        reordered(batch, [4]),  # one row, empty
        reordered(batch, [0]),  # one row
    ]
    for number, case in enumerate(cases):
        if number == 4 and kind not in GROUP_RELATIVE:
            continue  # a missing reward has no meaning for these
        assert torch.isfinite(estimated(case, kind, **params).advantages).all(), number


GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "grpo_passk", "opo", "gpg", "maxrl", "cpgd", "gdpo")


@pytest.mark.parametrize("kind", [k for k in GROUP_RELATIVE if k != "gdpo"])
def test_a_sample_without_reward_counts_nowhere(kind):
    batch = advantage_batch(13)
    rewards = batch.rewards.clone()
    rewards[2] = float("nan")
    with_it = estimated(dataclasses.replace(batch, rewards=rewards), kind).advantages
    others = [i for i in range(8) if i != 2]
    without = estimated(reordered(batch, others), kind).advantages
    torch.testing.assert_close(with_it[token_index(batch.rows, others)], without)
    assert not with_it[token_index(batch.rows, [2])].any()


def per_sample(rewards: list[float], groups: list[int], lengths: list[int] | None = None):
    rows = Rows.of_lengths(torch.tensor(lengths or [1] * len(rewards)))
    return AdvantageBatch(
        rows=rows,
        mask=torch.ones(rows.ids.numel(), dtype=torch.bool),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups),
    )


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("dr_grpo", {}, [-1.5, 0.5, 1.0]),
        ("dr_grpo", {"lone": "reward"}, [-1.5, 0.5, 1.0]),
        ("rloo", {}, [-2.25, 0.75, 1.5]),
        ("grpo", {"epsilon": 0.0}, [-1.5 / 1.75**0.5, 0.5 / 1.75**0.5, 1.0 / 1.75**0.5]),
        ("grpo", {"baseline": "none", "normalize": "none"}, [0.0, 2.0, 2.5]),
        ("grpo_passk", {"normalize": False}, [0.0, 0.0, 0.5]),
        ("gpg", {"scale": 2.0}, [-1.5 * 0.75, 0.5 * 0.75, 1.0 * 0.75]),  # 3 samples, 2 not zero
        ("maxrl", {"epsilon": 0.0}, [-1.0, 0.5 / 1.5, 1.0 / 1.5]),
        ("cpgd", {"weight": "equal"}, [-1.5, 0.5, 1.0]),
        ("reinforce", {}, [0.0, 2.0, 2.5]),
    ],
)
def test_one_group_by_hand(kind, params, expected):
    result = estimated(per_sample([0.0, 2.0, 2.5], [4, 4, 4]), kind, **params)
    assert result.advantages.tolist() == pytest.approx(expected)


def test_opo_weighs_by_length():
    batch = per_sample([0.0, 3.0], [1, 1], lengths=[1, 2])
    assert estimated(batch, "opo").advantages.tolist() == pytest.approx([-2.0, 1.0, 1.0])


def test_cpgd_stands_in_for_groups_without_variance():
    batch = per_sample([0.0, 2.0, 1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2])
    for cap, weight in ((2.0, 2.0), (9.0, 3.0)):
        result = estimated(batch, "cpgd", weight="filter", cap=cap).advantages.tolist()
        assert result == pytest.approx([-weight, weight, 0, 0, 0, 0])


def test_a_group_of_one_keeps_its_reward_or_gets_nothing():
    batch = per_sample([3.0], [0])
    for kind in ("dr_grpo", "rloo", "opo"):
        assert estimated(batch, kind).advantages.tolist() == [3.0]
        assert estimated(batch, kind, lone="zero").advantages.tolist() == [0.0]


def test_gae_by_hand():
    batch = dataclasses.replace(
        per_sample([1.0, 9.0], [0, 1], lengths=[3, 1]),
        values=torch.tensor([0.5, 0.25, 0.75, 9.0], dtype=torch.float64),
    )
    result = estimated(batch, "gae", gamma=0.5, lam=0.5, whiten=False)
    third = 1.0 - 0.75
    second = 0.5 * 0.75 - 0.25 + 0.25 * third
    first = 0.5 * 0.25 - 0.5 + 0.25 * second
    assert result.advantages.tolist() == pytest.approx([first, second, third, 0.0])
    assert result.returns.tolist() == pytest.approx([first + 0.5, second + 0.25, 1.0, 9.0])


def test_gigpo_compares_turns_that_began_alike():
    # Two samples of one prompt, two turns of one token each; their second turns meet the same state.
    batch = dataclasses.replace(
        per_sample([0.0, 2.0], [0, 0], lengths=[2, 2]),
        steps=torch.tensor([0, 1, 0, 1]),
        states=torch.tensor([5, 6, 7, 6]),
    )
    result = estimated(batch, "gigpo", gamma=0.5, step_weight=3.0, normalize=False)
    # Episode: -1, +1. Turns: first ones alone (0); second ones have returns 0 and 2: -1, +1.
    assert result.advantages.tolist() == pytest.approx([-1.0, -4.0, 1.0, 4.0])


def test_gigpo_of_one_turn_is_the_group_relative_advantage_once_more():
    # One turn that begins at the prompt: both terms compare the samples of the prompt.
    batch = dataclasses.replace(
        per_sample([0.0, 2.0, 1.0], [0, 0, 1], lengths=[2, 1, 1]),
        steps=torch.zeros(4, dtype=torch.int64),
        states=torch.tensor([0, 0, 0, 1]),
    )
    plain = estimated(batch, "dr_grpo").advantages
    result = estimated(batch, "gigpo", step_weight=0.5).advantages
    assert result.tolist() == pytest.approx([-1.5, -1.5, 1.5, 1.0])
    torch.testing.assert_close(result[:3], 1.5 * plain[:3])


def test_gigpo_compares_over_the_batch_where_states_are_shared():
    # Two prompts that show the same state: alone in their groups, together for the turn.
    batch = dataclasses.replace(
        per_sample([0.0, 2.0], [0, 1]),
        steps=torch.zeros(2, dtype=torch.int64),
        states=torch.tensor([9, 9]),
    )
    alone = estimated(batch, "gigpo").advantages.tolist()
    assert alone == pytest.approx([0.0, 2.0])
    assert estimated(batch, "gigpo", among="batch").advantages.tolist() == pytest.approx(
        [-1.0, 3.0]
    )


def test_gdpo_leaves_out_a_component_that_says_nothing():
    nothing = float("nan")
    batch = dataclasses.replace(
        per_sample([1.0, 0.0, 1.0, 0.0], [0, 0, 0, 0]),
        components={
            "a": torch.tensor([1.0, 0.0, 1.0, 0.0]).double(),
            "b": torch.tensor([1.0, nothing, 0.0, nothing]).double(),
        },
    )
    result = estimated(batch, "gdpo", normalize=False, over="samples").advantages
    # a: +-1/2; b: +1/2, nothing, -1/2, nothing.
    total = torch.tensor([1.0, -0.5, 0.0, -0.5]).double()
    torch.testing.assert_close(result, total / total.std(), rtol=1e-5, atol=1e-5)


def test_token_rewards_stand_in_for_the_reward():
    batch = per_sample([99.0, 99.0], [0, 0], lengths=[2, 1])
    dense = dataclasses.replace(batch, token_rewards=torch.tensor([1.0, 2.0, 5.0]).double())
    assert estimated(dense, "dr_grpo").advantages.tolist() == [-1.0, -1.0, 1.0]
    assert estimated(dense, "reinforce").advantages.tolist() == [3.0, 2.0, 5.0]


def test_a_kl_in_the_reward_is_taken_off_every_token():
    batch = advantage_batch(17)
    algorithm = AlgorithmConfig.model_validate(
        {
            "advantage": {"kind": "reinforce"},
            "kl": {"placement": "reward", "coefficient": 0.5, "estimator": "k1"},
        }
    )
    result = advantages_of(batch, algorithm)
    gap = KL_ESTIMATORS["k1"](batch.logprobs, batch.ref_logprobs)
    by_hand = dataclasses.replace(batch, token_rewards=batch.dense() - 0.5 * gap)
    torch.testing.assert_close(result.advantages, estimated(by_hand, "reinforce").advantages)
    assert "kl_ref" in result.metrics.values()
    kl = algorithm.kl.model_copy(update={"coefficient": 0.0})
    none = advantages_of(batch, algorithm.model_copy(update={"kl": kl})).advantages
    torch.testing.assert_close(none, estimated(batch, "reinforce").advantages)


def nothing(batch, *, scale):
    """A user's own estimator."""
    advantages = batch.at_tokens(batch.totals() * scale)
    return ADVANTAGES["reinforce"](batch, gamma=1.0).__class__(advantages=advantages)


def test_a_users_own_estimator_by_import_path():
    choice = {"kind": "function", "path": f"{__name__}:nothing", "params": {"scale": 3.0}}
    batch = per_sample([1.0, 2.0], [0, 0])
    result = advantages_of(batch, AlgorithmConfig.model_validate({"advantage": choice}))
    assert result.advantages.tolist() == [3.0, 6.0]


def test_tasks_are_compared_each_by_itself():
    """Rewards 0, 2 of one task and 10, 30 of another, in groups of one."""
    batch = AdvantageBatch(
        rows=Rows.of_lengths(torch.ones(4, dtype=torch.int64)),
        mask=torch.ones(4, dtype=torch.bool),
        rewards=torch.tensor([0.0, 10.0, 2.0, 30.0]),
        groups=torch.arange(4),
        tasks=torch.tensor([0, 1, 0, 1]),
    )
    found = estimated(batch, "grpo", baseline="task", normalize="none").advantages
    assert found.tolist() == [-1.0, -10.0, 1.0, 10.0]
    found = estimated(batch, "grpo", baseline="task", normalize="task", epsilon=0.0).advantages
    torch.testing.assert_close(found, torch.tensor([-1.0, -1.0, 1.0, 1.0]) / 2**0.5)
