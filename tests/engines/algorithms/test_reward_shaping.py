"""Reward shaping and the selection of samples, by hand."""

import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.corrections import ShapingConfig
from engines.algorithms.aggregation import Rows
from engines.algorithms.from_config import selection_of, shaped_rewards
from engines.algorithms.group_advantages import Groups
from engines.algorithms.reward_shaping import (
    length_penalty,
    overlong_penalty,
    repetition_penalty,
    without_truncated,
)
from engines.algorithms.sample_selection import best_of, informative_groups, select, top_p_groups

GROUPS = torch.tensor([7, 7, -1, -1, 7, 3])


def test_group_statistics_ignore_order_and_numbers():
    groups = Groups.of(GROUPS)
    values = torch.tensor([1.0, 2.0, 5.0, 5.0, 6.0, 9.0])
    assert groups.mean(values).tolist() == [5.0, 9.0, 3.0]
    assert groups.deviation(values)[0] == 0
    assert groups.deviation(values)[2] == pytest.approx(7.0**0.5)
    assert groups.alone().tolist() == [False, False, False, False, False, True]
    assert groups.ranks(values).tolist() == [2, 1, 0, 1, 0, 0]


def test_overlong_penalty_grows_in_the_buffer():
    lengths = torch.tensor([5, 6, 8, 10, 20])
    options = {"max_tokens": 10, "buffer": 4, "factor": 2.0}
    soft = overlong_penalty(lengths, floor=-2.0, **options)
    assert soft.tolist() == [0.0, 0.0, -1.0, -2.0, -2.0]
    assert overlong_penalty(lengths, floor=None, **options).tolist()[-1] == -7.0


def test_length_penalty_favours_the_shorter_right_answer():
    lengths = torch.tensor([10, 20, 30, 30])
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0])
    groups = torch.tensor([0, 0, 0, 1])
    penalty = length_penalty(lengths, rewards, groups, factor=2.0, threshold=0.0)
    assert penalty.tolist() == [1.0, 0.0, -1.0, 0.0]


def test_repetition_counts_distinct_ngrams():
    ids, rows = (
        torch.tensor([1, 2, 1, 2, 1, 9, 9, 9, 4]),
        Rows.of_lengths(torch.tensor([5, 0, 3, 1])),
    )
    penalty = repetition_penalty(ids, rows, ngram=2, factor=1.0)
    assert penalty.tolist() == pytest.approx([-0.5, 0.0, -0.5, 0.0])
    assert repetition_penalty(ids[:0], Rows.of_lengths(torch.tensor([0])), ngram=3, factor=1.0) == 0


def test_dynamic_sampling_drops_groups_without_variance():
    rewards = torch.tensor([0.1, 0.1, 0.0, 1.0, 0.1, 0.5])
    kept = informative_groups(rewards, GROUPS, keep_lone=True)
    assert kept.tolist() == [False, False, True, True, False, True]
    assert not informative_groups(rewards, GROUPS, keep_lone=False)[5]


def test_best_and_worst_of_each_group():
    rewards = torch.tensor([3.0, 1.0, 0.0, 1.0, 2.0, 0.5])
    assert best_of(rewards, GROUPS, best=1, worst=0).tolist() == [
        True, False, False, True, False, True,
    ]  # fmt: skip
    assert best_of(rewards, GROUPS, best=1, worst=1).tolist() == [
        True, True, True, True, False, True,
    ]  # fmt: skip


def test_top_p_keeps_the_groups_with_most_deviation():
    rewards = torch.tensor([0.0, 4.0, 0.0, 1.0, 2.0, 0.5])
    assert top_p_groups(rewards, GROUPS, share=0.7).tolist() == [
        True, True, False, False, True, False,
    ]  # fmt: skip
    assert top_p_groups(rewards, GROUPS, share=1.0).tolist() == [True] * 5 + [False]
    assert not top_p_groups(torch.zeros(6), GROUPS, share=0.5).any()


def test_selection_steps_see_what_is_left():
    rewards = torch.tensor([3.0, 1.0, 1.0, 1.0, 2.0, 0.5])
    steps = [{"kind": "informative", "keep_lone": False}, {"kind": "best_of", "best": 2}]
    chosen = selection_of(AlgorithmConfig.model_validate({"selection": steps}))
    result = select(rewards, GROUPS, chosen)
    assert result.keep.tolist() == [True, False, False, False, True, False]
    assert result.metrics == {"informative_left_out": 3.0, "best_of_left_out": 1.0}
    assert select(rewards, GROUPS, ()).keep.all()


@pytest.mark.parametrize(
    ("policy", "reward", "tokens"), [("keep", 1.0, 3), ("zero", 0.0, 3), ("mask", 1.0, 0)]
)
def test_cut_off_samples(policy, reward, tokens):
    rows, cut = Rows.of_lengths(torch.tensor([2, 3])), torch.tensor([False, True])
    result = shaped_rewards(
        torch.tensor([1.0, 1.0]),
        torch.tensor([0, 0]),
        rows.lengths,
        cut,
        ShapingConfig(truncated=policy),
        max_tokens=3,
    )
    mask = torch.ones(5, dtype=torch.bool)
    if policy == "mask":
        mask = without_truncated(mask, rows, cut)
    assert result.rewards.tolist() == [1.0, reward]
    assert rows.tokens(mask).tolist() == [2, tokens]
    assert result.metrics.values()["truncated"] == 0.5


def test_penalties_add_to_the_reward():
    shaping = ShapingConfig.model_validate(
        {"overlong": {"buffer": 2}, "repetition": {"ngram": 1, "factor": 0.5}, "length": {}}
    )
    rows = Rows.of_lengths(torch.tensor([2, 4]))
    result = shaped_rewards(
        torch.tensor([1.0, 1.0]),
        torch.tensor([0, 0]),
        rows.lengths,
        torch.tensor([False, False]),
        shaping,
        max_tokens=4,
        repetition=repetition_penalty(torch.tensor([1, 2, 3, 3, 3, 3]), rows, ngram=1, factor=0.5),
    )
    # Overlong: 0, -1. Repetition: 0, -0.5 * 3/4. Length: +1/2, -1/2.
    assert result.rewards.tolist() == pytest.approx([1.5, 1.0 - 1.0 - 0.375 - 0.5])
    assert result.metrics.values()["penalty_overlong"] == pytest.approx(-0.5)
