"""The examples in the docstrings of the carriers are true."""

import math

import pytest
from torch import tensor

from engines.algorithms.aggregation import MetricSums, Rows
from engines.algorithms.group_advantages import Groups, dr_grpo
from engines.algorithms.inputs import AdvantageBatch, PolicyBatch
from engines.algorithms.losses import gspo
from engines.algorithms.rollout_correction import Mismatch


def test_rows():
    rows = Rows.of_lengths(tensor([2, 0, 1]))
    assert rows.offsets.tolist() == [0, 2, 2, 3]
    assert rows.ids.tolist() == [0, 0, 2]
    assert rows.sum(tensor([1.0, 2.0, 5.0])).tolist() == [3.0, 0.0, 5.0]
    assert rows.spread(tensor([7.0, 8.0, 9.0])).tolist() == [7.0, 7.0, 9.0]


def test_groups():
    rewards = tensor([1.0, 5.0, 3.0, math.nan])
    groups = Groups.of(tensor([7, 4, 7, 4]), ~rewards.isnan())
    assert groups.member.tolist() == [1, 0, 1, 0]
    assert groups.sizes.tolist() == [1.0, 2.0]
    assert groups.mean(rewards).tolist() == [5.0, 2.0]
    assert groups.alone().tolist() == [False, True, False, True]


def test_advantage_batch():
    batch = AdvantageBatch(
        rows=Rows.of_lengths(tensor([2, 1, 3])),
        mask=tensor([True, True, True, True, False, True]),
        rewards=tensor([1.0, 0.0, 0.5]),
        groups=tensor([7, 7, 9]),
    )
    assert dr_grpo(batch, lone="zero").advantages.tolist() == [0.5, 0.5, -0.5, 0.0, 0.0, 0.0]


def test_policy_batch():
    batch = PolicyBatch(
        rows=Rows.of_lengths(tensor([2, 1])),
        mask=tensor([True, True, True]),
        logprobs=tensor([-1.0, -0.6, -2.0], requires_grad=True),
        advantages=tensor([0.5, 0.5, -0.5]),
        old_logprobs=tensor([-1.0, -1.0055, -2.0]),
    )
    assert batch.log_ratio().tolist() == pytest.approx([0.0, 0.4055, 0.0], abs=1e-6)
    loss = gspo(batch, clip_low=0.1, clip_high=0.1)
    assert loss.values.tolist() == pytest.approx([-0.55, -0.55, 0.5])


def test_mismatch():
    mismatch = Mismatch(
        rows=Rows.of_lengths(tensor([2, 1])),
        mask=tensor([True, True, True]),
        logprobs=tensor([-0.1, -1.7, -0.5]),
        rollout_logprobs=tensor([-0.1, -1.0, math.nan]),
    )
    assert mismatch.log_ratio().tolist() == pytest.approx([0.0, -0.7, 0.0])


def test_metric_sums():
    a = MetricSums(means={"kl": tensor([0.3, 2.0])}, maxima={"ratio_max": tensor(1.5)})
    b = MetricSums(means={"kl": tensor([0.3, 1.0])}, maxima={"ratio_max": tensor(1.2)})
    assert (a + b).values() == pytest.approx({"kl": 0.2, "ratio_max": 1.5})
